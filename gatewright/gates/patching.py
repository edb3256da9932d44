"""An edit of gates as bytes: which places of which files change, and to what.

Every format is a set of files with tensors at known offsets, so an edit is a set of byte
patches; no tensor except A_log is ever looked at.
"""

from __future__ import annotations

import dataclasses
import errno
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from gatewright.checkpoints import deepspeed_zero, torch_files
from gatewright.checkpoints.archives import Entry
from gatewright.checkpoints.storage import Checkpoint, StoredTensor
from gatewright.errors import UserError

BLOCK_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True)
class Patch:
    """New bytes for one place of one file."""

    start: int
    data: bytes

    @property
    def end(self) -> int:
        return self.start + len(self.data)


Patches = Mapping[str, Sequence[Patch]]
"""File -> patches in the order of their offsets; files without patches are left out."""


def patches_of(
    checkpoint: Checkpoint,
    changed: Iterable[tuple[StoredTensor, np.ndarray]],
    file: str | None = None,
) -> dict[str, list[Patch]]:
    """Return the byte patches that give tensors new contents, checksums of zip members included.

    Args:
        changed: (tensor, its whole new raw array).
        file: only patches of this file.
    """
    found: dict[str, list[Patch]] = {}
    entries: dict[str, dict[Entry, list[Patch]]] = {}
    for tensor, array in changed:
        for piece in tensor.pieces:
            if file is not None and piece.file != file:
                continue
            patch = Patch(piece.start, np.ascontiguousarray(array[piece.index()]).tobytes())
            if not _differs(checkpoint.root / piece.file, patch):
                continue
            found.setdefault(piece.file, []).append(patch)
            if piece.entry is not None:
                members = entries.setdefault(piece.file, {})
                members.setdefault(piece.entry, []).append(patch)
    for name, members in entries.items():
        for entry, inside in members.items():
            crc = struct.pack("<I", _checksum(checkpoint.root / name, entry, inside))
            found[name].extend(Patch(at, crc) for at in entry.checksums)
    for patches in found.values():
        patches.sort(key=lambda p: p.start)
    return found


def refuse_shared(checkpoint: Checkpoint, tensors: Iterable[StoredTensor]) -> None:
    """Refuse to edit tensors whose bytes belong to another tensor too.

    torch.save keeps tensors that are views of one storage as such.  The readers of the other
    formats refuse tensors that overlap.

    Raises:
        UserError: an edit would change another tensor; both are named.
    """
    if checkpoint.format not in ("pytorch", "deepspeed"):
        return
    inert = deepspeed_zero.INERT if checkpoint.format == "deepspeed" else ()
    saved: dict[str, list[tuple[str, int, int]]] = {}
    for tensor in tensors:
        for piece in tensor.pieces:
            path = checkpoint.root / piece.file
            if piece.file not in saved:
                whole = torch_files.read_saved(path, allowed_prefixes=inert)
                saved[piece.file] = [
                    (name, t.start, t.start + t.nbytes) for name, t in torch_files.walk(whole)
                ]
            end = piece.start + tensor.nbytes
            same = [n for n, a, b in saved[piece.file] if max(a, piece.start) < min(b, end)]
            if len(same) > 1:  # the tensor itself is one of them
                raise UserError(
                    f"{path}: {same[0]} and {same[1]} share bytes, so editing one would change "
                    "the other; clone() both and save the file again"
                )


def _differs(path: Path, patch: Patch) -> bool:
    with open(path, "rb") as f:
        f.seek(patch.start)
        return f.read(len(patch.data)) != patch.data


def _checksum(path: Path, entry: Entry, patches: Sequence[Patch]) -> int:
    """Return the CRC-32 that a zip member will have once it is patched."""
    crc = 0
    ordered = sorted(patches, key=lambda p: p.start)
    for block in patched_blocks(path, ordered, entry.start, entry.size):
        crc = zlib.crc32(block, crc)
    return crc


def patched_blocks(
    path: Path, patches: Sequence[Patch], start: int = 0, size: int | None = None
) -> Iterator[memoryview]:
    """Yield a file's bytes in blocks as they will be after patching (a reused buffer)."""
    buffer = bytearray(BLOCK_BYTES)
    view = memoryview(buffer)
    left = path.stat().st_size - start if size is None else size
    at = start
    with open(path, "rb", buffering=0) as f:
        f.seek(start)
        while left:
            n = f.readinto(view[: min(left, BLOCK_BYTES)])
            if not n:
                raise OSError(errno.EIO, "file became shorter while it was read", str(path))
            for patch in patches:
                low, high = max(patch.start, at), min(patch.end, at + n)
                if low < high:
                    view[low - at : high - at] = patch.data[low - patch.start : high - patch.start]
            yield view[:n]
            at += n
            left -= n
