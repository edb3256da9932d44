"""Writing edited gates: copies of a checkpoint in which only A_log's bytes differ.

Every format is a set of files with tensors at known offsets, so an edit is a set of byte
patches.  A copy is made by the kernel, patched at those offsets, and hashed on other threads
while it is being copied; no tensor except A_log is ever looked at.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from gatewright import artifact
from gatewright.checkpoints.archives import Entry
from gatewright.checkpoints.storage import Checkpoint, StoredTensor
from gatewright.gates.widening import widen_file

BLOCK_BYTES = 4 << 20
_FICLONE = 0x40049409  # ioctl of Linux filesystems that can share blocks (btrfs, XFS)


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


def _differs(path: Path, patch: Patch) -> bool:
    with open(path, "rb") as f:
        f.seek(patch.start)
        return f.read(len(patch.data)) != patch.data


def _checksum(path: Path, entry: Entry, patches: Sequence[Patch]) -> int:
    """Return the CRC-32 that a zip member will have once it is patched."""
    crc = 0
    ordered = sorted(patches, key=lambda p: p.start)
    for block in _patched_blocks(path, ordered, entry.start, entry.size):
        crc = zlib.crc32(block, crc)
    return crc


def _patched_blocks(
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


def digest(path: Path, patches: Sequence[Patch] = ()) -> str:
    """Return the hex SHA-256 of a file as it will be after patching."""
    sha = hashlib.sha256()
    for block in _patched_blocks(path, patches):
        sha.update(block)
    return sha.hexdigest()


END_BYTES = 1 << 20


def digest_of_ends(path: Path, patches: Sequence[Patch] = ()) -> str:
    """Return a mark of a file's content that costs nothing: its size, both ends, every patch.

    Files up to two ends long are hashed whole.  Two files that differ only in the middle get
    the same mark, so it traces a checkpoint but does not prove its content.
    """
    size = path.stat().st_size
    if size <= 2 * END_BYTES:
        return digest(path, patches)
    sha = hashlib.sha256(str(size).encode())
    for start in (0, size - END_BYTES):
        for block in _patched_blocks(path, patches, start, END_BYTES):
            sha.update(block)
    for patch in patches:
        sha.update(f"{patch.start}:".encode() + patch.data)
    return artifact.UNHASHED + sha.hexdigest()


@dataclasses.dataclass
class Output:
    """A copy in the making: its folder, what to change in each file, the hashes so far."""

    folder: Path
    patches: Callable[[str], Sequence[Patch]]
    """File -> its patches, by offset; asked when the file's turn comes and dropped after it."""
    hashes: dict[str, str]
    widened: Callable[[str], Mapping[str, np.ndarray]] = lambda name: {}
    """File -> gates that it shall hold in fp32 (see `widening`); such a file has no patches."""


def write_copies(
    checkpoint: Checkpoint,
    outputs: Sequence[Output],
    *,
    link: bool = False,
    whole_hashes: bool = True,
    progress: Callable[[int], None] = lambda n: None,
) -> dict[str, str]:
    """Write a checkpoint's files into several folders in one pass, patched; return its hashes.

    Args:
        outputs: folders to fill (they exist and are empty); their `hashes` are filled too.
        link: hard-link or reflink what the filesystem can share instead of copying it.
        whole_hashes: hash large files whole, not only their ends (see `digest_of_ends`).
        progress: told the bytes of the source as they are done.

    Returns:
        SHA-256 of every file of the source, by relative path.
    """
    root = checkpoint.root
    known = known_hashes(root)
    mark = digest if whole_hashes else digest_of_ends
    files = [name for name in checkpoint.files if name != artifact.MANIFEST]
    source_hashes: dict[str, str] = {}
    workers = max(2, min(8, os.cpu_count() or 2))
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        earlier: list[_Hashing] = []
        try:
            for name in files:
                hashing: list[_Hashing] = []
                if name in known:
                    source_hashes[name] = known[name]
                else:
                    hashing.append((source_hashes, name, pool.submit(mark, root / name)))
                patches = [output.patches(name) for output in outputs]
                for output, own in zip(outputs, patches, strict=True):
                    if own:
                        future = pool.submit(mark, root / name, own)
                        hashing.append((output.hashes, name, future))
                _write_file(root / name, name, outputs, patches, link, progress)
                _collect(earlier)  # at most two files' patches are in memory
                earlier = hashing
            _collect(earlier)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    for output in outputs:
        output.hashes.update((n, h) for n, h in source_hashes.items() if n not in output.hashes)
    return source_hashes


_Hashing = tuple[dict[str, str], str, "concurrent.futures.Future[str]"]


def _collect(hashing: Sequence[_Hashing]) -> None:
    for into, name, future in hashing:
        into[name] = future.result()


def known_hashes(root: Path) -> dict[str, str]:
    """Return the SHA-256 that a folder's manifest records, for files that did not change size.

    A manifest is believed only for files that are not newer than it.
    """
    path = root / artifact.MANIFEST
    if not path.is_file():
        return {}
    try:
        files = json.loads(path.read_text())["files"]
        written = path.stat().st_mtime_ns
        return {
            name: entry["sha256"]
            for name, entry in files.items()
            if not str(entry["sha256"]).startswith(artifact.UNHASHED)
            and (root / name).is_file()
            and (root / name).stat().st_size == entry["bytes"]
            and (root / name).stat().st_mtime_ns <= written
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def _write_file(
    source: Path,
    name: str,
    outputs: Sequence[Output],
    patches: Sequence[Sequence[Patch]],
    link: bool,
    progress: Callable[[int], None],
) -> None:
    size = source.stat().st_size
    copied = []
    for output, own in zip(outputs, patches, strict=True):
        target = output.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        widened = output.widened(name)
        if widened:
            output.hashes[name] = widen_file(source, target, widened)
        elif not (link and _share(source, target, may_link=not own)):
            copied.append(target)
    if len(copied) == 1:
        _copy_one(source, copied[0], progress)
    elif copied:
        _copy_many(source, copied, progress)
    else:
        progress(size)
    for output, own in zip(outputs, patches, strict=True):
        if own:
            with open(output.folder / name, "r+b", buffering=0) as f:
                for patch in own:
                    f.seek(patch.start)
                    f.write(patch.data)


def _share(source: Path, target: Path, *, may_link: bool) -> bool:
    """Share a file's blocks with a copy: a hard link if it may be one, else a reflink."""
    if may_link:
        with contextlib.suppress(OSError):  # another filesystem, or links not permitted
            os.link(os.path.realpath(source), target)
            return True
    with open(source, "rb") as s, open(target, "wb") as t:
        try:
            fcntl.ioctl(t.fileno(), _FICLONE, s.fileno())
        except OSError:  # this filesystem cannot share blocks
            return False
    return True


def _copy_one(source: Path, target: Path, progress: Callable[[int], None]) -> None:
    """Copy inside the kernel where it can, like cp does."""
    with open(source, "rb", buffering=0) as s, open(target, "wb", buffering=0) as t:
        left = os.fstat(s.fileno()).st_size
        while left:
            try:
                n = os.copy_file_range(s.fileno(), t.fileno(), min(left, 64 << 20))
            except OSError as e:
                if e.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                    raise
                n = os.sendfile(t.fileno(), s.fileno(), None, min(left, 64 << 20))
            if n == 0:
                raise OSError(errno.EIO, "file became shorter while it was copied", str(source))
            left -= n
            progress(n)


def _copy_many(source: Path, targets: Sequence[Path], progress: Callable[[int], None]) -> None:
    """Read once, write to each target."""
    with contextlib.ExitStack() as stack:
        s = stack.enter_context(open(source, "rb", buffering=0))
        opened = [stack.enter_context(open(t, "wb", buffering=0)) for t in targets]
        view = memoryview(bytearray(BLOCK_BYTES))
        while n := s.readinto(view):
            for t in opened:
                done = 0
                while done < n:
                    done += t.write(view[done:n])
            progress(n)
