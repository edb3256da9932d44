"""The C++ gated RMSNorm and the SiLU gate alone, over rows of contiguous channels."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

_I64, _PTR = ctypes.c_int64, ctypes.c_void_p
NO_NORM = -1.0  # as eps: only the gate
_VECTOR = 16  # groups are whole numbers of the widest vectors


def takes(group: int) -> bool:
    """Say whether the C++ code is made for groups of this many channels."""
    return group % _VECTOR == 0


class NormArgs(ctypes.Structure):
    """Mirror of `NormArgs` in norm.cpp."""

    _fields_ = (
        *((n, _I64) for n in ("rows", "channels", "group", "gate_after", "threads", "bf16")),
        ("eps", ctypes.c_double),
        *(("x", _PTR), ("x_r", _I64), ("z", _PTR), ("z_r", _I64), ("weight", _PTR)),
        *(("y", _PTR), ("y_r", _I64), ("dy", _PTR), ("dy_r", _I64)),
        *(("dx", _PTR), ("dx_r", _I64), ("dz", _PTR), ("dz_r", _I64), ("dweight", _PTR)),
    )


def put(args: NormArgs, **tensors: Tensor | None) -> None:
    """Enter (rows, d) tensors, whose last dimension is contiguous."""
    for name, t in tensors.items():
        if t is not None:
            setattr(args, name, t.data_ptr())
            setattr(args, f"{name}_r", t.stride(0))


def as_rows(t: Tensor) -> Tensor:
    """View (..., d) as (rows, d) with contiguous channels; copy only where there is no view."""
    if t.dim() == 3 and t.stride(0) != t.stride(1) * t.shape[1] and t.shape[0] > 1:
        t = t.contiguous()
    t = t.reshape(-1, t.shape[-1])
    return t if t.stride(-1) == 1 else t.contiguous()


def arguments(
    x: Tensor, z: Tensor | None, weight: Tensor | None, eps: float, group: int, after: bool
) -> NormArgs:
    """Fill the block of inputs; x and z (rows, d) of one dtype, weight (d,) fp32."""
    args = NormArgs(*x.shape, group, after, torch.get_num_threads(), x.dtype == torch.bfloat16)
    args.eps = eps
    args.weight = None if weight is None else weight.data_ptr()
    put(args, x=x, z=z)
    return args


def norm_forward(library: ctypes.CDLL, args: NormArgs, y: Tensor) -> None:
    """Write the result into y (rows, d)."""
    put(args, y=y)
    library.norm_forward(ctypes.byref(args))


def norm_backward(
    library: ctypes.CDLL, args: NormArgs, dy: Tensor, dx: Tensor, dz: Tensor | None
) -> Tensor | None:
    """Write the gradients of x and z into dx and dz; return that of the weight, if any."""
    put(args, dy=dy, dx=dx, dz=dz)
    dweight = None
    if args.weight:
        dweight = torch.zeros(args.threads, args.channels, dtype=torch.float64)
        args.dweight = dweight.data_ptr()
    library.norm_backward(ctypes.byref(args))
    return None if dweight is None else dweight.sum(0).float()


class Norm(Function):
    """Gated RMSNorm; without `weight` only the gate."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        library: ctypes.CDLL,
        x: Tensor,
        weight: Tensor | None,
        z: Tensor | None,
        eps: float,
        group: int,
        after: bool,
    ) -> Tensor:
        x2, z2 = as_rows(x), None if z is None else as_rows(z.to(x.dtype))
        w32 = None if weight is None else weight.detach().float().contiguous()
        eps = NO_NORM if weight is None else eps
        y = torch.empty(x2.shape, dtype=x.dtype)
        norm_forward(library, arguments(x2, z2, w32, eps, group, after), y)
        ctx.save_for_backward(x, weight, z)
        ctx.library, ctx.config = library, (eps, group, after)
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight, z = ctx.saved_tensors
        x2, z2 = as_rows(x), None if z is None else as_rows(z.to(x.dtype))
        w32 = None if weight is None else weight.float().contiguous()
        dx = torch.empty(x2.shape, dtype=x.dtype)
        dz = None if z2 is None else torch.empty(x2.shape, dtype=x.dtype)
        args = arguments(x2, z2, w32, *ctx.config)
        dweight = norm_backward(ctx.library, args, as_rows(grads[0].to(x.dtype)), dx, dz)
        if dz is not None:
            dz = dz.view(z.shape).to(z.dtype)
        if dweight is not None:
            dweight = dweight.to(weight.dtype)
        return None, dx.view(x.shape), dweight, dz, None, None, None


class SwiGLU(Function):
    """x (..., 2 f): [gate | value] -> silu(gate) * value (..., f)."""

    @staticmethod
    def forward(ctx: Any, library: ctypes.CDLL, x: Tensor) -> Tensor:  # type: ignore[override]
        gate, value = as_rows(x).chunk(2, dim=-1)
        y = torch.empty(value.shape, dtype=x.dtype)
        args = arguments(value, gate, None, NO_NORM, value.shape[1], False)
        norm_forward(library, args, y)
        ctx.save_for_backward(x)
        ctx.library = library
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        rows = as_rows(x)
        gate, value = rows.chunk(2, dim=-1)
        d = torch.empty(rows.shape, dtype=x.dtype)
        dgate, dvalue = d.chunk(2, dim=-1)
        args = arguments(value, gate, None, NO_NORM, value.shape[1], False)
        norm_backward(ctx.library, args, as_rows(grads[0].to(x.dtype)), dvalue, dgate)
        return None, d.view(x.shape)
