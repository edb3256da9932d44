"""Run by torchrun from test_train: fine-tunes at every ZeRO stage in one process group.

torchrun -m tests.sft.zero_worker MODEL DATA OUT
"""

import dataclasses
import sys
from pathlib import Path

from sft import train
from sft.engine import process_group, use_device
from sft.recipes import RECIPES


def main() -> None:
    model, data, out = map(Path, sys.argv[1:])
    base = dataclasses.replace(
        RECIPES.get("mamba2_debug_cpu"),
        context_tokens=512,
        steps=4,
        global_batch_packs=2,
        lr_warmup_steps=2,
    )
    device = use_device()
    with process_group(device):
        for stage in (0, 1, 2, 3):
            config = dataclasses.replace(base, zero_stage=stage)
            args = train.Args(model, data, out / f"zero{stage}", config)
            run = train.Run(args, "mamba2_debug_cpu", train.check("mamba2_debug_cpu", args), device)
            run.finish(run.loop())


if __name__ == "__main__":
    main()
