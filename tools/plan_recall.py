"""`python -m tools.plan_recall`: how large a state for so many facts, and the other way round.

    python -m tools.plan_recall --vocab 512 --facts 16 --recall 0.95
    python -m tools.plan_recall --checkpoint hf/mamba2 --facts 1,8,24

The first prints the (layers, D, N) that reach a target recall; the second the recall that
the capacity law predicts for a checkpoint's state, for example with as many tools in a pool
as there are facts.  These are predictions of an upper bound on the state, not measurements:
a trained model may fall short of them for other reasons.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, Literal

from gatewright import cli, recall_law
from gatewright.errors import UserError

PROG = "python -m tools.plan_recall"
WIDTHS = (16, 32, 64, 128, 256, 512, 768, 1024, 2048, 4096)


@dataclasses.dataclass
class Args:
    """Predict recall from the size of a recurrent state, or the size from the recall."""

    facts: str
    """Facts to hold at once (key-value pairs, tools in a pool), comma-separated."""
    vocab: int | None = None
    """V, how many different answers compete; a checkpoint's own vocabulary if left out."""
    recall: float = 0.95
    """Target probability of recalling a fact, between 0 and 1."""
    layers: str | None = None
    """Recurrent layers that may share the load, comma-separated (planning only; default 1)."""
    task: Literal["ar", "mqar"] | None = None
    """ar: one question after the facts; mqar: many questions, themselves part of the text.
    Default: what a synthetic checkpoint was trained on, else mqar."""
    model: Literal["linear", "full"] | None = None
    """linear: the simplified Mamba; full: one with gates and nonlinearities (planning only;
    default full)."""
    reach: recall_law.Reach = "mean_of_max"
    """Which b: the authors' code (mean of the largest of V Gaussians) or the paper's text."""
    checkpoint: Path | None = None
    """Folder with a config.json (Hugging Face Mamba or synthetic.capacity train --save)."""
    json: bool = False
    """Print JSON instead of a table."""

    def __post_init__(self) -> None:
        if not 0 < self.recall < 1:
            raise ValueError(f"--recall lies strictly between 0 and 1, not {self.recall}")
        if self.vocab is not None and self.vocab < 2:
            raise ValueError(f"--vocab must be at least 2, not {self.vocab}")
        for flag, value in (("--layers", self.layers), ("--model", self.model)):
            if self.checkpoint is not None and value is not None:
                raise ValueError(f"{flag}: --checkpoint says it already; leave it out")


def read_state(folder: Path) -> recall_law.State:
    """Read a checkpoint's state size from its config.json.

    Raises:
        UserError: no config.json, or not one of a model with a recurrent state.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise UserError(f"--checkpoint {folder}: has no config.json")
    try:
        config: dict[str, Any] = json.loads(path.read_text())
        state = recall_law.state_of(config)
    except (json.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError) as e:
        raise UserError(f"{path}: cannot read the state's size ({type(e).__name__}: {e})") from e
    if state is None:
        raise UserError(
            f"{path}: model_type {config.get('model_type', '')!r} has no fixed state that the law "
            "describes; it holds for mamba, mamba2 and synthetic.capacity checkpoints"
        )
    return state


def for_checkpoint(args: Args) -> dict[str, Any]:
    """Return the predicted recall at each number of facts, and the facts at 50% and target."""
    assert args.checkpoint is not None
    state = read_state(args.checkpoint)
    if args.vocab is not None:
        state = dataclasses.replace(state, vocab=args.vocab)
    if args.task and state.task and args.task != state.task:
        raise UserError(
            f"--task {args.task}: {args.checkpoint} was trained on {state.task}; leave --task out"
        )
    task = state.task or args.task or "mqar"
    return {
        "prediction": "capacity law (remark 4.3, theorem 4.6), not a measurement",
        "d": state.d,
        "n": state.n,
        "layers": state.layers,
        "vocab": state.vocab,
        "task": task,
        "model": state.model,
        "a": recall_law.PAIRS_PER_FACT[state.model, task],
        "b": recall_law.REACH[args.reach](state.vocab),
        "recall_at_facts": {
            str(f): state.recall(f, task, args.reach)
            for f in cli.numbers("--facts", args.facts, int, least=1)
        },
        "facts_at_half": state.facts_at(0.5, task, args.reach),
        "facts_at_target": state.facts_at(args.recall, task, args.reach),
        "target": args.recall,
    }


def sizes(args: Args) -> dict[str, Any]:
    """Return, for each number of facts, layers and width D, the N that reaches the target."""
    if args.vocab is None:
        raise UserError("--vocab is needed without --checkpoint: how many answers compete?")
    a = recall_law.PAIRS_PER_FACT[args.model or "full", args.task or "mqar"]
    b = recall_law.REACH[args.reach](args.vocab)
    rows = []
    for facts in cli.numbers("--facts", args.facts, int, least=1):
        for layers in cli.numbers("--layers", args.layers or "1", int, least=1):
            for d in WIDTHS:
                n = recall_law.state_size_for(args.recall, facts, d, a, b, layers)
                if math.isinf(n):
                    continue
                n = max(1, math.ceil(n))
                rows.append(
                    {
                        "facts": facts,
                        "layers": layers,
                        "d": d,
                        "n": n,
                        "state_elements": 2 * layers * d * n,
                        "recall": recall_law.recall(d, n, facts, a, b, layers),
                    }
                )
    return {
        "prediction": "capacity law (remark 4.3, theorem 4.6), not a measurement",
        "vocab": args.vocab,
        "target": args.recall,
        "a": a,
        "b": b,
        "smallest_d": recall_law.smallest_width(args.recall, b),
        "sizes": rows,
    }


def main(args: Args) -> None:
    """Predict recall from state sizes, or state sizes from recall."""
    found = for_checkpoint(args) if args.checkpoint else sizes(args)
    if args.json:
        print(json.dumps(found, indent=2))
        return
    if args.checkpoint:
        print(
            f"state: D {found['d']}, N {found['n']}, {found['layers']} layers; "
            f"V {found['vocab']}, {found['task']}, {found['model']} (a {found['a']:g}, "
            f"b {found['b']:.3f})"
        )
        for facts, value in found["recall_at_facts"].items():
            print(f"{facts:>8} facts  predicted recall {value:.3f}")
        print(f"predicted 50% at {found['facts_at_half']:.1f} facts")
        print(f"predicted {found['target']:.0%} at {found['facts_at_target']:.1f} facts")
        return
    print(
        f"V {found['vocab']}, target {found['target']:g}: D must exceed {found['smallest_d']:.1f}"
    )
    print(f"{'facts':>7} {'layers':>6} {'D':>5} {'N':>6} {'state':>9} {'recall':>7}")
    for row in found["sizes"]:
        print(
            f"{row['facts']:>7} {row['layers']:>6} {row['d']:>5} {row['n']:>6} "
            f"{row['state_elements']:>9} {row['recall']:>7.3f}"
        )


if __name__ == "__main__":
    cli.run(main, Args, prog=PROG)
