"""The harness on C++ kernels equals what PyTorch spells out in float64, gradients too."""

import pytest
import torch
from torch import Tensor

from gatewright.kernels import backend
from gatewright.kernels.native import recall_cell
from synthetic import ensemble
from synthetic.ensemble import Parameters
from synthetic.recall import cells, fused, model
from synthetic.recall.cells import Cell

VOCAB = 20
SETTINGS = [  # length, asked tokens, both directions, layers
    (1, [0], True, 1),
    (19, [3, 11], True, 1),
    (20, [19], True, 2),
    (37, [20, 5, 5], False, 2),
]


@pytest.fixture(autouse=True)
def compiled() -> None:
    if backend.native_library() is None:
        pytest.skip(backend.why())


def size(name: str, conv: bool, width: int, length: int, layers: int, both: bool) -> model.Size:
    return model.Size(Cell(name, width, conv), VOCAB, length, layers, both)  # type: ignore[arg-type]


def parameters(of: model.Size, spread: float = 0.1) -> Parameters:
    g = torch.Generator().manual_seed(1)
    p = model.initial(of, [0, 1])
    return {k: v + spread * torch.randn(v.shape, generator=g) for k, v in p.items()}


def evaluate(of: model.Size, p: Parameters, tokens: Tensor, read: Tensor) -> dict[str, Tensor]:
    p = {k: v.requires_grad_() for k, v in p.items()}
    out = model.logits(p, of, tokens, read)
    grads = torch.autograd.grad(out.square().sum(), list(p.values()), allow_unused=True)
    return {
        "logits": out,
        **{k: torch.zeros_like(p[k]) if d is None else d for k, d in zip(p, grads, strict=True)},
    }


@pytest.mark.parametrize("conv", [True, False])
@pytest.mark.parametrize("name", [n for n in cells.NAMES if n != "attention"])
def test_every_cell_on_the_kernel_is_itself_in_float64(name: str, conv: bool) -> None:
    for width, (length, asked, both, layers) in [
        *((32, s) for s in SETTINGS),
        (8, SETTINGS[1]),
        (64, SETTINGS[3]),
    ]:
        of = size(name, conv, width, length, layers, both)
        g = torch.Generator().manual_seed(length)
        tokens = torch.randint(VOCAB, (2, 11, length), generator=g)
        read = torch.tensor(asked).expand(2, 11, -1)
        p = parameters(of)
        assert fused.library_for(model.kernel_layout(of.cell), p["embedding"]) is not None
        got = evaluate(of, dict(p), tokens, read)
        want = evaluate(of, {k: v.double() for k, v in p.items()}, tokens, read)
        for k in want:
            error = (got[k] - want[k]).abs().max() / (want[k].abs().max() + 1e-4)
            assert error < 5e-5, (k, width, length, float(error))


@pytest.mark.parametrize("name", ["gated_deltanet", "rwkv7", "mamba2"])
def test_strong_decays_and_closed_gates_stay_finite_and_right(name: str) -> None:
    of = size(name, True, 32, 40, 1, True)
    p = parameters(of)
    for k in p:
        if k.endswith(("gate_bias", "beta_bias", "decay_bias", "rate_bias", "A_log", "dt_bias")):
            p[k] = torch.linspace(-7, 7, p[k].numel()).view_as(p[k]) / (3 if "A" in k else 1)
    tokens = torch.randint(VOCAB, (2, 4, 40), generator=torch.Generator().manual_seed(3))
    read = torch.tensor([39, 0, 17]).expand(2, 4, -1)
    got = evaluate(of, dict(p), tokens, read)
    want = evaluate(of, {k: v.double() for k, v in p.items()}, tokens, read)
    for k in want:
        assert bool(torch.isfinite(got[k]).all()), k
        error = (got[k] - want[k]).abs().max() / (want[k].abs().max() + 1e-4)
        assert error < 1e-4, (k, float(error))


@pytest.mark.parametrize("name", ["gated_deltanet", "gated_deltanet_scalar"])
def test_on_the_kernel_too_a_gate_held_at_one_is_deltanet(name: str) -> None:
    of, plain = size(name, True, 32, 37, 2, True), size("deltanet", True, 32, 37, 2, True)
    free = parameters(of)
    held = dict(free)
    for k, v in free.items():
        if k.endswith((".gate", ".gate_bias")):
            held[k] = torch.full_like(v, 100.0) if k.endswith("bias") else torch.zeros_like(v)
    ungated = {k: v for k, v in free.items() if ".gate" not in k}
    assert fused.library_for(model.kernel_layout(of.cell), free["embedding"]) is not None
    tokens = torch.randint(VOCAB, (2, 4, 37), generator=torch.Generator().manual_seed(0))
    read = torch.tensor([36, 11]).expand(2, 4, -1)
    want = model.logits(ungated, plain, tokens, read)
    scale = float(want.abs().max())
    assert float((model.logits(held, of, tokens, read) - want).abs().max()) < 1e-6 * scale
    assert float((model.logits(free, of, tokens, read) - want).abs().max()) > 1e-4 * scale


def test_all_tokens_read_is_every_token_asked_for() -> None:
    of = size("rwkv7", True, 32, 21, 1, True)
    layout = model.kernel_layout(of.cell)
    assert layout is not None
    u = torch.randn(2, 3, 21, 32, generator=torch.Generator().manual_seed(0))
    library = fused.library_for(layout, u)
    assert library is not None
    p = cells.initial(of.cell, ensemble.generators([0, 1], 0))
    norm = torch.ones(2, 32), torch.zeros(2, 32)
    asked = torch.arange(21).expand(2, 3, -1)
    for reverse in (False, True):
        every = fused.cell(library, layout, p, norm, u, read=None, reverse=reverse)
        some = fused.cell(library, layout, p, norm, u, read=asked, reverse=reverse)
        torch.testing.assert_close(every, some)
    assert fused.library_for(layout, u.double()) is None
    more = torch.arange(22).expand(2, 3, -1)
    with pytest.raises(IndexError, match="asked tokens 0 to 21 of 21"):
        fused.cell(library, layout, p, norm, u, read=more, reverse=False)
    other = model.kernel_layout(Cell("deltanet"))
    assert other is not None
    with pytest.raises(ValueError, match="projections do not fit"):
        fused.cell(library, other, p, norm, u, read=None, reverse=False)


def test_without_the_kernels_the_model_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    of = size("gated_deltanet", True, 32, 19, 2, True)
    p = parameters(of)
    tokens = torch.randint(VOCAB, (2, 5, 19), generator=torch.Generator().manual_seed(0))
    read = torch.tensor([18]).expand(2, 5, -1)
    fast = evaluate(of, dict(p), tokens, read)
    monkeypatch.setenv("GATEWRIGHT_KERNELS", "torch")
    assert fused.library_for(model.kernel_layout(of.cell), p["embedding"]) is None
    plain = evaluate(of, dict(p), tokens, read)
    for k in fast:
        torch.testing.assert_close(fast[k], plain[k], rtol=1e-3, atol=1e-4)


def test_value_rows_that_only_pad_do_not_reach_the_gradients() -> None:
    """Three heads of 8 rows are padded to 32 rows, and many sequences go through one worker."""
    members, sequences, tokens, width, keys, values, heads = 1, 16, 12, 16, 16, 24, 3
    layout = recall_cell.Layout(
        *("mamba2", keys, values),
        q_at=keys + values + heads,
        k_at=0,
        v_at=keys,
        q_tap=0,
        k_tap=keys,
        v_tap=2 * keys,
        gate_at=keys + values,
        gate_width=heads,
        heads=heads,
    )
    torch.manual_seed(0)
    columns = 2 * keys + values + heads
    same = torch.randn(members, 1, tokens, width).expand(members, sequences, tokens, width)
    u, weight = same.clone().requires_grad_(), 0.2 * torch.randn(members, columns, width)
    bias, ones = torch.zeros(members, columns), torch.ones(members, heads)
    library = backend.native_library()
    out = recall_cell.RecallCell.apply(
        *(library, layout, u, weight, bias, False, None, None, None, None, ones, ones)
    )
    (du,) = torch.autograd.grad(out.square().sum(), u)
    assert torch.equal(du, du[:, :1].expand_as(du))
