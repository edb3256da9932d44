"""Training settings that cannot be: one line with the flag, before anything is read."""

import dataclasses
import re

import pytest

from gatewright.errors import UserError
from sft.recipes import RECIPES, flag

NAN, INF = float("nan"), float("inf")
REFUSED = {
    "context_tokens": [0],
    "keep_checkpoints": [0],
    "log_every": [0],
    "eval_new_tokens": [0],
    "start_pool_size": [0],
    "steps": [-1],
    "lr_warmup_steps": [-5],
    "checkpoint_every": [-1],
    "eval_every": [-1],
    "eval_packs": [-1],
    "eval_calls": [-1],
    "early_stop": [-1],
    "lr": [0.0, -1.0, NAN, INF],
    "eps": [0.0, NAN, INF],
    "epochs": [-1.0, NAN, INF],
    "weight_decay": [-1.0, NAN, INF],
    "clip_norm": [-1.0, NAN, INF],
    "beta1": [-0.1, 1.0, NAN],
    "beta2": [2.0],
    "min_lr_ratio": [-0.1, 1.1, NAN],
    "ramp_share": [0.0, NAN],
    "gate_threshold": [0.0, 1.1, NAN],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, many in REFUSED.items() for v in many])
def test_every_number_has_its_range(name: str, value: float) -> None:
    with pytest.raises(UserError, match=re.escape(f"{flag(name)} {value}: give ")):
        dataclasses.replace(RECIPES.get("mamba2_debug_cpu"), **{name: value})


def test_a_run_has_steps_or_epochs() -> None:
    with pytest.raises(UserError, match=r"--train.steps or --train.epochs"):
        dataclasses.replace(RECIPES.get("mamba2_debug_cpu"), steps=0, epochs=0.0)
