"""Copies of a checkpoint in which only the patched bytes differ.

The kernel copies, several files at once, and hashes are computed beside it on the other cores;
what the filesystem can share is linked instead on request.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import errno
import fcntl
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from gatewright import artifact
from gatewright.checkpoints.storage import Checkpoint
from gatewright.gates import marks
from gatewright.gates.patching import BLOCK_BYTES, Patch
from gatewright.gates.undo_record import UNDO
from gatewright.gates.widening import widen_file

_FICLONE = 0x40049409  # ioctl of Linux filesystems that can share blocks (btrfs, XFS)
COPIES = 2
"""Files copied at once: one `copy_file_range` keeps one core busy."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".distcp")
"""Endings of the files that may be hard-linked: the others are small, and people edit them."""
_KERNEL_BYTES = 64 << 20  # copied by one system call


@dataclasses.dataclass
class Output:
    """A copy in the making: its folder, what to change in each file, the hashes so far."""

    folder: Path
    patches: Callable[[str], Sequence[Patch]]
    """File -> its patches, by offset; asked when the file's turn comes and dropped after it."""
    hashes: dict[str, str]
    """File -> hash or mark (see `marks`), filled as files are done."""
    widened: Callable[[str], Mapping[str, np.ndarray]] = lambda name: {}
    """File -> its gates in their new types if it holds any to widen; such a file has no patches."""


def write_copies(
    checkpoint: Checkpoint,
    outputs: Sequence[Output],
    *,
    link: bool = False,
    whole_hashes: bool = False,
    progress: Callable[[int], None] = lambda n: None,
) -> dict[str, str]:
    """Write a checkpoint's files into several folders in one pass, patched.

    Args:
        outputs: folders to fill (they exist and are empty); their `hashes` are filled too.
        link: hard-link unchanged weights and reflink the rest where the filesystem can.
        whole_hashes: hash large files whole instead of marking them (see `marks`).
        progress: told the bytes of the source as they are done.

    Returns:
        Hash or mark of every file of the source, by relative path.
    """
    names = [name for name in checkpoint.files if name not in (artifact.MANIFEST, UNDO)]
    known = marks.known(checkpoint.root, whole=whole_hashes)
    lock = threading.Lock()

    def count(n: int) -> None:
        with lock:
            progress(n)

    workers = max(2, min(8, os.cpu_count() or 2))
    source_hashes: dict[str, str] = {}
    with (
        concurrent.futures.ThreadPoolExecutor(COPIES) as copier,
        concurrent.futures.ThreadPoolExecutor(workers) as pool,
    ):
        running: list[_File] = []
        try:
            for name in names:
                size = (checkpoint.root / name).stat().st_size
                whole = whole_hashes or size <= marks.WHOLE_BYTES
                file = _File(checkpoint.root, name, outputs, whole, known.get(name))
                running.append(file)
                file.start(copier, pool, link, count)
                if len(running) > workers:  # these hold patches: few of them, whatever the size
                    first = running.pop(0)
                    source_hashes[first.name] = first.finish()
            for file in running:
                source_hashes[file.name] = file.finish()
        except BaseException:
            copier.shutdown(cancel_futures=True)
            pool.shutdown(cancel_futures=True)
            raise
    return source_hashes


class _File:
    """One file of the checkpoint on its way into every output."""

    def __init__(
        self, root: Path, name: str, outputs: Sequence[Output], whole: bool, known: str | None
    ) -> None:
        self.name, self._source, self._outputs = name, root / name, outputs
        self._whole, self._known = whole, known
        self._patches = [output.patches(name) for output in outputs]
        self._widened = [output.widened(name) for output in outputs]

    def start(
        self,
        copier: concurrent.futures.Executor,
        pool: concurrent.futures.Executor,
        link: bool,
        progress: Callable[[int], None],
    ) -> None:
        """Begin to copy and to hash; every part goes on by itself."""
        self._copied = copier.submit(self._write, link, progress)
        if self._known is None:
            mark = marks.digest if self._whole else marks.mark_of_ends
            self._hashed = pool.submit(mark, self._source)
        self._hashes = [
            pool.submit(marks.digest, self._source, own) if own and self._whole else None
            for own in self._patches
        ]

    def finish(self) -> str:
        """Wait for all of it, give the outputs their hashes, and return the source's."""
        widened = self._copied.result()
        mark = self._known if self._known is not None else self._hashed.result()
        for i, output in enumerate(self._outputs):
            hashed = self._hashes[i]
            if self._widened[i]:
                own = widened[i] or marks.mark_of_widened(mark, self._widened[i])
            elif hashed is not None:
                own = hashed.result()
            else:
                own = marks.mark_of_patched(mark, self._patches[i]) if self._patches[i] else mark
            output.hashes[self.name] = own
        return mark

    def _may_link(self, output: int) -> bool:
        return not self._patches[output] and self.name.endswith(WEIGHTS)

    def _write(self, link: bool, progress: Callable[[int], None]) -> list[str | None]:
        """Write the file into every output; return the hashes of widened ones."""
        source = self._source
        hashes: list[str | None] = [None] * len(self._outputs)
        copied = []
        targets = [output.folder / self.name for output in self._outputs]
        for i, target in enumerate(targets):
            target.parent.mkdir(parents=True, exist_ok=True)
            if self._widened[i]:
                hashes[i] = widen_file(source, target, self._widened[i], hashed=self._whole)
            elif not (link and share(source, target, may_link=self._may_link(i))):
                copied.append(target)
        if len(copied) == 1:
            _copy_one(source, copied[0], progress)
        elif copied:
            _copy_many(source, copied, progress)
        else:
            progress(source.stat().st_size)
        for target, patches in zip(targets, self._patches, strict=True):
            if patches:
                with open(target, "r+b", buffering=0) as f:
                    for patch in patches:
                        f.seek(patch.start)
                        f.write(patch.data)
        return hashes


def share(source: Path, target: Path, *, may_link: bool) -> bool:
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
                n = os.copy_file_range(s.fileno(), t.fileno(), min(left, _KERNEL_BYTES))
            except OSError as e:
                if e.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                    raise
                n = os.sendfile(t.fileno(), s.fileno(), None, min(left, _KERNEL_BYTES))
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
