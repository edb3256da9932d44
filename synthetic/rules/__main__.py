"""`python -m synthetic.rules small|paper|gather`: choosing Horn clauses by name."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

from synthetic.arguments import GatedRunArgs, GatherArgs, dispatch, prepared, words
from synthetic.sweep import Sweep, gathered, print_verdicts

PROG = "python -m synthetic.rules"


@dataclasses.dataclass
class RunArgs(GatedRunArgs):
    """Train Mamba-2 at several gate offsets, and a Llama, to choose Horn clauses by name."""

    parts: str = "retrieval,length"
    """retrieval (names mostly fixed) or length (longer pools, weak retrievers), or both."""
    models: str = "mamba2,llama"
    """Models, comma-separated."""


def _run(size: str, args: RunArgs) -> None:
    from synthetic.ranks import fill
    from synthetic.rules import runs, settings

    s, offsets = prepared(args, settings.SIZES[size])
    if offsets is not None:
        s = dataclasses.replace(s, offsets=offsets)
    parts = words("--parts", args.parts, settings.PARTS)
    models = words("--models", args.models, settings.MODELS)
    config = {"size": size, "parts": parts, "models": models, **dataclasses.asdict(s)}
    partial = None if size == "small" else args.out / "partial.pt"
    fill(
        args.out,
        "rules",
        config,
        runs.plan(s, parts, models),
        lambda run, ranks: runs.execute(s, run, ranks, checkpoint=partial),
        _finish,
        args.device,
    )


def _finish(sweep: Sweep) -> None:
    from synthetic.rules import figure, report

    summary = report.summarise(sweep.rows)
    figure.draw(sweep.out, sweep.rows, summary)
    sweep.finish(summary)
    print_verdicts(summary["verdicts"])
    print(f"trained for {summary['cpu_seconds'] / 60:.1f} CPU minutes in all")


def small(args: RunArgs) -> None:
    """Run at a size that two cores finish in minutes."""
    _run("small", args)


def paper(args: RunArgs) -> None:
    """Run at the paper's size, for a GPU node."""
    _run("paper", args)


def gather(args: GatherArgs) -> None:
    """Join the runs of several folders, test the claims and draw the figure."""
    names = ("part", "model", "offset", "seed")
    with gathered(args.runs, args.out, "rules", names, replace=args.replace) as sweep:
        _finish(sweep)


COMMANDS: dict[str, tuple[Callable[[Any], None], type]] = {
    "small": (small, RunArgs),
    "paper": (paper, RunArgs),
    "gather": (gather, GatherArgs),
}


if __name__ == "__main__":
    dispatch(PROG, COMMANDS, sys.argv[1:])
