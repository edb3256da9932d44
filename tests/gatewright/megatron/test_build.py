"""Megatron models of every recipe: parameter counts, precision of gates, initial values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import pytest
import torch

from gatewright.errors import UserError
from gatewright.megatron import build, distributed
from gatewright.megatron.config import ParallelConfig
from gatewright.megatron.recipes import RECIPES
from tests.gatewright.megatron import tiny


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    with distributed.processes(ParallelConfig()):
        yield


@pytest.mark.parametrize("name", RECIPES.names())
def test_recipe_builds_with_the_parameters_of_the_formula(name: str) -> None:
    """On the meta device: nothing is allocated, the paper's 1.482B and 1.976B included."""
    config = RECIPES.get(name).model
    model = build.build_model(config, meta=True)
    assert all(p.is_meta for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) == config.parameters()


@pytest.mark.skipif(build.fused(), reason="Transformer Engine splits attention over tokens")
def test_local_attention_is_not_split_over_tokens() -> None:
    with pytest.raises(UserError, match=r"--parallel\.context 2: a llama's attention"):
        build.build_model(tiny.MODELS["llama"], parallel=ParallelConfig(context=2))


def test_gates_stay_fp32_in_a_bf16_model() -> None:
    model = build.build_model(tiny.MODELS["mamba2"], dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        expected = torch.float32 if build.is_gate(name) else torch.bfloat16
        assert parameter.dtype is expected, name
    gates = [n for n, _ in model.named_parameters() if build.is_gate(n)]
    assert len(gates) == 3 * tiny.MODELS["mamba2"].n_layers
    lowered = build.build_model(tiny.MODELS["mamba2"], dtype=torch.bfloat16, fp32_gates=False)
    assert all(p.dtype is torch.bfloat16 for p in lowered.parameters())


@pytest.mark.parametrize("offset", [0.0, -4.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_start_as_the_papers_say(offset: float, dtype: torch.dtype) -> None:
    """e^A_log ~ U(1, 16), shifted by the offset; softplus(dt_bias) log-uniform in [1e-3, 0.1]."""
    wide = dataclasses.replace(tiny.MODELS["mamba2"], d_model=1024, n_layers=2)
    model = build.build_model(wide, dtype=dtype, init_gate_offset=offset)
    values = {
        kind: torch.cat([p for n, p in model.named_parameters() if n.endswith(kind)])
        for kind in build.GATE_PARAMETERS
    }
    A = (values["A_log"] - offset).exp()
    assert 1 <= A.min() < 1.5
    assert 15.5 < A.max() <= 16.001
    assert A.mean().item() == pytest.approx(8.5, abs=0.6)  # uniform in A, not in log A
    log_dt = torch.nn.functional.softplus(values["dt_bias"]).log()
    low, high = math.log(1e-3), math.log(0.1)
    assert low - 0.01 < log_dt.min()
    assert log_dt.max() < high + 0.01
    assert log_dt.mean().item() == pytest.approx((low + high) / 2, abs=0.2)
    assert log_dt.std().item() == pytest.approx((high - low) / math.sqrt(12), abs=0.12)
    assert torch.equal(values["D"], torch.ones_like(values["D"]))


def test_megatrons_own_functions_come_back() -> None:
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer import mlp

    from gatewright.megatron.local_layers import bind_kernels

    places = (
        (mlp, "bias_swiglu_impl"),
        (layers, "linear_with_grad_accumulation_and_async_allreduce"),
    )
    bind_kernels().undo()  # a model built earlier in this process has bound them
    before = [getattr(*place) for place in places]
    assert all("megatron" in function.__module__ for function in before)
    with bind_kernels() as binding:
        assert bind_kernels() is binding
        assert all(getattr(*p) is not b for p, b in zip(places, before, strict=True))
    assert [getattr(*place) for place in places] == before
    bind_kernels().undo()
    assert [getattr(*place) for place in places] == before
