"""From a gate experiment's rows to its summary, figure and printed verdicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gatewright.errors import UserError
from synthetic.sweep import Row, print_verdicts

Summary = dict[str, Any]


def conclude(
    out: Path,
    rows: list[Row],
    summarise: Callable[[list[Row]], Summary],
    draw: Callable[[Path, list[Row], Mapping[str, Any]], None],
) -> Summary:
    """Draw the figure; return and print what the rows say.

    Rows of runs that failed have no measures: they are counted in the summary's `failed`, and
    no claim counts them as wrong answers or as seeds.

    Raises:
        UserError: every run failed.
    """
    measured = [r for r in rows if "failed" not in r]
    failed = [str(r["failed"]) for r in rows if "failed" in r]
    if not measured:
        first = f", the first: {failed[0]}" if failed else ""
        raise UserError(
            f"all {len(failed)} runs failed{first}; try other --offsets or --seeds in a new folder"
        )
    summary = {**summarise(measured), "failed": failed}
    draw(out, measured, summary)
    print_verdicts(summary["verdicts"])
    for message in failed:
        print(f"failed         {message}")
    print(f"trained for {summary['cpu_seconds'] / 60:.1f} CPU minutes in all")
    return summary
