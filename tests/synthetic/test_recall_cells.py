"""Every fast cell equals its recurrence, gradients too, at odd lengths; budgets are matched."""

import pytest
import torch

from gatewright.rank_one_scan import MIN_LOG_DECAY, chunked, recurrence
from synthetic import ensemble
from synthetic.recall import cells, model
from synthetic.recall.cells import Cell

RECURRENT = [n for n in cells.NAMES if n != "attention"]


def inputs(length: int, rank_one: bool, scalar: bool, floor: float) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(length)
    q, k, a, b = (torch.randn(3, length, 6, generator=g).double() * 0.4 for _ in range(4))
    v = torch.randn(3, length, 5, generator=g).double()
    log_w = -torch.rand(3, length, 1 if scalar else 6, generator=g).double() * -floor
    return [t.requires_grad_() for t in ([q, k, v, log_w, a, b] if rank_one else [q, k, v, log_w])]


@pytest.mark.parametrize("length", [1, 7, 16, 17, 45])
@pytest.mark.parametrize("rank_one", [True, False])
@pytest.mark.parametrize(("scalar", "floor"), [(False, -0.6), (True, 0.0), (True, MIN_LOG_DECAY)])
def test_chunks_equal_the_recurrence_gradients_too(
    length: int, rank_one: bool, scalar: bool, floor: float
) -> None:
    args = inputs(length, rank_one, scalar, floor)
    slow, fast = recurrence(*args), chunked(*args)
    torch.testing.assert_close(fast, slow)
    weight = torch.randn(slow.shape, generator=torch.Generator().manual_seed(1)).double()
    want = torch.autograd.grad((slow * weight).sum(), args)
    got = torch.autograd.grad((fast * weight).sum(), args)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y)


def test_the_strongest_decay_does_not_overflow_single_precision() -> None:
    args = [t.detach().float() for t in inputs(50, True, False, 0.0)]
    args[3] = torch.full_like(args[3], MIN_LOG_DECAY).requires_grad_()
    fast = chunked(*args)
    torch.testing.assert_close(fast, recurrence(*args), rtol=1e-4, atol=1e-5)
    assert bool(torch.isfinite(torch.autograd.grad(fast.sum(), args[3])[0]).all())


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("conv", [True, False])
@pytest.mark.parametrize("length", [1, 19])
def test_a_fast_cell_is_its_recurrence_gradients_too(name: str, conv: bool, length: int) -> None:
    width = 8
    p = cells.initial(Cell(name, width, conv), ensemble.generators([0, 1], 0))  # type: ignore[arg-type]
    g = torch.Generator().manual_seed(2)
    p = {
        k: (v + 0.1 * torch.randn(v.shape, generator=g)).double().requires_grad_()
        for k, v in p.items()
    }
    x = torch.randn(2, 3, length, width, generator=g).double().requires_grad_()
    outs, grads = [], []
    for fast in (True, False):
        y = cells.forward(Cell(name, width, conv, fast=fast), p, x, causal=True)  # type: ignore[arg-type]
        outs.append(y)
        grads.append(torch.autograd.grad(y.square().sum(), [x, *p.values()], allow_unused=True))
    torch.testing.assert_close(*outs)
    for fast_grad, slow_grad in zip(*grads, strict=True):
        torch.testing.assert_close(fast_grad, slow_grad)


@pytest.mark.parametrize("name", cells.NAMES)
def test_cells_are_causal_and_members_are_separate(name: str) -> None:
    cell = Cell(name, 8, conv=name != "attention")  # type: ignore[arg-type]
    p = cells.initial(cell, ensemble.generators([0, 1], 0))
    x = torch.randn(2, 3, 21, 8, generator=torch.Generator().manual_seed(0))
    y = cells.forward(cell, p, x, causal=True)
    later = x.clone()
    later[:, :, 13:] += 1
    torch.testing.assert_close(cells.forward(cell, p, later, causal=True)[:, :, :13], y[:, :, :13])
    other = x.clone()
    other[0] += 1
    torch.testing.assert_close(cells.forward(cell, p, other, causal=True)[1], y[1])


def test_a_gate_held_at_one_is_deltanet() -> None:
    for name in ("gated_deltanet", "gated_deltanet_scalar"):
        gated = cells.initial(Cell(name), ensemble.generators([3], 0))  # type: ignore[arg-type]
        held = {
            **gated,
            "gate": torch.zeros_like(gated["gate"]),
            "gate_bias": torch.full_like(gated["gate_bias"], 100.0),
        }
        plain = {k: v for k, v in gated.items() if not k.startswith("gate")}
        x = torch.randn(1, 2, 37, 32, generator=torch.Generator().manual_seed(0))
        want = cells.forward(Cell("deltanet"), plain, x, causal=True)
        got = cells.forward(Cell(name), held, x, causal=True)  # type: ignore[arg-type]
        assert float((got - want).abs().max()) < 1e-6
        free = cells.forward(Cell(name), gated, x, causal=True)  # type: ignore[arg-type]
        assert float((free - want).abs().max()) > 1e-4


def test_the_diagonal_ablation_is_rwkv7_without_its_rank_one_term() -> None:
    p = cells.initial(Cell("rwkv7"), ensemble.generators([0], 0))
    off = {
        **p,
        "rate": torch.zeros_like(p["rate"]),
        "rate_bias": torch.full_like(p["rate_bias"], -200.0),
    }
    x = torch.randn(1, 2, 23, 32, generator=torch.Generator().manual_seed(0))
    diagonal = {k: v for k, v in p.items() if k not in ("rate", "rate_bias", "removal")}
    torch.testing.assert_close(
        cells.forward(Cell("rwkv7"), off, x, causal=True),
        cells.forward(Cell("rwkv7_diagonal"), diagonal, x, causal=True),
    )


# Parameters of the MQAR models at K = 32, both directions: (armed, unarmed).
COUNTS = {
    "deltanet": (24_162, 23_202),
    "gated_deltanet": (26_274, 25_314),
    "gated_deltanet_scalar": (24_228, 23_268),
    "rwkv7": (30_432, 29_472),
    "rwkv7_diagonal": (28_256, 27_296),
    "mamba2": (30_800, 29_840),
    "attention": (None, 16_992),
}


@pytest.mark.parametrize("name", cells.NAMES)
@pytest.mark.parametrize("conv", [True, False])
def test_parameters_are_counted_and_state_is_matched(name: str, conv: bool) -> None:
    want = COUNTS[name][0 if conv else 1]
    if want is None:
        return
    cell = Cell(name, conv=conv)  # type: ignore[arg-type]
    assert model.parameter_count(model.Size(cell, 64, 72)) == want
    assert cell.state_elements == (0 if name == "attention" else 1024)


def test_which_cells_match_in_parameters() -> None:
    # The paper matches about 28.9k (rank-one) with 29.3k (Mamba-2), 1.4% apart.  Ours, that
    # claim's two cells: armed 1.2%, as compared (Mamba-2 armed, rank-one not) 4.3%.  The delta
    # family is smaller and matched in state only.
    for conv in (0, 1):
        assert COUNTS["rwkv7"][conv] / COUNTS["mamba2"][conv] > 0.987  # type: ignore[operator]
    assert COUNTS["rwkv7"][1] / COUNTS["mamba2"][0] > 0.956  # type: ignore[operator]
    for armed, unarmed in COUNTS.values():
        if armed is not None:
            assert armed - unarmed == 2 * 480  # the convolution: 0.5k a direction


def test_attention_is_plain_softmax_attention() -> None:
    p = cells.initial(Cell("attention", 8, conv=False), ensemble.generators([0], 0))
    x = torch.randn(1, 2, 9, 8, generator=torch.Generator().manual_seed(0))
    q, k, v = (x[0] @ p["qkv"][0].T).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    o = (q @ k.mT / 2).softmax(-1) @ v
    want = o.transpose(1, 2).flatten(2) @ p["out_proj"][0].T
    got = cells.forward(Cell("attention", 8, conv=False), p, x, causal=False)[0]
    torch.testing.assert_close(got, want)


def test_bad_cells_are_refused() -> None:
    with pytest.raises(ValueError, match="no cell"):
        Cell("mamba3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unarmed control"):
        Cell("attention", conv=True)
    for width in (1, 6, 10):
        with pytest.raises(ValueError, match=f"--width {width}: mamba2"):
            Cell("mamba2", width)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("name", ["gated_deltanet", "attention"])
def test_direction_decides_what_a_position_sees(name: str, bidirectional: bool) -> None:
    size = model.Size(Cell(name, 8, conv=name != "attention"), 20, 15, 2, bidirectional)  # type: ignore[arg-type]
    p = model.initial(size, [0, 1])
    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(20, (2, 3, 15), generator=g)
    where = torch.full((2, 3, 1), 6)
    before = model.logits(p, size, tokens, where)
    tokens[..., 9] = (tokens[..., 9] + 1) % 20
    same = torch.allclose(before, model.logits(p, size, tokens, where))
    assert same is not bidirectional


def test_directions_merge_as_their_mean_at_first() -> None:
    size = model.Size(Cell("deltanet", 8), 20, 15)
    merge = model.initial(size, [0])["0.merge"][0]
    torch.testing.assert_close(merge, torch.cat([torch.eye(8), torch.eye(8)], 1) / 2)
