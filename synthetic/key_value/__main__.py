"""`python -m synthetic.key_value small|paper|gather`: gates, memory and retrieval."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gatewright.errors import UserError
from synthetic.arguments import dispatch, integers, numbers, positive, words
from synthetic.sweep import Sweep, gathered, print_verdicts

PROG = "python -m synthetic.key_value"


@dataclasses.dataclass
class RunArgs:
    """Train Mamba-2 at several gate offsets, and GPT-NeoX, on the perturbed dictionary."""

    out: Path
    """Folder for results.jsonl, summary.json and the figure; an unfinished one is resumed."""
    orders: str = "best_first,best_last"
    """Which queries: best_first (escape from memory), best_last (length generalisation)."""
    models: str = "mamba2,gpt_neox"
    """Models, comma-separated."""
    offsets: str | None = None
    """Gate offsets of Mamba-2, comma-separated; default the size's."""
    seeds: str | None = None
    """Seeds, comma-separated; default the size's."""
    steps: int | None = None
    """Most training steps; default the size's."""
    device: str = "cpu"
    """Where the models run: cpu or cuda."""
    threads: int = 1
    """Threads that torch may use."""


@dataclasses.dataclass
class GatherArgs:
    """Join finished runs of one size, test the claims over all of them and draw the figure."""

    runs: list[Path]
    """Folders of `small` or `paper` with disjoint settings."""
    out: Path
    """Folder for the joined results."""
    replace: bool = False
    """Of a run that several folders hold, take the last one's."""


def _run(size: str, args: RunArgs) -> None:
    positive(args, "steps", "threads")
    import torch

    from synthetic.key_value import runs, settings
    from synthetic.ranks import fill

    torch.set_num_threads(args.threads)
    s = settings.SIZES[size]
    if args.offsets is not None:
        given = numbers("--offsets", args.offsets, -100, 100)
        s = dataclasses.replace(s, offsets=dict.fromkeys(settings.ORDERS, given))
    if args.seeds is not None:
        s = dataclasses.replace(s, seeds=tuple(integers("--seeds", args.seeds, least=0)))
    if args.steps is not None:
        s = dataclasses.replace(s, recipe=dataclasses.replace(s.recipe, steps=args.steps))
    orders = words("--orders", args.orders, settings.ORDERS)
    models = words("--models", args.models, settings.MODELS)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no GPU here; use --device cpu")
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
