"""Compiles the C++ kernels once per machine and loads them.

The library is plain C++ with a C interface, without torch's headers: it compiles in seconds
instead of a minute and does not depend on torch's C++ ABI.  It shares the OpenMP threads of
torch, whose libgomp is already loaded under the same name.

The result lies in a per-user cache under a name made of everything that decides it: sources,
compiler, flags, CPU features and torch's version.  Processes that start together wait for the
one that compiles; a killed compilation leaves only a temporary file.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from gatewright import processor

_FOLDER = Path(__file__).parent
_SOURCES = (
    *("ssd.cpp", "conv.cpp", "norm.cpp", "step.cpp", "loss.cpp"),
    *("gemm.cpp", "attention.cpp", "rotary.cpp"),
    *("rank_one.cpp", "rank_one_scan.cpp", "recall_cell.cpp", "small_mlp.cpp"),
)
_HEADERS = ("vec.h", "rank_one.h", "recall_cell.h", "layer_norm.h")
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
_TIMEOUT_S = 300


class BuildError(Exception):
    """The C++ kernels cannot be had here; the message says why in one line."""


def cache_folder() -> Path:
    """Return where compiled kernels are kept: $GATEWRIGHT_CACHE or ~/.cache/gatewright."""
    base = os.environ.get("GATEWRIGHT_CACHE")
    if base:
        return Path(base) / "kernels"
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "gatewright" / "kernels"


def compiler() -> str | None:
    """Return the C++ compiler: $CXX, else g++, else clang++; None without any."""
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and shutil.which(name):
            return shutil.which(name)
    return None


def _key(cxx: str) -> str:
    digest = hashlib.sha256()
    for name in (*_SOURCES, *_HEADERS):
        digest.update((_FOLDER / name).read_bytes())
    version = subprocess.run(
        [cxx, "--version"], capture_output=True, text=True, timeout=30, check=False
    ).stdout
    for part in (" ".join(_FLAGS), cxx, version, processor.features(), torch.__version__):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:20]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)  # released when the file closes, also when we are killed
        yield


def _compile(cxx: str, target: Path) -> None:
    fd, partial = tempfile.mkstemp(dir=target.parent, prefix=".building-", suffix=".so")
    os.close(fd)
    command = [cxx, *_FLAGS, *(str(_FOLDER / s) for s in _SOURCES), "-o", partial]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        if done.returncode:
            tail = (done.stderr.strip().splitlines() or ["no message"])[0]
            raise BuildError(f"{cxx} failed: {tail}")
        os.chmod(partial, 0o755)
        os.replace(partial, target)
    except (OSError, subprocess.SubprocessError) as e:
        raise BuildError(f"{cxx} could not run: {e}") from e
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)


def library_path() -> Path:
    """Return the compiled library, compiling it first if this machine has not yet.

    Raises:
        BuildError: no compiler, it failed, or the cache cannot be written.
    """
    cxx = compiler()
    if cxx is None:
        raise BuildError("no C++ compiler (set CXX or install g++)")
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"kernels-{_key(cxx)}.so"
        if not target.exists():
            with _locked(folder / f"{target.stem}.lock"):
                if not target.exists():  # another process may have compiled while we waited
                    _compile(cxx, target)
    except (OSError, subprocess.SubprocessError) as e:
        raise BuildError(f"{cache_folder()}: {e}") from e
    return target


def load_library() -> ctypes.CDLL:
    """Compile if needed and load the kernels.

    Raises:
        BuildError: see `library_path`, or the library does not load.
    """
    path = library_path()
    try:
        return ctypes.CDLL(str(path))
    except OSError as e:
        raise BuildError(f"{path}: {e}") from e
