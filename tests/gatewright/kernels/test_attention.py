"""Causal attention and its gradients against the matrix of scores in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gatewright.kernels import causal_attention, causal_attention_reference
from tests.gatewright.kernels.oracle import outputs_and_gradients, relative_error, worst


def inputs(b: int, h: int, g: int, l: int, p: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {"q": (b, h, l, p), "k": (b, g, l, p), "v": (b, g, l, p)}
    return {name: torch.randn(*shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("l", [1, 2, 16, 63, 64, 65, 200])
@pytest.mark.parametrize(("h", "g", "p"), [(1, 1, 64), (4, 2, 8), (3, 1, 40)])
def test_values_and_gradients(kernels: str, l: int, h: int, g: int, p: int) -> None:
    t = inputs(2, h, g, l, p)
    truth = outputs_and_gradients(causal_attention_reference, t, torch.float64)
    found = outputs_and_gradients(causal_attention, t, torch.float32)
    error, name = worst(found, truth)
    if l == 1:  # a single key has weight 1 whatever the scores are: zero, but for rounding
        assert found["dq"].abs().max() < 1e-5
        del found["dq"], found["dk"], truth["dq"], truth["dk"]
        error, name = worst(found, truth)
    assert error < 1e-5, name


def test_large_scores_neither_overflow_nor_vanish(kernels: str) -> None:
    """Scores of +-200: one key takes all, the exponentials of others underflow."""
    t = inputs(1, 2, 2, 130, 16)
    t["q"], t["k"] = 7 * t["q"], 7 * t["k"]
    truth = outputs_and_gradients(causal_attention_reference, t, torch.float64)
    found = outputs_and_gradients(causal_attention, t, torch.float32)
    assert all(f.isfinite().all() for f in found.values())
    error, name = worst(found, truth)
    assert error < 2e-4, name  # a score of 200 is rounded to 1e-5 before it is exponentiated


def test_scale_and_strided_views(kernels: str) -> None:
    """Parts of a packed row, and gradients that arrive transposed."""
    t = {n: x.requires_grad_() for n, x in inputs(1, 2, 2, 150, 32).items()}

    def part(f) -> list[Tensor]:  # type: ignore[no-untyped-def]
        sliced = [x[:, :, 20:110] for x in t.values()]
        out = f(*sliced, scale=0.3).permute(2, 0, 1, 3).flatten(2)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        return [out.detach(), *torch.autograd.grad((out * weights).sum(), list(t.values()))]

    for a, b in zip(part(causal_attention), part(causal_attention_reference), strict=True):
        assert relative_error(a, b.double()) < 1e-5


def test_bf16_inputs_accumulate_in_fp32(kernels: str) -> None:
    t = {n: x.bfloat16() for n, x in inputs(1, 2, 1, 100, 32).items()}
    found = causal_attention(**t)
    assert found.dtype == torch.bfloat16
    truth = causal_attention_reference(**{n: x.double() for n, x in t.items()})
    assert relative_error(found, truth) < 2**-7


def test_the_future_is_not_seen(kernels: str) -> None:
    t = inputs(1, 1, 1, 100, 16)
    before = causal_attention(**t)
    t["k"][:, :, 70:], t["v"][:, :, 70:] = 50.0, 50.0
    assert torch.equal(causal_attention(**t)[:, :, :70], before[:, :, :70])


@pytest.mark.parametrize(
    ("k", "v"),
    [
        ((2, 2, 9, 8), (2, 2, 9, 8)),
        ((2, 2, 5, 8), (2, 2, 5, 4)),
        ((1, 2, 5, 8), (1, 2, 5, 8)),
        ((2, 3, 5, 8), (2, 3, 5, 8)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    kernels: str, k: tuple[int, ...], v: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="do not fit together"):
        causal_attention(torch.randn(2, 4, 5, 8), torch.randn(k), torch.randn(v))
