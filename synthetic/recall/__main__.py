"""`python -m synthetic.recall table|run`: the anatomy of associative recall."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gatewright import artifact, launch
from gatewright.errors import UserError
from synthetic.arguments import dispatch, positive, words
from synthetic.recall.flags import RunArgs
from synthetic.sweep import Row, Sweep

PROG = "python -m synthetic.recall"
# The table's flags that its folder keeps. Of these a folder may be continued with other parts
# and more seeds (FREE): they add rows; the others make the rows what they are.
SETTINGS = ("parts", "pairs", "seeds", "scale_steps", "sequences")
FREE = ("parts", "seeds")


@dataclasses.dataclass
class TableArgs:
    """Run every arm of the small table and test every claim of the summary."""

    out: Path
    """Folder for results.jsonl, summary.json and the figure; an unfinished one is resumed."""
    parts: str = "fixed,shuffled,wall,lift,collision,s5"
    """Parts of the table, comma-separated; their arms begin in order of length, longest first."""
    pairs: int = 32
    """K of the MQAR arms."""
    seeds: int = 5
    """Seeds per arm, trained together; a resumed folder trains those that it lacks."""
    scale_steps: float = 1.0
    """Multiply every arm's steps (for a quick look; the verdicts then say little)."""
    sequences: int = 2048
    """Evaluation sequences."""
    minutes: float | None = None
    """Start no arm after this many minutes: reports what there is and leaves the folder
    unfinished; start again to go on."""
    threads: int = 1
    """Threads that each arm may use."""
    processes: int | None = None
    """Arms at a time, each in a process of its own; default: as many as the cores hold."""


def run(args: RunArgs) -> None:
    """Train one arm and print every seed beside its floor and rebinding score."""
    arm = args.arm()

    import torch

    from synthetic.recall import resume, runs, table, tasks

    torch.set_num_threads(args.threads)
    config = {**arm.settings(), "fast": args.fast, "sequences": args.sequences}
    with Sweep(args.out, "recall run", {**config, "seeds": args.seeds}, free=("seeds",)) as sweep:
        wanted = {args.cell: arm}
        resume.require_same(args.out, sweep.rows, wanted, args.seeds)
        for job in resume.missing(sweep.rows, wanted, args.seeds):
            sweep.add_all(runs.execute(args.sequences, None, job))
        rows = sorted(sweep.rows, key=lambda r: r["seed"])
        _require_measured(args.out, rows)
        lines = table.arm_rows(rows)
        sweep.finish(
            {
                "accuracy": lines[0]["mean"],
                **lines[0],
                "floors": tasks.floors(arm.task),
                **_costs(rows, sweep),
            }
        )
    table.print_table(lines)
    for r in rows:
        if "failed" in r:
            print(f"seed {r['seed']}: diverged ({r['failed']})")
            continue
        mark = "  nothing bound" if r.get("nothing_bound") else ""
        rebinding = f", rebinding {r['rebinding']:.3f}" if "rebinding" in r else ""
        print(f"seed {r['seed']}: {r['accuracy']:.3f} (floor {r['floor']:.3f}{rebinding}){mark}")


def table(args: TableArgs) -> None:
    """Run the small table, an arm per core at a time, each arm's seeds together."""
    positive(args, "pairs", "seeds", "scale_steps", "sequences", "threads", "processes")
    if args.minutes is not None and not 0 <= args.minutes < math.inf:
        raise UserError(f"--minutes {args.minutes:g}: give 0 (report what is there) or more")
    if args.minutes == 0 and not (args.out / "results.jsonl").exists():
        raise UserError(f"--minutes 0 reports what is there, and --out {args.out} has no arm yet")

    import torch

    from synthetic.recall import arms, judge, resume, runs
    from synthetic.side_by_side import side_by_side

    torch.set_num_threads(args.threads)
    processes = args.processes or max(1, launch.cores() // args.threads)
    parts = words("--parts", args.parts, arms.PARTS)
    try:
        every = {n: arms.scaled(a, args.scale_steps) for n, a in arms.all_arms(args.pairs).items()}
    except ValueError as e:
        raise UserError(str(e)) from e
    if args.seeds < judge.FEWEST_SEEDS:
        print(
            f"--seeds {args.seeds}: no test of fewer than {judge.FEWEST_SEEDS} seeds against as "
            f"many reaches p < {judge.LEVEL:g}; nothing can be decided",
            file=sys.stderr,
        )
    config = {k: v for k, v in vars(args).items() if k in SETTINGS}
    chosen = {n: arm for part in parts for n, arm in every.items() if n.split("/")[0] == part}
    deadline = None if args.minutes is None else time.time() + 60 * args.minutes
    with Sweep(args.out, "recall table", config, free=FREE) as sweep:
        resume.require_same(args.out, sweep.rows, every, args.seeds)
        jobs = resume.missing(sweep.rows, chosen, args.seeds)
        jobs.sort(key=lambda job: -arms.work(job[1]) * len(job[2]))  # so that cores end together
        do = functools.partial(runs.execute, args.sequences, deadline)
        if min(processes, len(jobs)) > 1:
            side_by_side(do, jobs, sweep.add_all, sweep, processes=processes, unit="arm")
        else:
            for job in jobs:
                sweep.add_all(do(job))
        left = [name for name, _, _ in resume.missing(sweep.rows, chosen, args.seeds)]
        _report(sweep, args, list(every), left)


def _report(sweep: Sweep, args: TableArgs, order: list[str], left: list[str]) -> None:
    """Write summary and figure and print them; the manifest only if no arm is left."""
    from synthetic.recall import claims, figure
    from synthetic.recall import table as report

    if not sweep.rows:
        raise UserError(
            f"--minutes {args.minutes:g} ended before the first arm: give more to start again"
        )
    rows = sorted(sweep.rows, key=lambda r: (order.index(r["arm"]), r["seed"]))
    _require_measured(args.out, rows)
    numbers = claims.numbers(args.pairs)
    lines = report.arm_rows(rows, numbers)
    values = report.number_rows(numbers, lines)
    found = report.verdicts(rows, args.pairs)
    kept = report.survivors(found, args.pairs)
    failed = [r["failed"] for r in rows if "failed" in r]
    costs = _costs(rows, sweep)
    summary = {
        "arms": lines,
        "numbers": values,
        "verdicts": found,
        "survivors": kept,
        "failed": failed,
        "not_run": left,
        **costs,
    }
    figure.draw(args.out, report.measured(rows), lines)
    if left:
        artifact.write_json(args.out / "summary.json", summary)
    else:
        sweep.finish(summary)
    report.print_table(lines)
    report.print_numbers(values)
    report.print_verdicts(found)
    report.print_survivors(kept)
    for message in failed:
        print(f"diverged: {message}")
    clock = (
        "" if costs["seconds"] is None else f"{costs['seconds'] / 60:.1f} minutes by the clock, "
    )
    print(
        f"{clock}{costs['arms_seconds'] / 60:.1f} minutes of arms, "
        f"{costs['cpu_seconds'] / 60:.1f} of CPU time"
    )
    if left:
        print(f"not run: {', '.join(left)}; start again to go on")


def _require_measured(out: Path, rows: list[Row]) -> None:
    """Refuse to report on nothing but seeds that diverged.

    Raises:
        UserError: there is no other.
    """
    if all("failed" in r for r in rows):
        raise UserError(
            f"--out {out}: every seed diverged, the first: {rows[0]['failed']}; try other settings "
            "in a new folder"
        )


def _costs(rows: list[Row], sweep: Sweep) -> dict[str, Any]:
    """Return seconds by the clock (None after a resumption), and the arms' own sums."""
    return {
        "seconds": sweep.seconds(),
        "arms_seconds": round(sum(r["seconds"] for r in rows), 1),
        "cpu_seconds": round(sum(r["cpu_seconds"] for r in rows), 1),
    }


COMMANDS: dict[str, tuple[Callable[[Any], None], type]] = {
    "table": (table, TableArgs),
    "run": (run, RunArgs),
}


if __name__ == "__main__":
    launch.retune()
    dispatch(PROG, COMMANDS, sys.argv[1:])
