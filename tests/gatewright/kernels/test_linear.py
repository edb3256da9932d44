"""Large products in every layout and at odd sizes, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gatewright.kernels import linear, matmul
from tests.gatewright.kernels.oracle import outputs_and_gradients, relative_error, worst

SIZES = [(64, 64, 64), (65, 127, 70), (200, 64, 1000), (193, 321, 385), (70, 4200, 64)]


@pytest.mark.parametrize(("m", "n", "k"), SIZES)
@pytest.mark.parametrize("a_turned", [False, True])
@pytest.mark.parametrize("b_turned", [False, True])
def test_products(kernels: str, m: int, n: int, k: int, a_turned: bool, b_turned: bool) -> None:
    torch.manual_seed(0)
    a = torch.randn(k, m).t() if a_turned else torch.randn(m, k)
    b = torch.randn(n, k).t() if b_turned else torch.randn(k, n)
    truth = a.double() @ b.double()
    assert relative_error(matmul(a, b), truth) < 2e-6
    wide = torch.full((m, n + 5), torch.nan)  # rows further apart than they are long
    matmul(a, b, out=wide[:, :n])
    assert relative_error(wide[:, :n], truth) < 2e-6
    assert wide[:, n:].isnan().all()
    before = torch.randn(m, n)
    added = before.clone()
    assert matmul(a, b, out=added, add=True) is added
    assert relative_error(added, before.double() + truth) < 2e-6


def test_a_part_of_a_larger_matrix(kernels: str) -> None:
    base, b = torch.randn(300, 200), torch.randn(100, 90)
    a = base[7:150, 50:150]
    assert relative_error(matmul(a, b), a.double() @ b.double()) < 2e-6


@pytest.mark.parametrize("threads", [1, 2])
def test_the_result_does_not_depend_on_threads(kernels: str, threads: int) -> None:
    if kernels == "torch":
        pytest.skip("torch's library may order sums as it likes")
    a, b = torch.randn(500, 400), torch.randn(400, 130)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = matmul(a, b)
        torch.set_num_threads(threads)
        assert torch.equal(matmul(a, b), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [(3, 40), (2, 3), (0, 4)])
def test_linear_layers(kernels: str, rows: tuple[int, int]) -> None:
    torch.manual_seed(0)
    tensors = {"x": torch.randn(*rows, 70), "weight": torch.randn(90, 70)}

    def reference(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    truth = outputs_and_gradients(reference, tensors, torch.float64)
    found = outputs_and_gradients(linear, tensors, torch.float32)
    assert worst(found, truth)[0] < 2e-6


def test_autocast_still_decides_the_precision(kernels: str) -> None:
    x, weight = torch.randn(80, 64), torch.randn(64, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x, weight).dtype == torch.bfloat16


def test_sizes_that_do_not_fit_are_refused(kernels: str) -> None:
    with pytest.raises(RuntimeError):
        matmul(torch.randn(64, 128), torch.randn(64, 64))
    with pytest.raises(ValueError, match="out"):
        matmul(torch.randn(64, 64), torch.randn(64, 64), out=torch.zeros(64, 65), add=True)
    with pytest.raises(RuntimeError):
        linear(torch.randn(64, 64), torch.randn(64, 128))


def test_a_second_derivative_is_refused_not_wrong(kernels: str) -> None:
    x = torch.randn(64, 64, requires_grad=True)
    y = linear(x, torch.randn(64, 64)).square().sum()
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()
