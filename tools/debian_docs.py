"""Fetch Debian documentation packages without installing them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from gatewright.errors import UserError

_NAME = re.compile(r"[a-z0-9][a-z0-9+.-]+")
_SECONDS = 600


def _run(command: list[str], cwd: Path, doing: str) -> None:
    try:
        subprocess.run(
            command, cwd=cwd, check=True, timeout=_SECONDS, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired as e:
        raise UserError(f"{doing}: took longer than {_SECONDS} s") from e
    except subprocess.CalledProcessError as e:
        said = e.stderr.strip().splitlines() or [f"exit code {e.returncode}"]
        raise UserError(f"{doing}: {said[-1]}") from e


def unpack(package: str, scratch: Path) -> Path:
    """Download a package, unpack it below `scratch`, and return the folder of its documents.

    Raises:
        UserError: not a package name, no apt-get here, no such package, or no network.
    """
    if not _NAME.fullmatch(package):
        raise UserError(f"--debian {package}: is not a Debian package name")
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        raise UserError("--debian: needs apt-get and dpkg-deb (a Debian or Ubuntu machine)")
    root = scratch / package
    root.mkdir(parents=True)
    _run(["apt-get", "download", package], root, f"--debian {package}: cannot download it")
    archive = next(root.glob("*.deb"), None)
    if archive is None:
        raise UserError(f"--debian {package}: apt-get left no .deb file")
    _run(["dpkg-deb", "-x", archive.name, "."], root, f"--debian {package}: cannot unpack it")
    archive.unlink()
    documents = root / "usr" / "share"
    if not documents.is_dir():
        raise UserError(f"--debian {package}: holds nothing in usr/share")
    return documents
