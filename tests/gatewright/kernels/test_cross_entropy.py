"""Losses over a vocabulary, and their gradients, against torch's own over all logits."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gatewright.kernels import (
    backend,
    cross_entropy,
    cross_entropy_reference,
    linear_cross_entropy,
    token_losses,
)
from tests.gatewright.kernels.oracle import outputs_and_gradients, worst


def inputs(t: int, d: int, v: int) -> tuple[dict[str, Tensor], Tensor]:
    torch.manual_seed(0)
    labels = torch.randint(0, v, (t,))
    labels[::5] = -100
    return {"hidden": torch.randn(t, d), "weight": torch.randn(v, d)}, labels


@pytest.mark.parametrize(("t", "d", "v"), [(1, 8, 5), (70, 16, 33), (40, 24, 512), (0, 4, 7)])
@pytest.mark.parametrize("weighted", [False, True])
def test_values_and_gradients(
    kernels: str, monkeypatch: pytest.MonkeyPatch, t: int, d: int, v: int, weighted: bool
) -> None:
    monkeypatch.setattr(cross_entropy, "_BYTES_AT_ONCE", 4 * v * 16)  # several pieces
    tensors, labels = inputs(t, d, v)
    w = torch.rand(t) if weighted else None
    options = {"labels": labels, "token_weights": w}
    truth = outputs_and_gradients(cross_entropy_reference, tensors, torch.float64, **options)
    found = outputs_and_gradients(linear_cross_entropy, tensors, torch.float32, **options)
    error, name = worst(found, truth)
    assert error < 1e-5, name


def test_a_factor_and_a_second_use_of_the_weight(kernels: str) -> None:
    """A mean divides the sum afterwards; tied embeddings use the weight twice."""
    tensors, labels = inputs(20, 8, 30)

    def tied(f, hidden: Tensor, weight: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return f(hidden + weight[:20], weight, labels) / 16

    truth = outputs_and_gradients(
        lambda **t: tied(cross_entropy_reference, **t), tensors, torch.float64
    )
    found = outputs_and_gradients(
        lambda **t: tied(linear_cross_entropy, **t), tensors, torch.float32
    )
    assert worst(found, truth)[0] < 1e-5


def test_extreme_logits_stay_finite(kernels: str) -> None:
    hidden = torch.tensor([[300.0], [-300.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.0]], requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.tensor([0, 0]))
    loss.backward()
    assert loss.item() == pytest.approx(600.0)
    assert hidden.grad is not None
    assert hidden.grad[:, 0].tolist() == pytest.approx([0.0, -2.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_per_token(kernels: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 7, 50).to(dtype)
    labels = torch.randint(0, 50, (3, 7))
    labels[0, 2] = -100
    factor = torch.rand(3, 7)
    results = []
    for ours in (True, False):
        leaf = logits.clone().requires_grad_()
        used = leaf * 1.0  # ours may overwrite what it is given
        if ours:
            losses = token_losses(used, labels)
        else:
            losses = F.cross_entropy(
                used.float().flatten(0, 1), labels.flatten(), reduction="none"
            ).view(3, 7)
        (losses * factor).sum().backward()
        assert leaf.grad is not None
        results.append((losses.detach(), leaf.grad.float()))
    tolerance = 1e-6 if dtype == torch.float32 else 4e-3
    assert torch.allclose(results[0][0], results[1][0], atol=1e-5)
    assert torch.allclose(results[0][1], results[1][1], atol=tolerance)


def test_shapes_that_do_not_fit_are_named(kernels: str) -> None:
    with pytest.raises(ValueError, match=r"labels \(3,\)"):
        linear_cross_entropy(torch.ones(2, 4), torch.ones(5, 4), torch.zeros(3, dtype=torch.long))


def test_what_does_not_fit_is_refused(kernels: str) -> None:
    tensors, labels = inputs(6, 4, 7)
    hidden, weight = tensors["hidden"], tensors["weight"]
    with pytest.raises(ValueError, match="token_weights"):
        linear_cross_entropy(hidden, weight, labels, torch.ones(1))
    with pytest.raises(ValueError, match="int64"):
        linear_cross_entropy(hidden, weight, labels.int())
    with pytest.raises(ValueError, match="do not fit together"):
        token_losses(hidden @ weight.t(), labels[:5])


@pytest.mark.parametrize("label", [7, -1])
def test_a_label_outside_the_vocabulary_is_refused(label: int) -> None:
    if backend.native_library() is None:
        pytest.skip(backend.why())
    with pytest.raises(IndexError, match=f"label {label} of a vocabulary of 7"):
        token_losses(torch.randn(2, 7), torch.tensor([3, label]))


def test_a_second_backward_pass_over_overwritten_logits_is_refused(kernels: str) -> None:
    logits = torch.randn(4, 7, requires_grad=True) * 1.0
    loss = token_losses(logits, torch.tensor([0, 1, 2, -100])).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
