"""Run by torchrun from test_train: fine-tunes at every ZeRO stage in one process group.

torchrun -m tests.sft.zero_worker MODEL DATA OUT

A Mamba-2 in fp32 with one pass a step, a Llama in bf16 with two.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

from sft import parent, train
from sft.engine import process_group, use_device
from sft.recipes import RECIPES

CHANGES: dict[str, dict[str, Any]] = {
    "mamba2": {"global_batch_packs": 2},
    "llama": {"global_batch_packs": 4, "precision": "bf16"},
}


def main() -> None:
    model, data, out = map(Path, sys.argv[1:])
    family = parent.inspect(model).family
    recipe = f"{family}_debug_cpu"
    base = dataclasses.replace(
        RECIPES.get(recipe), context_tokens=512, steps=4, lr_warmup_steps=2, **CHANGES[family]
    )
    device = use_device()
    with process_group(device):
        for stage in (0, 1, 2, 3):
            config = dataclasses.replace(base, zero_stage=stage)
            args = train.Args(model, data, out / f"zero{stage}", config)
            run = train.Run(args, recipe, train.check(recipe, args), device)
            run.finish(run.loop())


if __name__ == "__main__":
    main()
