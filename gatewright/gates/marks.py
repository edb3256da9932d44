"""What a manifest says about a copy's files: their hashes, or marks that cost less.

SHA-256 over a whole file takes longer than copying it (1.8 GB/s on one core against 2.4).  So
large files get a mark unless hashes are asked for: an unchanged file the hash that the input's
manifest states, or else its size and both ends; an edited file what it was made of, which is
the input's hash or mark and every patch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gatewright import artifact
from gatewright.gates.patching import Patch, patched_blocks

END_BYTES = 1 << 20
WHOLE_BYTES = 64 << 20
"""Files up to this size are always hashed whole."""


def digest(path: Path, patches: Sequence[Patch] = ()) -> str:
    """Return the hex SHA-256 of a file as it will be after patching."""
    sha = hashlib.sha256()
    for block in patched_blocks(path, patches):
        sha.update(block)
    return sha.hexdigest()


def mark_of_ends(path: Path) -> str:
    """Return a mark of a file's content that takes no time: its size and both ends.

    Files up to `WHOLE_BYTES` are hashed whole.  Two files that differ only in the middle get
    the same mark, so it traces a checkpoint but does not prove its content.
    """
    size = path.stat().st_size
    if size <= max(WHOLE_BYTES, 2 * END_BYTES):
        return digest(path)
    sha = hashlib.sha256(str(size).encode())
    for start in (0, size - END_BYTES):
        for block in patched_blocks(path, (), start, END_BYTES):
            sha.update(block)
    return artifact.UNHASHED + sha.hexdigest()


def mark_of_patched(source: str, patches: Sequence[Patch]) -> str:
    """Return the mark of an edited file: the hash or mark of what it was, and the edit.

    Where `source` is a hash, equal marks mean equal bytes.
    """
    sha = hashlib.sha256(source.encode())
    for patch in patches:
        sha.update(f"\n{patch.start}:".encode() + patch.data)
    return artifact.UNHASHED + sha.hexdigest()


def mark_of_widened(source: str, gates: Mapping[str, np.ndarray]) -> str:
    """Return the mark of a file whose gates became fp32: what it was, and the new values."""
    sha = hashlib.sha256(source.encode())
    for name, values in gates.items():
        sha.update(f"\n{name}:".encode() + values.tobytes())
    return artifact.UNHASHED + sha.hexdigest()


def known(root: Path, *, whole: bool) -> dict[str, str]:
    """Return what a folder's manifest states of files that have not changed since.

    A file is believed to be unchanged that has its recorded size and is not newer than the
    manifest.

    Args:
        whole: only whole hashes, no marks.
    """
    path = root / artifact.MANIFEST
    if not path.is_file():
        return {}
    try:
        files: dict[str, Any] = json.loads(path.read_text())["files"]
        written = path.stat().st_mtime_ns
        return {
            name: entry["sha256"]
            for name, entry in files.items()
            if isinstance(entry["sha256"], str)
            and not (whole and entry["sha256"].startswith(artifact.UNHASHED))
            and (root / name).is_file()
            and (root / name).stat().st_size == entry["bytes"]
            and (root / name).stat().st_mtime_ns <= written
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}  # another program's, or damaged: then nothing is known
