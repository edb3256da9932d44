"""Say what a pretraining recipe will take, before it takes it.

    python -m tools.plan RECIPE [--gpus N] [--mfu 0.4] [--parallel.tensor 2 ...] [--json]

Prints parameters, FLOPs, tokens, memory per GPU by part (with and without recomputing
activations), checkpoint size and hours.  A layout that cannot work is refused with the reason.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from typing import Any

from gatewright import cli, config
from gatewright.errors import UserError
from gatewright.megatron import plan
from gatewright.megatron.config import ParallelConfig, PretrainConfig, TrainConfig
from gatewright.megatron.recipes import RECIPES
from gatewright.models import ModelConfig

PROG = "python -m tools.plan"
_HARDWARE = re.compile(r"(\d+)x([a-z]+\d+)$")


@dataclasses.dataclass(frozen=True)
class Args:
    """The recipe's values, and the hardware to plan for."""

    model: ModelConfig
    train: TrainConfig
    parallel: ParallelConfig
    gpus: int
    """GPUs of the run (from the recipe's name)."""
    peak_tflops: float
    """Dense bf16 peak of one GPU in TFLOP/s (from the recipe's name)."""
    mfu: float = 0.4
    """Model FLOPs utilisation to expect; measure it with tests/gpu/run.sh."""
    json: bool = False
    """Print JSON instead of a table."""

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise UserError(f"--gpus {self.gpus}: must be at least 1")
        if not 0 < self.peak_tflops < math.inf:
            raise UserError(f"--peak-tflops {self.peak_tflops}: must be finite and above 0")

    @classmethod
    def of_recipe(cls, name: str) -> Args:
        recipe = RECIPES.get(name)
        gpus, peak = 1, plan.PEAK_TFLOPS["h100"]
        if match := _HARDWARE.search(name):
            gpus, peak = int(match.group(1)), plan.PEAK_TFLOPS[match.group(2)]
        return cls(recipe.model, recipe.train, recipe.parallel, gpus, peak)


def figures(args: Args) -> dict[str, Any]:
    """Return every figure of the plan, in base units (FLOPs, bytes, tokens, hours).

    Raises:
        UserError: a layout that cannot hold the model, or a batch that does not divide.
    """
    run = PretrainConfig(model=args.model, train=args.train, parallel=args.parallel)
    model, train = args.model, args.train
    forward = model.forward_flops_per_token(train.seq_len_tokens)
    by_recompute = {}
    for recompute in ("none", "full"):
        changed = dataclasses.replace(run, train=dataclasses.replace(train, recompute=recompute))
        memory = plan.memory(changed, args.gpus)
        by_recompute[recompute] = {**dataclasses.asdict(memory), "total": memory.total}
    return {
        "parameters": model.parameters(),
        "parameters_without_embeddings": model.n_layers * model.layer_parameters(),
        "training_flops_per_token": model.training_flops_per_token(train.seq_len_tokens),
        "forward_flops_share": {k: v / sum(forward.values()) for k, v in forward.items()},
        "tokens_per_step": train.tokens_per_step,
        "steps": train.steps,
        "tokens": train.steps * train.tokens_per_step,
        "data_parallel": args.parallel.data(args.gpus),
        "microbatches_per_step": train.microbatches(args.parallel.data(args.gpus)),
        "memory_bytes_per_gpu": by_recompute,
        "checkpoint_bytes": plan.checkpoint_bytes(run),
        "hours": plan.hours(run, args.gpus, args.peak_tflops, args.mfu),
    }


def table(args: Args, found: dict[str, Any]) -> str:
    """Return the plan as text."""
    share = ", ".join(f"{k} {v:.0%}" for k, v in found["forward_flops_share"].items())
    lines = [
        ("parameters", f"{found['parameters'] / 1e9:.3f} B"),
        ("  without embeddings", f"{found['parameters_without_embeddings'] / 1e9:.3f} B"),
        ("FLOPs per token", f"{found['training_flops_per_token'] / 1e9:.2f} G ({share})"),
        ("tokens per step", f"{found['tokens_per_step']:,}"),
        ("steps", f"{found['steps']:,}"),
        ("tokens", f"{found['tokens'] / 1e9:.1f} B"),
        (
            "layout",
            f"tensor {args.parallel.tensor} x pipeline {args.parallel.pipeline} x context "
            f"{args.parallel.context} x data {found['data_parallel']}",
        ),
        ("microbatches per step", f"{found['microbatches_per_step']}"),
        ("checkpoint", f"{found['checkpoint_bytes'] / 1e9:.1f} GB"),
        (
            "wall clock",
            f"{found['hours']:.1f} h on {args.gpus} GPUs at MFU {args.mfu:.0%} of "
            f"{args.peak_tflops:.0f} TFLOP/s",
        ),
    ]
    width = max(len(name) for name, _ in lines)
    text = "\n".join(f"{name:<{width}}  {value}" for name, value in lines)
    memory = found["memory_bytes_per_gpu"]
    parts = list(memory["none"])
    text += f"\n\n{'memory per GPU, GB':<{width}}" + "".join(f"{p:>13}" for p in parts)
    for recompute, label in (("none", "activations kept"), ("full", "recomputed")):
        values = "".join(f"{memory[recompute][p] / 1e9:>13.2f}" for p in parts)
        text += f"\n{label:<{width}}{values}"
    return text


def main(args: Args) -> None:
    """Say what a pretraining recipe will take, before it takes it."""
    found = figures(args)
    print(json.dumps(found, indent=2) if args.json else table(args, found))


def run(argv: list[str]) -> None:
    """Take the recipe off the command line, then parse the rest over its values."""
    try:
        name, rest = config.split_recipe(argv, RECIPES, PROG)
        default = Args.of_recipe(name)
    except UserError as e:
        cli.fail(e)
    cli.run(main, Args, prog=f"{PROG} {name}", description=__doc__, default=default, argv=rest)


if __name__ == "__main__":
    run(sys.argv[1:])
