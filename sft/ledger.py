"""What became of the rows that `sft.prepare` read: kept, repaired or dropped, and why."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

from sft.rows import Dropped


@dataclasses.dataclass
class Ledger:
    """Counts of what happened to the rows, and the table that says so."""

    read: int = 0
    kept: int = 0
    repaired_rows: int = 0
    repairs: Counter[str] = dataclasses.field(default_factory=Counter)
    dropped: Counter[str] = dataclasses.field(default_factory=Counter)
    first_drop: str | None = None
    """`file:line: reason (detail)` of the first dropped row."""

    def keep(self, repairs: list[str]) -> None:
        self.kept += 1
        self.repaired_rows += bool(repairs)
        self.repairs.update(set(repairs))

    def drop(self, where: str, error: Dropped, warn: Callable[[str], None] | None = None) -> None:
        """Count a dropped row; the first of each reason is also told to `warn`."""
        if self.first_drop is None:
            self.first_drop = f"{where}: {error}"
        if warn is not None and error.reason not in self.dropped:
            warn(f"{where}: dropped: {error}")
        self.dropped[error.reason] += 1

    def table(self) -> str:
        """Return the table of rows kept, repaired and dropped, with reasons."""
        rows = [
            ("rows read", self.read),
            ("kept as they are", self.kept - self.repaired_rows),
            ("kept, repaired", self.repaired_rows),
            *((f"  {reason}", n) for reason, n in self.repairs.most_common()),
            ("dropped", sum(self.dropped.values())),
            *((f"  {reason}", n) for reason, n in self.dropped.most_common()),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {count:>8}" for name, count in rows)

    def as_dict(self) -> dict[str, Any]:
        return {
            "read": self.read,
            "kept": self.kept,
            "repaired_rows": self.repaired_rows,
            "repairs": dict(self.repairs),
            "dropped": dict(self.dropped),
        }
