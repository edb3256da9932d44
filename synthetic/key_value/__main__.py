"""`python -m synthetic.key_value small|paper|gather`: gates, memory and retrieval."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from synthetic.arguments import (
    GatedRunArgs,
    GatherArgs,
    dispatch,
    one_at_a_time,
    prepared,
    words,
)
from synthetic.conclusion import conclude
from synthetic.sweep import Row, Sweep

PROG = "python -m synthetic.key_value"
NAMES = ("order", "model", "offset", "seed")  # the fields of a row that name its run


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
    partial = args.out / "partial.pt" if size == "paper" else None
    processes = one_at_a_time(args) if size == "paper" else args.runs_at_a_time()
    config = {"size": size, "orders": orders, "models": models, **dataclasses.asdict(s)}
    fill(
        args.out,
        "key_value",
        config,
        runs.plan(s, orders, models),  # type: ignore[arg-type]
        functools.partial(runs.execute, s, checkpoint=partial),
        _finish,
        args.device,
        processes=processes,
        partial=partial,
    )


def _conclude(out: Path, rows: list[Row], config: Mapping[str, Any]) -> dict[str, Any]:
    from synthetic.key_value import figure, report

    return conclude(out, rows, report.summarise, figure.draw)


def _finish(sweep: Sweep) -> None:
    sweep.finish(_conclude(sweep.out, sweep.rows, sweep.config))


def small(args: RunArgs) -> None:
    """Run at a size that two cores finish in minutes."""
    _run("small", args)


def paper(args: RunArgs) -> None:
    """Run at the paper's size, for a GPU node."""
    _run("paper", args)


def gather(args: GatherArgs) -> None:
    """Join the runs of several folders, test the claims and draw the figure."""
    from synthetic import gathering
    from synthetic.key_value import report

    joined = gathering.read(args.runs, "key_value", NAMES, report.fields, replace=args.replace)
    gathering.write(args.out, joined, _conclude)


COMMANDS: dict[str, tuple[Callable[[Any], None], type]] = {
    "small": (small, RunArgs),
    "paper": (paper, RunArgs),
    "gather": (gather, GatherArgs),
}


if __name__ == "__main__":
    dispatch(PROG, COMMANDS, sys.argv[1:])
