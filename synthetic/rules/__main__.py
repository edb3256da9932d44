"""`python -m synthetic.rules small|paper|gather`: choosing Horn clauses by name."""

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

PROG = "python -m synthetic.rules"
NAMES = ("part", "model", "offset", "seed")  # the fields of a row that name its run


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
        s = dataclasses.replace(s, offsets=dict.fromkeys(settings.PARTS, offsets))
    parts = words("--parts", args.parts, settings.PARTS)
    models = words("--models", args.models, settings.MODELS)
    partial = args.out / "partial.pt" if size == "paper" else None
    processes = one_at_a_time(args) if size == "paper" else args.runs_at_a_time()
    config = {"size": size, "parts": parts, "models": models, **dataclasses.asdict(s)}
    fill(
        args.out,
        "rules",
        config,
        runs.plan(s, parts, models),
        functools.partial(runs.execute, s, checkpoint=partial),
        _finish,
        args.device,
        processes=processes,
        partial=partial,
    )


def _conclude(out: Path, rows: list[Row], config: Mapping[str, Any]) -> dict[str, Any]:
    from synthetic.rules import figure, report

    def summarise(measured: list[Row]) -> dict[str, Any]:
        return report.summarise(measured, config["length_pool"])

    return conclude(out, rows, summarise, figure.draw)


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
    from synthetic.rules import report

    joined = gathering.read(args.runs, "rules", NAMES, report.fields, replace=args.replace)
    gathering.write(args.out, joined, _conclude)


COMMANDS: dict[str, tuple[Callable[[Any], None], type]] = {
    "small": (small, RunArgs),
    "paper": (paper, RunArgs),
    "gather": (gather, GatherArgs),
}


if __name__ == "__main__":
    dispatch(PROG, COMMANDS, sys.argv[1:])
