"""`python -m synthetic.key_value small|paper|gather`: gates, memory and retrieval."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

from synthetic.arguments import GatedRunArgs, GatherArgs, dispatch, prepared, words
from synthetic.sweep import Sweep, gathered, print_verdicts

PROG = "python -m synthetic.key_value"


@dataclasses.dataclass
class RunArgs(GatedRunArgs):
    """Train Mamba-2 at several gate offsets, and GPT-NeoX, on the perturbed dictionary."""

    orders: str = "best_first,best_last"
    """Which queries: best_first (escape from memory), best_last (length generalisation)."""
    models: str = "mamba2,gpt_neox"
    """Models, comma-separated."""


def _run(size: str, args: RunArgs) -> None:
    from synthetic.key_value import runs, settings
    from synthetic.ranks import fill

    s, offsets = prepared(args, settings.SIZES[size])
    if offsets is not None:
        s = dataclasses.replace(s, offsets=dict.fromkeys(settings.ORDERS, offsets))
    orders = words("--orders", args.orders, settings.ORDERS)
    models = words("--models", args.models, settings.MODELS)
    config = {"size": size, "orders": orders, "models": models, **dataclasses.asdict(s)}
    partial = None if size == "small" else args.out / "partial.pt"
    fill(
        args.out,
        "key_value",
        config,
        runs.plan(s, orders, models),  # type: ignore[arg-type]
        lambda run, ranks: runs.execute(s, run, ranks, checkpoint=partial),
        _finish,
        args.device,
    )


def _finish(sweep: Sweep) -> None:
    from synthetic.key_value import figure, report

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
    names = ("order", "model", "offset", "seed")
    with gathered(args.runs, args.out, "key_value", names, replace=args.replace) as sweep:
        _finish(sweep)


COMMANDS: dict[str, tuple[Callable[[Any], None], type]] = {
    "small": (small, RunArgs),
    "paper": (paper, RunArgs),
    "gather": (gather, GatherArgs),
}


if __name__ == "__main__":
    dispatch(PROG, COMMANDS, sys.argv[1:])
