"""Rotary embedding of a joint projection, and the SwiGLU gate, against their definitions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gatewright.kernels import rotary_qkv, rotary_reference, swiglu
from tests.gatewright.kernels.oracle import outputs_and_gradients, worst


@pytest.mark.parametrize(("groups", "per_group"), [(1, 1), (2, 1), (2, 3)])
@pytest.mark.parametrize("head_dim", [2, 8, 64, 40])
def test_rotary(kernels: str, groups: int, per_group: int, head_dim: int) -> None:
    torch.manual_seed(0)
    length, batch = 9, 2
    angles = 300 * torch.rand(length, head_dim // 2, dtype=torch.float64)
    mixed = {"mixed": torch.randn(length, batch, groups * (per_group + 2) * head_dim)}
    options = {"cos": angles.cos(), "sin": angles.sin(), "groups": groups}
    truth = outputs_and_gradients(rotary_reference, mixed, torch.float64, **options)
    found = outputs_and_gradients(rotary_qkv, mixed, torch.float32, **options)
    assert truth["out0"].shape == (batch, groups * per_group, length, head_dim)
    error, name = worst(found, truth)
    assert error < 1e-6, name


def test_rotary_reads_gradients_as_they_lie(kernels: str) -> None:
    """Attention returns them transposed, or expanded: no layout may be taken for granted."""
    mixed = torch.randn(5, 2, 2 * 3 * 8, requires_grad=True)
    cos = sin = torch.rand(5, 4)
    outs = rotary_qkv(mixed, cos, sin, 2)
    gradients = [torch.randn(2, 2, 5, 8) for _ in outs]
    [plain] = torch.autograd.grad(outs, mixed, gradients, retain_graph=True)
    gradients[0] = gradients[0].transpose(2, 3).contiguous().transpose(2, 3)
    gradients[1] = gradients[1].permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    [strided] = torch.autograd.grad(outs, mixed, gradients)
    assert torch.equal(plain, strided)


def test_rotary_in_bf16_rounds_once(kernels: str) -> None:
    mixed = torch.randn(4, 1, 3 * 16).bfloat16()
    angles = torch.rand(4, 8)
    found = rotary_qkv(mixed, angles.cos(), angles.sin(), 1)
    truth = rotary_reference(mixed.float(), angles.cos(), angles.sin(), 1)
    for a, b in zip(found, truth, strict=True):
        assert a.dtype == torch.bfloat16
        torch.testing.assert_close(a.float(), b, rtol=2**-8, atol=1e-6)


def test_rotary_refuses_shapes_that_do_not_fit(kernels: str) -> None:
    with pytest.raises(ValueError, match="3 groups do not fit together"):
        rotary_qkv(torch.ones(4, 1, 2 * 3 * 8), torch.ones(4, 4), torch.ones(4, 4), 3)
    with pytest.raises(ValueError, match=r"cos \(3, 4\)"):
        rotary_qkv(torch.ones(4, 1, 3 * 8), torch.ones(3, 4), torch.ones(3, 4), 1)


@pytest.mark.parametrize("width", [6, 16, 48])
def test_swiglu(kernels: str, width: int) -> None:
    torch.manual_seed(0)
    x = {"x": 4 * torch.randn(3, 5, 2 * width)}

    def reference(x: Tensor) -> Tensor:
        gate, value = x.chunk(2, dim=-1)
        return F.silu(gate) * value

    truth = outputs_and_gradients(reference, x, torch.float64)
    error, name = worst(outputs_and_gradients(swiglu, x, torch.float32), truth)
    assert error < 1e-6, name


def test_no_tokens(kernels: str) -> None:
    q, k, v = rotary_qkv(torch.zeros(0, 2, 32), torch.zeros(0, 4), torch.zeros(0, 4), 1)
    assert (q.shape, k.shape, v.shape) == ((2, 2, 0, 8), (2, 1, 0, 8), (2, 1, 0, 8))
