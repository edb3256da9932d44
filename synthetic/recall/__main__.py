"""`python -m synthetic.recall table|run`: the anatomy of associative recall."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from gatewright import cli, launch
from gatewright.errors import UserError
from synthetic.arguments import dispatch, positive, words
from synthetic.sweep import Sweep, print_verdicts

PROG = "python -m synthetic.recall"


@dataclasses.dataclass
class RunArgs:
    """Train one cell on one task, its seeds together, and measure it beside its floors."""

    out: Path
    """Folder for results.jsonl and summary.json."""
    cell: str
    """deltanet, gated_deltanet, gated_deltanet_scalar, rwkv7, rwkv7_diagonal, mamba2, attention."""
    conv: bool = True
    """With the width-4 causal depthwise convolution (armed); attention needs --no-conv."""
    task: Literal["mqar", "haystack", "collision", "s5"] = "mqar"
    """Which task."""
    pairs: int = 32
    """K, key-value pairs of the table (mqar)."""
    layout: Literal["fixed", "shuffled"] = "fixed"
    """mqar: the authors' fixed keys with one query, or shuffled keys with eight."""
    length: int = 64
    """Tokens of a haystack or collision sequence; twice the depth of S5."""
    dense: int = 1
    """Queries per training sequence (haystack, collision)."""
    curriculum: Literal["none", "uniform", "ramp", "gated"] = "none"
    """How the distance grows while training (haystack, collision)."""
    causal: bool = False
    """Forward only; without it the model is a bidirectional masked denoiser."""
    layers: int = 1
    """Layers (the authors: 1 for mqar, 2 for the others)."""
    width: int = 32
    """d, the model dimension (the authors: 32; 128 for s5)."""
    seeds: int = 5
    """Seeds, trained together."""
    steps: int = 2000
    """Training steps (the authors, mqar: 2,000 + 125 K)."""
    batch: int = 128
    """Sequences per step and seed (the authors: 256)."""
    lr: float = 3e-3
    """Peak learning rate (the authors: 1e-3)."""
    sequences: int = 2048
    """Evaluation sequences (the authors')."""
    fast: bool = True
    """The chunked form of the cell; --no-fast runs the token-by-token recurrence."""
    threads: int = 2
    """Threads that torch may use."""


@dataclasses.dataclass
class TableArgs:
    """Run every arm of the small table and test every claim of the summary."""

    out: Path
    """Folder for results.jsonl, summary.json and the figure; an unfinished one is resumed."""
    parts: str = "fixed,shuffled,wall,lift,collision,s5"
    """Parts of the table, comma-separated, in the order in which they run."""
    pairs: int = 32
    """K of the MQAR arms."""
    seeds: int = 5
    """Seeds per arm, trained together."""
    scale_steps: float = 1.0
    """Multiply every arm's steps (for a quick look; the verdicts then say little)."""
    sequences: int = 2048
    """Evaluation sequences."""
    minutes: float | None = None
    """Start no arm after this many minutes: the table ends with what it has, and names the rest."""
    threads: int = 2
    """Threads that torch may use."""


def run(args: RunArgs) -> None:
    """Train one arm and print every seed beside its floor and rebinding score."""
    positive(
        args,
        "pairs",
        "length",
        "layers",
        "width",
        "seeds",
        "steps",
        "batch",
        "lr",
        "sequences",
        "threads",
    )

    import torch

    from synthetic.recall import cells, runs, table, tasks

    torch.set_num_threads(args.threads)
    if args.cell not in cells.NAMES:
        raise UserError(
            f"--cell: no {args.cell!r}{cli.nearest(args.cell, cells.NAMES)}; "
            f"choose from {', '.join(cells.NAMES)}"
        )
    if args.curriculum != "none" and args.task not in ("haystack", "collision"):
        raise UserError("--curriculum belongs to --task haystack or collision")
    try:
        arm = runs.Arm(
            task=tasks.Task(args.task, args.pairs, args.layout, args.length, args.dense),
            cell=cells.Cell(args.cell, args.width, args.conv, fast=args.fast),  # type: ignore[arg-type]
            layers=args.layers,
            bidirectional=not args.causal,
            curriculum=args.curriculum,
            steps=args.steps,
            batch=args.batch,
            lr=args.lr,
        )
    except ValueError as e:
        raise UserError(str(e)) from e
    config = {k: v for k, v in vars(args).items() if k not in ("out", "threads")}
    with Sweep(args.out, "recall run", config) as sweep:
        rows = runs.run(arm, list(range(args.seeds)), args.sequences, args.cell)
        sweep.add_all({"arm": args.cell, **r} for r in rows)
        lines = table.arm_rows(sweep.rows)
        floors = tasks.floors(arm.task)
        sweep.finish(
            {
                "accuracy": lines[0]["mean"],
                **lines[0],
                "floors": floors,
                "seconds": sweep.seconds(),
            }
        )
    table.print_table(lines)
    for r in rows:
        mark = "  nothing bound" if r.get("nothing_bound") else ""
        rebinding = f", rebinding {r['rebinding']:.3f}" if "rebinding" in r else ""
        print(f"seed {r['seed']}: {r['accuracy']:.3f} (floor {r['floor']:.3f}{rebinding}){mark}")


def table(args: TableArgs) -> None:
    """Run the small table, its arms one after the other, each arm's seeds together."""
    positive(args, "pairs", "seeds", "scale_steps", "sequences", "threads")
    if args.minutes is not None and args.minutes < 0:
        raise UserError(f"--minutes {args.minutes:g}: give 0 (report what is there) or more")

    import torch

    from synthetic.recall import arms, figure, runs
    from synthetic.recall import table as report

    torch.set_num_threads(args.threads)
    parts = words("--parts", args.parts, arms.PARTS)
    try:
        every = arms.all_arms(args.pairs)
    except ValueError as e:
        raise UserError(str(e)) from e
    config = {k: v for k, v in vars(args).items() if k not in ("out", "threads", "minutes")}
    chosen = {n: arm for part in parts for n, arm in every.items() if n.split("/")[0] == part}
    begun = time.monotonic()
    with Sweep(args.out, "recall table", config) as sweep:
        for i, (name, arm) in enumerate(chosen.items(), start=1):
            start, cpu = time.monotonic(), time.process_time()
            late = args.minutes is not None and start - begun >= 60 * args.minutes
            if sweep.has(arm=name) or late:
                continue
            arm = arms.scaled(arm, args.scale_steps)
            rows = runs.run(
                arm, list(range(args.seeds)), args.sequences, f"[{i}/{len(chosen)}] {name}"
            )
            cost = {
                "arm_seconds": round(time.monotonic() - start, 1),
                "arm_cpu_seconds": round(time.process_time() - cpu, 1),
            }
            sweep.add_all({"arm": name, **r, **cost} for r in rows)
        if not sweep.rows:
            raise UserError("--minutes ended before the first arm: nothing to report")
        lines = report.arm_rows(sweep.rows)
        found = report.verdicts(sweep.rows)
        left = [name for name in chosen if not sweep.has(arm=name)]
        figure.draw(args.out, sweep.rows, lines)
        seconds, cpu_seconds = (
            sum({r["arm"]: r[f"arm_{kind}"] for r in sweep.rows}.values())
            for kind in ("seconds", "cpu_seconds")
        )
        sweep.finish(
            {
                "arms": lines,
                "verdicts": found,
                "survivors": report.survivors(found),
                "not_run": left,
                "seconds": round(seconds, 1),
                "cpu_seconds": round(cpu_seconds, 1),
            }
        )
    report.print_table(lines)
    print_verdicts(found)
    print(f"trained for {seconds / 60:.1f} minutes in all, {cpu_seconds / 60:.1f} of CPU time")
    if left:
        print(f"not run: {', '.join(left)}")


COMMANDS: dict[str, tuple[Callable[[Any], None], type]] = {
    "table": (table, TableArgs),
    "run": (run, RunArgs),
}


if __name__ == "__main__":
    launch.retune()
    dispatch(PROG, COMMANDS, sys.argv[1:])
