"""Every field of a run refuses what it cannot be, in one line that names its flag."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from gatewright.errors import UserError
from tests.gatewright.megatron import tiny

BAD: list[tuple[str, str, Any]] = [
    *(
        ("train", name, value)
        for name in ("steps", "seq_len_tokens", "global_batch_sequences", "micro_batch_sequences")
        for value in (0, -1)
    ),
    *(("train", name, value) for name in ("lr", "min_lr") for value in (-1.0, math.inf, math.nan)),
    ("train", "min_lr", 0.1),  # above lr
    ("train", "lr_warmup_steps", -5),
    ("train", "lr_warmup_steps", 10),  # all of the steps
    *(("train", "weight_decay", value) for value in (-1.0, math.inf, math.nan)),
    *(
        ("train", name, value)
        for name in ("adam_beta1", "adam_beta2")
        for value in (-0.1, 1.0, 2.0, math.nan)
    ),
    *(("train", "adam_eps", value) for value in (0.0, -1.0, math.inf, math.nan)),
    *(("train", "clip_grad_norm", value) for value in (0.0, -1.0, math.nan)),
    *(("train", "init_std", value) for value in (0.0, -1.0, math.inf, math.nan)),
    *(("train", "seed", value) for value in (-1, 2**31)),
    *(("train", "spike_factor", value) for value in (-2.0, math.inf, math.nan)),
    ("train", "steps", 10**12),
    ("train", "seq_len_tokens", 65),  # the models of these tests say 64
    *(("checkpoint", name, 0) for name in ("every_steps", "keep_last")),
    ("checkpoint", "keep_every_steps", -3),
    ("log", "every_steps", 0),
    ("log", "gates_every_steps", -7),
    *(("parallel", name, 0) for name in ("tensor", "pipeline", "context")),
    ("parallel", "sequence", True),  # of one process
    *(
        ("model", name, value)
        for name in ("vocab_size", "d_model", "n_layers", "max_seq_len_tokens", "head_dim")
        for value in (0, -1)
    ),
    *(("model", name, 0) for name in ("expand", "d_state", "ngroups", "d_conv", "chunk_size")),
    *(("model", "norm_eps", value) for value in (0.0, math.nan)),
]


@pytest.mark.parametrize(("part", "name", "value"), BAD)
def test_a_field_refuses_what_it_cannot_be(part: str, name: str, value: Any) -> None:
    with pytest.raises(UserError) as caught:
        tiny.config("mamba2", **{part: {name: value}})
    flag = f"model.{name}" if part == "model" else f"--{part}.{name.replace('_', '-')}"
    assert flag in str(caught.value).replace("--model.max-seq-len-tokens", "model.")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n_heads", 0),
        ("n_kv_heads", 0),
        ("n_kv_heads", 3),
        ("ffn_dim", -1),
        ("head_dim", 7),
        ("rope_theta", 0.0),
        ("rope_theta", math.nan),
    ],
)
def test_a_llama_refuses_what_it_cannot_be(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"model.{name}"):
        dataclasses.replace(tiny.MODELS["llama"], **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("exit_duration_minutes", -5.0), ("exit_duration_minutes", math.nan)],
)
def test_a_run_refuses_what_it_cannot_be(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"--{name.replace('_', '-')} "):
        dataclasses.replace(tiny.config("mamba2"), **{name: value})


def test_every_field_has_a_case() -> None:
    """A new field with a number in it is a new way to get it wrong."""
    config = tiny.config("mamba2")
    numbers = {
        (part, field.name)
        for part in ("train", "checkpoint", "log", "parallel")
        for field in dataclasses.fields(getattr(config, part))
        if type(getattr(getattr(config, part), field.name)) in (int, float)
    }
    assert numbers <= {(part, name) for part, name, _ in BAD}
