"""Output folders that grow while a command runs: whose they are, and how they begin."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gatewright import artifact
from gatewright.errors import UserError


def require_unfinished(out: Path) -> None:
    """Refuse to work on in a folder that has its manifest.

    Raises:
        UserError: it has.
    """
    if os.path.isfile(out / artifact.MANIFEST):
        raise UserError(f"--out {out} is already finished: remove it or choose another folder")


def held(out: Path, file: str) -> dict[str, Any] | None:
    """Return what `file` says of the run that a folder holds; None if it holds none.

    Raises:
        UserError: the file is damaged.
    """
    if not os.path.isfile(out / file):
        return None
    try:
        found = json.loads((out / file).read_text(encoding="utf-8"))
        return dict(found)
    except (OSError, ValueError, TypeError, RecursionError) as e:
        raise UserError(
            f"{out / file}: is damaged ({type(e).__name__}), so what --out {out} holds is "
            "unknown; remove it or choose another folder"
        ) from e


def begin(out: Path, file: str, facts: Mapping[str, Any]) -> None:
    """Make a folder and write into `file` whose it is.

    Raises:
        UserError: it holds something else, or cannot be made.
    """
    try:
        if os.path.lexists(out) and any(p.name[0] != "." for p in out.iterdir()):
            raise UserError(f"--out {out} is not empty: remove it or choose another folder")
        out.mkdir(parents=True, exist_ok=True)
        artifact.write_json(out / file, facts)
    except OSError as e:
        raise UserError(f"--out {out}: cannot be made ({e.strerror}); choose another place") from e
