"""The plan's formulas against what small models really hold, keep and compute."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from gatewright.errors import UserError
from gatewright.kernels import backend
from gatewright.megatron import build, distributed, plan
from gatewright.megatron.config import ParallelConfig
from gatewright.megatron.recipes import RECIPES
from gatewright.models import ModelConfig
from tests.gatewright.megatron import tiny

S, B = 128, 2
MODELS = {
    "mamba2": ModelConfig(
        "mamba2", 512, 128, 2, d_state=32, head_dim=32, ngroups=2, max_seq_len_tokens=S
    ),
    "llama": ModelConfig(
        "llama",
        512,
        128,
        2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=32,
        ffn_dim=320,
        max_seq_len_tokens=S,
    ),
}
FAMILIES = list(MODELS)


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    with distributed.processes(ParallelConfig()):
        yield


def kept_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of all distinct tensors, parameters apart, kept for a backward pass."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}  # alive, so that no address is used twice

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    tokens = torch.randint(512, (B, S))
    positions = torch.arange(S).expand(B, S)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(tokens, positions, None, labels=tokens).sum()
    loss.backward()
    return sum(storage.nbytes() for storage in kept.values())


def cpu_extras(config: ModelConfig) -> float:
    """Return the values per token that the CPU's layers keep and fused ones on GPUs do not.

    Our scan keeps each chunk's state.  Below zero: with the C++ kernels the mixer gates inside
    its norm (no gated copy is kept), and q, k and v are kept only as rotated.  Without them the
    unfused SwiGLU keeps its two halves once more.
    """
    native = backend.native_library() is not None
    if config.family == "mamba2":
        states = config.d_inner * config.d_state / config.chunk_size
        return states - config.d_inner if native else states
    return -(config.n_heads + config.n_kv_heads) * config.head_dim if native else 2 * config.ffn_dim


@pytest.mark.parametrize("family", FAMILIES)
def test_activation_formula_is_what_a_layer_keeps(family: str) -> None:
    """Two depths, so that embedding and output cancel."""
    config = MODELS[family]
    two, four = (
        kept_bytes(build.build_model(dataclasses.replace(config, n_layers=n))) for n in (2, 4)
    )
    measured = (four - two) / 2 / (4 * B * S)
    formula = plan.layer_activation_elements(config, ParallelConfig()) + cpu_extras(config)
    assert measured == pytest.approx(formula, rel=0.04)


@pytest.mark.parametrize("family", FAMILIES)
def test_recompute_takes_effect(family: str) -> None:
    """Saved tensors do not grow with depth: a layer's input is all that is held, elsewhere."""
    config = dataclasses.replace(MODELS[family], n_layers=2)
    deep = dataclasses.replace(MODELS[family], n_layers=4)
    kept = [kept_bytes(build.build_model(c, recompute="full")) for c in (config, deep)]
    assert (kept[1] - kept[0]) / 2 <= 4 * B * S * MODELS[family].d_model
    whole = [kept_bytes(build.build_model(c)) for c in (config, deep)]
    assert (kept[1] - kept[0]) < 0.2 * (whole[1] - whole[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_flops_formula_counts_every_matrix_product(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GATEWRIGHT_KERNELS", "torch")  # PyTorch counts its own products only
    model = build.build_model(MODELS[family])
    tokens = torch.randint(512, (B, S))
    # without gradients: the loss would compute its own already on the way forward
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(tokens, torch.arange(S).expand(B, S), None, labels=tokens)
    counts = counter.get_flop_counts()["Global"]
    dense = sum(v for op, v in counts.items() if str(op) in ("aten.mm", "aten.addmm"))
    parts = MODELS[family].forward_flops_per_token(S)
    assert dense == B * S * (parts["projections"] + parts["output"])


def test_llama_mixing_flops_are_those_of_causal_attention() -> None:
    config = MODELS["llama"]
    pairs = S * (S + 1) / 2
    per_head = 2 * 2 * pairs * config.head_dim  # q k, and weights times v
    total = config.n_layers * config.n_heads * per_head
    assert config.forward_flops_per_token(S)["mixing"] == total / S


def test_mamba_mixing_flops_are_those_of_the_chunked_algorithm() -> None:
    """Counted product by product for one chunk of Q tokens, as the paper's listing 1 does."""
    config, Q = dataclasses.replace(MODELS["mamba2"], n_layers=1), 64
    config = dataclasses.replace(config, chunk_size=Q)
    G, N, H, P = config.ngroups, config.d_state, config.n_ssm_heads, config.head_dim
    pairs = Q * (Q + 1) / 2  # token pairs that causality leaves
    chunk = 2 * pairs * N * G  # C B^T
    chunk += 2 * pairs * P * H  # (C B^T masked) x
    chunk += 2 * Q * N * P * H  # B^T x: the state a chunk adds
    chunk += 2 * Q * N * P * H  # C h: what the state before contributes
    convolution = 2 * config.d_conv * (config.d_inner + 2 * G * N)
    assert config.forward_flops_per_token(S)["mixing"] == chunk / Q + convolution


@pytest.mark.parametrize("name", RECIPES.names())
def test_local_parameters_add_up(name: str) -> None:
    model = RECIPES.get(name).model
    assert plan.local_parameters(model, ParallelConfig(), 0) == model.parameters()
    spread = ParallelConfig(tensor=2, pipeline=2)
    total = 2 * sum(plan.local_parameters(model, spread, stage) for stage in (0, 1))
    norms = model.n_layers * (1 if model.family == "mamba2" else 2) + 1
    repeated = norms * model.d_model  # on both tensor-parallel processes
    repeated += model.vocab_size * model.d_model * model.tie_embeddings  # on both stages
    assert total == model.parameters() + repeated


def test_layouts_that_cannot_work_are_refused_with_the_reason() -> None:
    mamba, llama = tiny.MODELS["mamba2"], tiny.MODELS["llama"]
    one_group = dataclasses.replace(mamba, ngroups=1)
    odd = dataclasses.replace(llama, vocab_size=50_257)
    for model, parallel, reason in (
        (one_group, ParallelConfig(tensor=2), r"ngroups 1 is not a multiple"),
        (odd, ParallelConfig(tensor=2), r"vocab_size 50257 .* \(the next that is: 50258\)"),
        (llama, ParallelConfig(tensor=4), r"n_kv_heads 2 is not a multiple"),
        (mamba, ParallelConfig(pipeline=3), r"n_layers 4 is not a multiple"),
    ):
        with pytest.raises(UserError, match=reason):
            parallel.check(model, 32)
    with pytest.raises(UserError, match="12 processes cannot hold"):
        ParallelConfig(tensor=8).data(12)
