"""The C++ causal convolution, over rows of contiguous channels."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

_I64, _PTR = ctypes.c_int64, ctypes.c_void_p
_WIDTHS = (2, 3, 4)  # the C++ code is compiled for these
_VECTOR = 16  # channels at least, so that one vector fits


def takes(weight: Tensor) -> bool:
    """Say whether the C++ code is made for this weight (d, w)."""
    return weight.shape[1] in _WIDTHS and weight.shape[0] >= _VECTOR


def _strided(name: str) -> list[tuple[str, Any]]:
    return [(name, _PTR), (f"{name}_b", _I64), (f"{name}_l", _I64)]


class ConvArgs(ctypes.Structure):
    """Mirror of `ConvArgs` in conv.cpp."""

    _fields_ = (
        *((n, _I64) for n in ("batch", "length", "channels", "width", "silu", "threads", "bf16")),
        *_strided("x"),
        *((n, _PTR) for n in ("weight", "bias", "initial", "segment")),
        *_strided("y"),
        *_strided("dy"),
        *_strided("dx"),
        *((n, _PTR) for n in ("dweight", "dbias")),
    )


def _ptr(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def put(args: ConvArgs, **tensors: Tensor) -> None:
    """Enter (b, l, d) tensors, whose last dimension is contiguous."""
    for name, t in tensors.items():
        setattr(args, name, t.data_ptr())
        setattr(args, f"{name}_b", t.stride(0))
        setattr(args, f"{name}_l", t.stride(1))


def arguments(
    x: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    initial: Tensor | None,
    segment: Tensor | None,
    silu: bool,
) -> ConvArgs:
    """Fill the block of inputs; the tensors must outlive it.

    x (b, l, d) with contiguous channels, fp32 or bf16; taps (w, d), bias (d,) and initial
    (b, w-1, d) fp32 and contiguous; segment (b, l) int32.
    """
    args = ConvArgs(*x.shape, taps.shape[0], silu, torch.get_num_threads())
    args.bf16 = x.dtype == torch.bfloat16
    put(args, x=x)
    args.weight, args.bias = taps.data_ptr(), _ptr(bias)
    args.initial, args.segment = _ptr(initial), _ptr(segment)
    return args


def conv_forward(library: ctypes.CDLL, args: ConvArgs, y: Tensor) -> None:
    """Write the convolution into y (b, l, d)."""
    put(args, y=y)
    library.conv_forward(ctypes.byref(args))


def conv_backward(
    library: ctypes.CDLL, args: ConvArgs, dy: Tensor, dx: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Write the input's gradient into dx (b, l, d); return those of weight (d, w) and bias."""
    put(args, dy=dy, dx=dx)
    b, w, d = args.batch, args.width, args.channels
    dweight = torch.empty(b, w, d, dtype=torch.float64)
    dbias = torch.empty(b, d, dtype=torch.float64) if args.bias else None
    args.dweight, args.dbias = dweight.data_ptr(), _ptr(dbias)
    library.conv_backward(ctypes.byref(args))
    return dweight.sum(0).float().t(), None if dbias is None else dbias.sum(0).float()


class Conv(Function):
    """x (b, l, d) -> (b, l, d).  No gradient reaches `initial` here."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        library: ctypes.CDLL,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        initial: Tensor | None,
        segment: Tensor | None,
        silu: bool,
    ) -> Tensor:
        x = x if x.stride(-1) == 1 else x.contiguous()
        taps = weight.detach().t().float().contiguous()
        bias32 = None if bias is None else bias.detach().float().contiguous()
        y = torch.empty(x.shape, dtype=x.dtype)
        conv_forward(library, arguments(x, taps, bias32, initial, segment, silu), y)
        ctx.save_for_backward(x, weight, bias, initial, segment)
        ctx.library, ctx.silu = library, silu
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight, bias, initial, segment = ctx.saved_tensors
        dy = grads[0].to(x.dtype)
        dy = dy if dy.stride(-1) == 1 else dy.contiguous()
        taps = weight.t().float().contiguous()
        bias32 = None if bias is None else bias.float().contiguous()
        args = arguments(x, taps, bias32, initial, segment, ctx.silu)
        dx = torch.empty(x.shape, dtype=x.dtype)
        dweight, dbias = conv_backward(ctx.library, args, dy, dx)
        if dbias is not None:
            dbias = dbias.to(bias.dtype)
        return None, dx, dweight.to(weight.dtype), dbias, None, None, None
