"""`python -m tools.plan_recall`: how large a state for so many facts, and the other way round.

    python -m tools.plan_recall --vocab 512 --facts 16 --recall 0.95
    python -m tools.plan_recall --checkpoint hf/mamba2 --facts 1,8,24

The first prints the (layers, D, N) that reach a target recall; the second the recall that
the capacity law predicts for a checkpoint's state, for example with as many tools in a pool
as there are facts.  These are predictions for an idealised task, not measurements and no bound:
trained cells recalled up to .17 more (docs/results/capacity), and a model may recall less for
any other reason.  Where N > D the law promises too much, so that no such size is planned.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any, Literal

from gatewright import cli, recall_law
from gatewright.errors import UserError

PROG = "python -m tools.plan_recall"
WIDTHS = (16, 32, 64, 128, 256, 512, 768, 1024, 2048, 4096)
PREDICTION = "capacity law (remark 4.3, theorem 4.6), not a measurement"
SOURCE_OF_A = {
    "linear": "theory; measured in docs/results/capacity",
    "full": "the paper's value for a full Mamba; docs/results/capacity says what was measured here",
}
MANY_SLOTS = "N > D: the law promises too much, a layer has no more than D independent slots"


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
        if self.vocab is not None and not 2 <= self.vocab <= recall_law.MOST:
            raise ValueError(f"--vocab must lie between 2 and {recall_law.MOST}")
        for flag, value in (("--layers", self.layers), ("--model", self.model)):
            if self.checkpoint is not None and value is not None:
                raise ValueError(f"{flag}: --checkpoint says it already; leave it out")


def read_state(folder: Path) -> recall_law.State:
    """Read a checkpoint's state size from its config.json.

    Raises:
        UserError: no config.json, or not one of a model with a recurrent state.
    """
    path = Path(folder) / "config.json"
    try:
        if Path(folder).is_file():
            raise UserError(f"--checkpoint {folder}: is a file; give the folder that holds it")
        if (Path(folder) / "checkpoint" / "config.json").is_file():
            raise UserError(
                f"--checkpoint {folder}: is an experiment's folder; give {folder}/checkpoint"
            )
        if not path.is_file():
            raise UserError(f"--checkpoint {folder}: has no config.json")
        config: dict[str, Any] = json.loads(path.read_text())
        state = recall_law.state_of(config)
    except OSError as e:
        raise UserError(f"--checkpoint {folder}: cannot read it ({e.strerror})") from e
    except (AttributeError, KeyError, ValueError) as e:
        raise UserError(f"{path}: cannot read the state's size ({type(e).__name__}: {e})") from e
    if state is None:
        groups = f" with n_groups {config['n_groups']}" if "n_groups" in config else ""
        raise UserError(
            f"{path}: model_type {config.get('model_type', '')!r}{groups} has no fixed state that "
            "the law describes; it holds for mamba, mamba2 with n_groups 1 and synthetic.capacity "
            "checkpoints"
        )
    return state


def counts(flag: str, text: str) -> list[int]:
    """Return the whole numbers of a flag, each from 1 to the largest that the law takes."""
    return cli.numbers(flag, text, int, least=1, most=recall_law.MOST)


def finite(facts: float) -> float | None:
    """Return a number of facts; None where guessing reaches the target at any number."""
    return None if math.isinf(facts) else facts


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
        "prediction": PREDICTION,
        "d": state.d,
        "n": state.n,
        "layers": state.layers,
        "vocab": state.vocab,
        "task": task,
        "model": state.model,
        "a": recall_law.PAIRS_PER_FACT[state.model, task],
        "a_source": SOURCE_OF_A[state.model],
        "b": recall_law.REACH[args.reach](state.vocab),
        "caution": MANY_SLOTS if state.more_slots_than_channels else None,
        "recall_at_facts": {
            str(f): state.recall(f, task, args.reach) for f in counts("--facts", args.facts)
        },
        "facts_at_half": finite(state.facts_at(0.5, task, args.reach)),
        "facts_at_target": finite(state.facts_at(args.recall, task, args.reach)),
        "target": args.recall,
    }


def sizes(args: Args) -> dict[str, Any]:
    """Return, for each number of facts, layers and width D, the N <= D that reaches the target."""
    if args.vocab is None:
        raise UserError("--vocab is needed without --checkpoint: how many answers compete?")
    model = args.model or "full"
    a = recall_law.PAIRS_PER_FACT[model, args.task or "mqar"]
    b = recall_law.REACH[args.reach](args.vocab)
    rows = []
    for facts in counts("--facts", args.facts):
        for layers in counts("--layers", args.layers or "1"):
            for d in WIDTHS:
                n = recall_law.state_size_for(args.recall, facts, d, a, b, layers)
                if n > d:
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
        "prediction": PREDICTION,
        "vocab": args.vocab,
        "target": args.recall,
        "a": a,
        "a_source": SOURCE_OF_A[model],
        "b": b,
        "left_out": MANY_SLOTS,
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
        print(f"a: {found['a_source']}")
        if found["caution"]:
            print(found["caution"])
        for facts, value in found["recall_at_facts"].items():
            print(f"{facts:>8} facts  predicted recall {value:.3f}")
        for target, at in ((0.5, found["facts_at_half"]), (args.recall, found["facts_at_target"])):
            where = "any number of" if at is None else f"{at:.1f}"
            print(f"predicted {100 * target:g}% at {where} facts")
        return
    print(
        f"V {found['vocab']}, target {found['target']:g}: D must exceed {found['smallest_d']:.1f}"
    )
    print(f"a {found['a']:g}: {found['a_source']}")
    print(f"{'facts':>7} {'layers':>6} {'D':>5} {'N':>6} {'state':>9} {'recall':>7}")
    for row in found["sizes"]:
        print(
            f"{row['facts']:>7} {row['layers']:>6} {row['d']:>5} {row['n']:>6} "
            f"{row['state_elements']:>9} {row['recall']:>7.3f}"
        )
    planned = {(row["facts"], row["layers"]) for row in found["sizes"]}
    for facts, layers in itertools.product(
        counts("--facts", args.facts), counts("--layers", args.layers or "1")
    ):
        if (facts, layers) not in planned:
            print(f"{facts:>7} {layers:>6}  no D up to {WIDTHS[-1]} with N <= D reaches it")
    print(f"left out: sizes with {found['left_out']}")


if __name__ == "__main__":
    cli.run(main, Args, prog=PROG)
