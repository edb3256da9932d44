"""Seconds that an arm's training takes per side, in turn: what `tools.bench mqar` measures.

A stage's code is measured in the stage's own process (tools may not import it): this module
prints one JSON object, {"steps": the whole run's, "together": s, "alone": s, "plain": s}, for
all seeds together on the C++ kernels, one seed on them, and one seed in plain PyTorch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import time

from gatewright import cli
from gatewright.errors import UserError
from synthetic.arguments import positive


@dataclasses.dataclass
class Args:
    """Time a few training steps of an armed MQAR cell; an inner entry point of tools.bench."""

    cell: str
    """Recurrence: gated_deltanet, mamba2 and so on."""
    pairs: int = 32
    """K."""
    seeds: int = 5
    """Seeds trained together."""
    steps: int = 12
    """Steps timed."""
    repeats: int = 5
    """Measurements of each side, in turn, after a warm-up."""
    threads: int = 1
    """Threads that torch may use."""


def main(args: Args) -> None:
    positive(args, "pairs", "seeds", "steps", "repeats", "threads")

    import torch

    from synthetic.recall import arms, cells, runs

    if args.cell not in cells.NAMES:
        raise UserError(
            f"--cell: no {args.cell!r}{cli.nearest(args.cell, cells.NAMES)}; "
            f"choose from {', '.join(cells.NAMES)}"
        )
    try:
        whole = arms.mqar(args.cell, True, args.pairs)  # type: ignore[arg-type]
    except ValueError as e:
        raise UserError(str(e)) from e
    os.environ["GATEWRIGHT_QUIET"] = "1"
    torch.set_num_threads(args.threads)
    few = dataclasses.replace(whole, steps=args.steps)
    sides = {"together": (args.seeds, "auto"), "alone": (1, "auto"), "plain": (1, "torch")}
    times: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(1 + args.repeats):
        for side, (seeds, kernels) in sides.items():
            os.environ["GATEWRIGHT_KERNELS"] = kernels
            start = time.perf_counter()
            runs.train(few, list(range(seeds)), "mqar")
            times[side].append(time.perf_counter() - start)
    medians = {side: statistics.median(kept[1:]) for side, kept in times.items()}
    print(json.dumps({"steps": whole.steps, **medians}))


if __name__ == "__main__":
    cli.run(main, Args, prog="python -m synthetic.recall.timing")
