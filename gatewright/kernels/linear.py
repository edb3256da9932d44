"""Products of large matrices and linear layers.

On CPU in fp32 ours is faster than the library that torch calls (`python -m tools.bench gemm`);
everything else, small products included, goes to torch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from gatewright.kernels import backend
from gatewright.kernels.native import gemm as native


def matmul(a: Tensor, b: Tensor, out: Tensor | None = None, *, add: bool = False) -> Tensor:
    """Return a b of (m, k) and (k, n); no gradient is recorded.

    Args:
        out: (m, n) to write into, or to add to when `add`.

    Raises:
        ValueError: an `out` of another shape.
    """
    if out is not None and out.shape != (a.shape[0], b.shape[1]):
        raise ValueError(f"out {tuple(out.shape)} for a {tuple(a.shape)} and b {tuple(b.shape)}")
    ours = native.takes(a, b) and not torch.is_autocast_enabled("cpu")
    library = backend.native_for(a, b) if ours else None
    if library is not None and (out is None or (out.dtype == a.dtype and out.stride(1) == 1)):
        if out is None:
            out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype)
        native.multiply(library, a.detach(), b.detach(), out, add=add)
        return out
    if out is None:
        return torch.mm(a, b)
    return torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x weight^T of (..., d) and (f, d), as `torch.nn.functional.linear` does."""
    rows = x.shape[:-1].numel()
    small = min(rows, *weight.shape) < native.LEAST
    plain = x.dtype == weight.dtype == torch.float32 and not x.is_cuda
    if small or not plain or torch.is_autocast_enabled("cpu"):
        return F.linear(x, weight)
    return _Linear.apply(x, weight)


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        return matmul(x.flatten(0, -2), weight.t()).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        dy = grads[0].flatten(0, -2)
        need_x, need_weight = ctx.needs_input_grad
        dx = matmul(dy, weight).view(x.shape) if need_x else None
        return dx, matmul(dy.t(), x.flatten(0, -2)) if need_weight else None
