"""Editing gates inside a checkpoint, with a way back.

The bytes to be replaced are first written to an undo file beside the checkpoint's own files
and synced; only then is anything changed.  Whatever moment the machine dies at, `undo`
restores the original bytes, and until it has, the folder refuses further edits.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gatewright import artifact
from gatewright.errors import UserError
from gatewright.gates import marks, undo_record
from gatewright.gates.edits import Dts, Plan
from gatewright.gates.find import Gates
from gatewright.gates.patching import Patch, Patches, patches_of, refuse_shared
from gatewright.gates.report import edit_report
from gatewright.gates.rewrite import gate_scale
from gatewright.gates.undo_record import DONE, UNDO, WRITING, Record, Replaced


def edit(gates: Gates, plan: Plan, dts: Dts) -> dict[str, Any]:
    """Change the gates of a checkpoint where it lies; returns the edit's report.

    Raises:
        UserError: an earlier in-place edit has not been undone or its undo file removed; a
            file is a link or has further hard links (an edit would reach another folder); the
            manifest is damaged; or the disk fails (the message says whether --undo is needed).
    """
    checkpoint = gates.checkpoint
    root = checkpoint.root
    undo_file = root / UNDO
    if undo_file.exists():
        raise UserError(
            f"{undo_file}: an earlier in-place edit can still be undone (--undo); undo it, or "
            "remove the file to keep that edit for good"
        )
    refuse_shared(checkpoint, plan.touched(gates))
    patches = patches_of(checkpoint, plan.changes(gates))
    for name in patches:
        path = root / name
        if path.is_symlink() or path.stat().st_nlink > 1:
            raise UserError(f"{path}: is shared with another folder (a link); use --out instead")
        if not os.access(path, os.W_OK):
            raise UserError(f"{path}: cannot be written")
    report = edit_report(plan, gates, dts)
    old, new = _manifests(root, patches, plan, report, gate_scale(gates, plan))
    record = Record(WRITING, plan.edit.describe(), old, _replaced(root, patches))
    try:
        record.write(root, WRITING)
        _sync_folder(root)
    except OSError as e:
        with contextlib.suppress(OSError):
            undo_file.unlink(missing_ok=True)
        raise UserError(f"{undo_file}: cannot be written ({e.strerror}); nothing changed") from e
    with _told_to_undo(root):
        for name, rows in patches.items():
            _write(root / name, rows)
        if new is not None:
            artifact.write_json(root / artifact.MANIFEST, new)
        record.write(root, DONE)
    return report


def _replaced(root: Path, patches: Patches) -> list[Replaced]:
    rows = []
    for name, group in patches.items():
        with open(root / name, "rb") as f:
            for patch in group:
                f.seek(patch.start)
                before = f.read(len(patch.data))
                rows.append(Replaced(name, patch.start, before, patch.data))
    return rows


def _manifests(
    root: Path, patches: Patches, plan: Plan, report: dict[str, Any], scale: float | None
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return the folder's manifest as it is and as the edit will make it; None without one."""
    path = root / artifact.MANIFEST
    if not path.is_file():
        return None, None
    old, new = artifact.read_manifest(root), artifact.read_manifest(root)
    try:
        for name, rows in patches.items():
            if name in new["files"]:
                new["files"][name]["sha256"] = marks.digest(root / name, rows)
        new["content_hash"] = artifact.content_hash_of(
            {name: entry["sha256"] for name, entry in new["files"].items()}
        )
        extra = new.setdefault("extra", {})
        extra["gate_scale"] = scale  # later stages and the report believe it
        edits = extra.setdefault("edits_in_place", [])
        edits.append({"edit": plan.edit.describe(), "gates": report})
    except (KeyError, TypeError, AttributeError) as e:
        raise UserError(
            f"{path}: is incomplete ({type(e).__name__}: {e}), nothing changed; rename it if it "
            "is another program's, or use --out"
        ) from e
    return old, new


def undo(root: Path) -> int:
    """Restore the bytes that the last in-place edit replaced; returns how many places.

    A file that has got further hard links since (`--link` from the edited folder) is replaced by
    a restored copy, so that the other folder keeps what it holds.

    Raises:
        UserError: there is no undo file, it is damaged, or the checkpoint changed since.
    """
    record = undo_record.read(root)
    for row in record.replaced:
        path = root / row.file
        with open(path, "rb") as f:
            f.seek(row.start)
            now = f.read(len(row.before))
        if path.is_symlink() or not row.describes(now):
            raise UserError(f"{path}: changed since the edit; it is left as it is")
    with _told_to_undo(root):
        record.write(root, WRITING)  # what is half restored is no sound input either
        for name, rows in itertools.groupby(record.replaced, key=lambda row: row.file):
            patches = [Patch(row.start, row.before) for row in rows]
            if (root / name).stat().st_nlink > 1:
                _replace(root / name, patches)
            else:
                _write(root / name, patches)
        if record.manifest is not None:
            artifact.write_json(root / artifact.MANIFEST, record.manifest)
        (root / UNDO).unlink()
        _sync_folder(root)
    return len(record.replaced)


def _write(path: Path, patches: Sequence[Patch]) -> None:
    with open(path, "r+b") as f:
        for patch in patches:
            f.seek(patch.start)
            f.write(patch.data)
        f.flush()
        os.fsync(f.fileno())


def _replace(path: Path, patches: list[Patch]) -> None:
    """Patch a copy and put it in the file's place: other names of the file are not reached."""
    fd, copy = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(fd)
    try:
        shutil.copy2(path, copy)
        _write(Path(copy), patches)
        os.replace(copy, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(copy)
        raise


@contextlib.contextmanager
def _told_to_undo(root: Path) -> Iterator[None]:
    """Say the way back when the disk fails after the undo file has been written."""
    try:
        yield
    except OSError as e:
        raise UserError(
            f"{e.filename or root}: cannot be written ({e.strerror}), so the gates are half "
            f"changed; make it writable, then python -m tools.scale_gates {root} --undo"
        ) from e


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
