"""The undo file of an in-place edit: the bytes before and after, and how far the edit is.

It is written before the first byte of the checkpoint changes, says "writing" until the last one
has changed, and "done" from then on.  A folder whose record says "writing" holds some old and
some new bytes, and is no sound input.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gatewright import artifact
from gatewright.errors import UserError

UNDO = "gates-undo.json"
"""Lies beside a checkpoint that was edited in place; it describes that folder, not a copy of it."""
_FORMAT = "gatewright gates undo 2"
WRITING, DONE = "writing", "done"


@dataclasses.dataclass(frozen=True)
class Replaced:
    """One place of one file: its bytes before the edit and after it, equally many."""

    file: str
    """Path relative to the checkpoint's root."""
    start: int
    before: bytes
    after: bytes

    def describes(self, now: bytes) -> bool:
        """Tell whether bytes are a mixture of before and after, as a torn write leaves them."""
        if len(now) != len(self.before):
            return False
        found, old, new = (np.frombuffer(b, np.uint8) for b in (now, self.before, self.after))
        return bool(((found == old) | (found == new)).all())


@dataclasses.dataclass(frozen=True)
class Record:
    """What an in-place edit replaced."""

    state: str
    """`writing` or `done`."""
    edit: dict[str, Any]
    manifest: dict[str, Any] | None
    """The checkpoint's manifest before the edit, if it had one."""
    replaced: Sequence[Replaced]

    def write(self, root: Path, state: str) -> None:
        """Write the undo file of a folder, in one step, with another state."""
        rows = [
            dataclasses.asdict(row)
            | {
                "before": base64.b64encode(row.before).decode(),
                "after": base64.b64encode(row.after).decode(),
            }
            for row in self.replaced
        ]
        content = {"format": _FORMAT, "state": state, "edit": self.edit, "manifest": self.manifest}
        artifact.write_json(root / UNDO, content | {"patches": rows})


def read(root: Path) -> Record:
    """Return the record in a folder's undo file; every place that it names lies in the folder.

    Raises:
        UserError: there is none, it is damaged, or it names what is not in the folder.
    """
    path = root / UNDO
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT or content["state"] not in (WRITING, DONE):
            raise ValueError("not in a form that is known here")
        if not isinstance(content["manifest"], dict | None):
            raise TypeError("its manifest is no object")
        rows = [
            Replaced(
                str(row["file"]),
                int(row["start"]),
                base64.b64decode(row["before"], validate=True),
                base64.b64decode(row["after"], validate=True),
            )
            for row in content["patches"]
        ]
        if any(len(row.before) != len(row.after) for row in rows):
            raise ValueError("before and after differ in length")
        record = Record(content["state"], content["edit"], content["manifest"], rows)
    except OSError as e:
        raise UserError(f"{path}: cannot be read ({e.strerror}); nothing to undo") from e
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as e:
        raise UserError(
            f"{path}: is damaged ({type(e).__name__}: {str(e)[:80]}); copy the checkpoint again"
        ) from e
    for row in record.replaced:
        if not _lies_in(root, row):
            raise UserError(
                f"{path}: names {len(row.before)} bytes at {row.start} of {row.file!r}, which is "
                "not in the folder; copy the checkpoint again"
            )
    return record


def _lies_in(root: Path, row: Replaced) -> bool:
    """Tell whether a place is inside a file of the folder."""
    try:
        path = (root / row.file).resolve(strict=True)
        inside = path.is_relative_to(root.resolve()) and path.is_file()
        return inside and 0 <= row.start <= path.stat().st_size - len(row.before)
    except (OSError, ValueError, RuntimeError):  # missing, a NUL in its name, a loop of links
        return False


def refuse_half_edited(root: Path) -> None:
    """Refuse a folder in which an in-place edit, or its undoing, was interrupted.

    Raises:
        UserError: the edit is neither done nor undone, or the undo file is damaged.
    """
    if (root / UNDO).exists() and read(root).state == WRITING:
        raise UserError(
            f"{root}: an in-place edit was interrupted half-way, so some gates are old and some "
            f"new; python -m tools.scale_gates {root} --undo restores the old ones"
        )
