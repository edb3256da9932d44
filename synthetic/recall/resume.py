"""What an unfinished folder of recall results still lacks, and whether it may be continued."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from gatewright.errors import UserError
from synthetic.recall.runs import Arm
from synthetic.sweep import Row

Job = tuple[str, Arm, list[int]]
ALWAYS = {"floor", "parameters", "seconds", "cpu_seconds"}  # every row has these,
ENDS = {"accuracy", "failed"}  # and one of these


def missing(rows: Sequence[Row], wanted: Mapping[str, Arm], seeds: int) -> list[Job]:
    """Return what is left to train, an arm's missing seeds as one job, in the arms' order."""
    have: dict[str, set[int]] = {}
    for row in rows:
        have.setdefault(row["arm"], set()).add(row["seed"])
    return [
        (name, arm, left)
        for name, arm in wanted.items()
        if (left := sorted(set(range(seeds)) - have.get(name, set())))
    ]


def require_same(out: Path, rows: Sequence[Row], arms: Mapping[str, Arm], seeds: int) -> None:
    """Refuse to go on in a folder whose rows are not these arms' and seeds'.

    Raises:
        UserError: a row has an unknown arm, other settings, or a seed beyond `seeds`.
    """
    way_out = "use the same settings or another folder"
    for row in rows:
        name, seed = row.get("arm"), row.get("seed")
        if not isinstance(name, str) or name not in arms:
            raise UserError(f"--out {out}: holds an arm {name!r} that is not known; {way_out}")
        if not isinstance(seed, int) or not row.keys() >= ALWAYS or not row.keys() & ENDS:
            raise UserError(f"--out {out}: holds rows of another version; use another folder")
        if seed >= seeds:
            raise UserError(
                f"--out {out}: holds seed {seed} of {name}; give --seeds {seed + 1} or more, or "
                "another folder"
            )
        for field, value in arms[name].settings().items():
            if row.get(field) != value:
                raise UserError(
                    f"--out {out}: {name} was trained with {field}={row.get(field)!r}, not "
                    f"{value!r}; {way_out}"
                )
