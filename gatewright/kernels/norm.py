"""RMSNorm per group with a SiLU gate, as after Mamba-2's scan, and the SiLU gate alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from gatewright.kernels import backend
from gatewright.kernels.native import norm as native


def gated_rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    z: Tensor | None = None,
    group_size: int | None = None,
    norm_before_gate: bool = False,
) -> Tensor:
    """RMSNorm over groups of the last dimension times silu(z); see `gated_rms_norm_reference`.

    Args:
        x, z: (..., d). weight: (d,). group_size: channels that are normalised together (d).
        norm_before_gate: gate the normalised values instead of normalising the gated ones.
    """
    size = group_size or x.shape[-1]
    if x.shape[-1] % size:
        raise ValueError(f"group_size {size} does not divide {x.shape[-1]} channels")
    if weight.shape != x.shape[-1:] or (z is not None and z.shape != x.shape):
        raise ValueError(
            f"gated_rms_norm: x {tuple(x.shape)}, weight {tuple(weight.shape)} and z "
            f"{None if z is None else tuple(z.shape)} do not fit together"
        )
    library = backend.native_for(x, z)
    if library is not None and x.dtype != torch.float16 and native.takes(size):
        return native.Norm.apply(library, x, weight, z, eps, size, norm_before_gate)
    return _GatedRMSNorm.apply(x, weight, z, eps, size, norm_before_gate)


def silu_gate(y: Tensor, z: Tensor) -> Tensor:
    """Return y * silu(z), computed in fp32 at least, in the dtype of y."""
    library = backend.native_for(y, z)
    width = y.shape[2:].numel()
    if library is not None and y.dtype != torch.float16 and y.numel() and native.takes(width):
        rows = (y.flatten(2), None, z.flatten(2))
        return native.Norm.apply(library, *rows, 0.0, width, False).view(y.shape)
    acc = torch.float64 if y.dtype == torch.float64 else torch.float32
    return (y.to(acc) * F.silu(z.to(acc))).to(y.dtype)


def swiglu(x: Tensor) -> Tensor:
    """Return silu(gate) * value of x = [gate | value] (..., 2 f), as a Llama's MLP does.

    Raises:
        ValueError: an odd number of channels.
    """
    if x.shape[-1] % 2:
        raise ValueError(f"swiglu: {x.shape[-1]} channels have no two halves")
    library = backend.native_for(x)
    width = x.shape[-1] // 2
    if library is not None and x.dtype != torch.float16 and x.numel() and native.takes(width):
        return native.SwiGLU.apply(library, x)
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


class _GatedRMSNorm(Function):
    """Keeps its inputs and one scale per group; gate and normalised values are recomputed."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, z: Tensor | None, eps: float, size: int, before: bool
    ) -> Tensor:
        acc = torch.float64 if x.dtype == torch.float64 else torch.float32
        v = x.to(acc)
        gate = None if z is None else F.silu(z.to(acc))
        if gate is not None and not before:
            v = v * gate
        groups = v.unflatten(-1, (-1, size))
        scale = torch.rsqrt(groups.square().mean(-1, keepdim=True).add_(eps))
        out = (groups * scale).flatten(-2).mul_(weight.to(acc))
        if gate is not None and before:
            out.mul_(gate)
        ctx.save_for_backward(x, weight, z, scale)
        ctx.size, ctx.before = size, before
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight, z, scale = ctx.saved_tensors
        acc = scale.dtype
        dout, v = grads[0].to(acc), x.to(acc)
        gate = None if z is None else F.silu(z.to(acc))
        gate_first = gate is not None and not ctx.before
        if gate_first:
            v = v * gate
        normed = (v.unflatten(-1, (-1, ctx.size)) * scale).flatten(-2)
        dz = None
        if gate is not None and ctx.before:
            dz = _silu_backward(dout * normed * weight.to(acc), z)
            dout = dout * gate
        dweight = (dout * normed).flatten(0, -2).sum(0).to(weight.dtype)
        dn = (dout * weight.to(acc)).unflatten(-1, (-1, ctx.size))
        n = normed.unflatten(-1, (-1, ctx.size))
        dv = ((dn - n * (dn * n).mean(-1, keepdim=True)) * scale).flatten(-2)
        if gate_first:
            dz = _silu_backward(dv * x.to(acc), z)
            dv = dv * gate
        return dv.to(x.dtype), dweight, dz, None, None, None


def _silu_backward(dgate: Tensor, z: Tensor) -> Tensor:
    return torch.ops.aten.silu_backward(dgate, z.to(dgate.dtype)).to(z.dtype)
