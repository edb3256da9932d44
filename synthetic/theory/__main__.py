"""`python -m synthetic.theory a|b|c|d|all --out DIR`: the theory figure from end to end."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Literal

import tyro

from gatewright import cli
from gatewright.errors import UserError
from synthetic.arguments import numbers, positive
from synthetic.sweep import Sweep, print_verdicts

PROG = "python -m synthetic.theory"


@dataclasses.dataclass
class Args:
    """Train the simplified SSM of section 2 and compare it with the paper's predictions."""

    panel: tyro.conf.Positional[Literal["a", "b", "c", "d", "all"]]
    """a: initial bias; b: escape time; c: accuracy against tau; d: tau against distance."""
    out: Path
    """Folder for results.jsonl, summary.json and the figure; an unfinished one is resumed."""
    steps: int | None = None
    """SGD steps (a, c, d) or the most steps to wait for an escape (b); default the paper's."""
    seeds: int | None = None
    """Number of seeds; default 40 (a), 5 (b), 5 (c), 1 (d)."""
    alpha0: str | None = None
    """Initial decay factors for a and b, comma-separated."""
    tau: str | None = None
    """Effective lengths in tokens for c and d, comma-separated."""
    eval_examples: int = 100_000
    """Evaluation examples per model (c) or per model and distance (d)."""
    threads: int = 2
    """Threads that torch may use."""


def main(args: Args) -> None:
    """Run the panels asked for, test their claims and draw them."""
    import torch

    from synthetic.theory import figure, panels, settings

    positive(args, "steps", "seeds", "eval_examples", "threads")
    letters = "abcd" if args.panel == "all" else args.panel
    if args.seeds is not None and args.seeds > settings.MOST_SEEDS:
        raise UserError(f"--seeds {args.seeds}: at most {settings.MOST_SEEDS:,}")
    if args.alpha0 is not None and not set(letters) & {"a", "b"}:
        raise UserError("--alpha0 belongs to panels a and b; c and d take --tau")
    if args.tau is not None and not set(letters) & {"c", "d"}:
        raise UserError("--tau belongs to panels c and d; a and b take --alpha0")
    tau = None if args.tau is None else numbers("--tau", args.tau, 0, 1e12)
    torch.set_num_threads(args.threads)
    chosen = {}
    for letter in letters:
        values = tau
        if letter in "ab":
            low, high = settings.ALPHA0_RANGE[letter]
            flag = f"--alpha0 (panel {letter})"
            values = None if args.alpha0 is None else numbers(flag, args.alpha0, low, high)
        default = settings.DEFAULTS[letter]
        chosen[letter] = settings.Settings(
            values=default.values if values is None else values,
            seeds=args.seeds or default.seeds,
            steps=args.steps or default.steps,
            eval_examples=args.eval_examples if letter in "cd" else 0,
        )
    config = {"panels": {k: dataclasses.asdict(v) for k, v in chosen.items()}}
    with Sweep(args.out, "theory", config) as sweep:
        summary: dict[str, object] = {}
        verdicts = []
        for letter, panel in chosen.items():
            start, had_rows = time.monotonic(), sweep.has(panel=letter)
            panels.RUN[letter](sweep, panel)
            numbers_found, claims = panels.SUMMARISE[letter](sweep, panel)
            # A resumed panel's time is not the panel's.
            seconds = None if had_rows else round(time.monotonic() - start, 1)
            summary[letter] = {**numbers_found, "seconds": seconds}
            verdicts += claims
        summary["verdicts"] = verdicts
        figure.draw(args.out, sweep, summary)
        if len(letters) == 1:  # a single panel's numbers also stand at the top level
            summary = {**summary[letters], **summary}  # type: ignore[dict-item]
        sweep.finish(summary)
    print_verdicts(verdicts)


if __name__ == "__main__":
    cli.run(main, Args, prog=PROG)
