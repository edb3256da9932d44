"""Editing gates inside a checkpoint, with a way back.

The bytes to be replaced are first written to an undo file beside the checkpoint's own files
and synced; only then is anything changed.  Whatever moment the machine dies at, `undo`
restores the original bytes, and until it has, the folder refuses further edits.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from gatewright import artifact
from gatewright.errors import UserError
from gatewright.gates.copying import UNDO
from gatewright.gates.edits import Dts, Plan
from gatewright.gates.find import Gates
from gatewright.gates.patching import Patches, patches_of
from gatewright.gates.report import edit_report
from gatewright.gates.rewrite import gate_scale


def edit(gates: Gates, plan: Plan, dts: Dts) -> dict[str, Any]:
    """Change the gates of a checkpoint where it lies; returns the edit's report.

    Raises:
        UserError: an earlier in-place edit has not been undone or its undo file removed, or a
            file is a link or has further hard links (an edit would reach another folder).
    """
    checkpoint = gates.checkpoint
    root = checkpoint.root
    undo_file = root / UNDO
    if undo_file.exists():
        raise UserError(
            f"{undo_file}: an earlier in-place edit can still be undone (--undo); undo it, or "
            "remove the file to keep that edit for good"
        )
    patches = patches_of(checkpoint, plan.changes(gates))
    for name in patches:
        path = root / name
        if path.is_symlink() or path.stat().st_nlink > 1:
            raise UserError(f"{path}: is shared with another folder (a link); use --out instead")
        if not os.access(path, os.W_OK):
            raise UserError(f"{path}: cannot be written")
    report = edit_report(plan, gates, dts)
    scale = gate_scale(gates, plan)
    manifest = root / artifact.MANIFEST
    record = {
        "format": "gatewright gates undo 1",
        "edit": plan.edit.describe(),
        "manifest": manifest.read_text(encoding="utf-8") if manifest.is_file() else None,
        "patches": _originals(root, patches),
    }
    try:
        artifact.write_json(undo_file, record)
        _sync_folder(root)
    except OSError as e:
        raise UserError(f"{undo_file}: cannot be written ({e.strerror}); nothing changed") from e
    for name, rows in patches.items():
        with open(root / name, "r+b") as f:
            for patch in rows:
                f.seek(patch.start)
                f.write(patch.data)
            f.flush()
            os.fsync(f.fileno())
    if manifest.is_file():
        _renew_manifest(manifest, list(patches), plan, report, scale)
    return report


def _originals(root: Path, patches: Patches) -> list[dict[str, Any]]:
    rows = []
    for name, group in patches.items():
        with open(root / name, "rb") as f:
            for patch in group:
                f.seek(patch.start)
                before = f.read(len(patch.data))
                rows.append(
                    {
                        "file": name,
                        "start": patch.start,
                        "before": base64.b64encode(before).decode(),
                        "after_sha256": hashlib.sha256(patch.data).hexdigest(),
                    }
                )
    return rows


def _renew_manifest(
    manifest: Path, names: list[str], plan: Plan, report: dict[str, Any], scale: float | None
) -> None:
    content = json.loads(manifest.read_text(encoding="utf-8"))
    for name in names:
        if name in content["files"]:
            content["files"][name]["sha256"] = artifact.sha256_file(manifest.parent / name)
    content["content_hash"] = artifact.content_hash_of(
        {name: entry["sha256"] for name, entry in content["files"].items()}
    )
    extra = content.setdefault("extra", {})
    extra["gate_scale"] = scale  # later stages and the report believe it
    edits = extra.setdefault("edits_in_place", [])
    edits.append({"edit": plan.edit.describe(), "gates": report})
    artifact.write_json(manifest, content)


def undo(root: Path) -> int:
    """Restore the bytes that the last in-place edit replaced; returns how many places.

    Raises:
        UserError: there is no undo file, it is damaged, or the checkpoint changed since.
    """
    undo_file = root / UNDO
    try:
        record = json.loads(undo_file.read_text(encoding="utf-8"))
        rows = [
            (
                str(row["file"]),
                int(row["start"]),
                base64.b64decode(row["before"], validate=True),
                str(row["after_sha256"]),
            )
            for row in record["patches"]
        ]
        manifest = record["manifest"]
    except OSError as e:
        raise UserError(f"{undo_file}: cannot be read ({e.strerror}); nothing to undo") from e
    except (ValueError, KeyError, TypeError) as e:
        raise UserError(
            f"{undo_file}: is damaged ({type(e).__name__}); copy the checkpoint again"
        ) from e
    for name, start, before, after in rows:
        path = root / name
        if not path.resolve().is_relative_to(root.resolve()) or not path.is_file():
            raise UserError(f"{undo_file}: names {name!r}, which is not in the folder")
        with open(path, "rb") as f:
            f.seek(start)
            now = f.read(len(before))
        if now != before and hashlib.sha256(now).hexdigest() != after:
            raise UserError(f"{path}: changed since the edit; it is left as it is")
    for name, start, before, _ in rows:
        with open(root / name, "r+b") as f:
            f.seek(start)
            f.write(before)
            f.flush()
            os.fsync(f.fileno())
    if manifest is not None:
        artifact.write_json(root / artifact.MANIFEST, json.loads(manifest))
    undo_file.unlink()
    _sync_folder(root)
    return len(rows)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
