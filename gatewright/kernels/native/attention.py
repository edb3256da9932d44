"""The C++ causal attention as a differentiable function."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

_I64, _PTR = ctypes.c_int64, ctypes.c_void_p


def _strided(name: str) -> list[tuple[str, Any]]:
    return [(name, _PTR), (f"{name}_b", _I64), (f"{name}_h", _I64), (f"{name}_l", _I64)]


class AttentionArgs(ctypes.Structure):
    """Mirror of `AttentionArgs` in attention.cpp."""

    _fields_ = (
        *((n, _I64) for n in ("batch", "groups", "per_group", "length", "head_dim")),
        *(("threads", _I64), ("bf16", _I64), ("scale", ctypes.c_double)),
        *_strided("q"),
        *_strided("k"),
        *_strided("v"),
        *_strided("o"),
        ("lse", _PTR),
        *_strided("dout"),
        *_strided("dq"),
        *_strided("dk"),
        *_strided("dv"),
    )


def _put(args: AttentionArgs, **tensors: Tensor) -> None:
    """Enter (b, heads, l, p) tensors, whose last dimension is contiguous."""
    for name, t in tensors.items():
        setattr(args, name, t.data_ptr())
        for axis, letter in enumerate("bhl"):
            setattr(args, f"{name}_{letter}", t.stride(axis))


def _arguments(q: Tensor, k: Tensor, v: Tensor, scale: float) -> AttentionArgs:
    b, heads, length, p = q.shape
    args = AttentionArgs(b, k.shape[1], heads // k.shape[1], length, p)
    args.threads, args.bf16 = torch.get_num_threads(), q.dtype == torch.bfloat16
    args.scale = scale
    _put(args, q=q, k=k, v=v)
    return args


def _rows(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


class Attention(Function):
    """q (b, h, l, p), k and v (b, g, l, p) -> (b, h, l, p), laid out as (l, b, h, p)."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, library: ctypes.CDLL, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> Tensor:
        q, k, v = _rows(q), _rows(k), _rows(v)
        b, h, l, p = q.shape
        out = torch.empty(l, b, h, p, dtype=q.dtype).permute(1, 2, 0, 3)
        lse = torch.empty(b, h, l)
        args = _arguments(q, k, v, scale)
        _put(args, o=out)
        args.lse = lse.data_ptr()
        library.attention_forward(ctypes.byref(args))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.library, ctx.scale = library, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dout = _rows(grads[0].to(q.dtype))
        dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype) for t in (q, k, v))
        args = _arguments(q, k, v, ctx.scale)
        _put(args, o=out, dout=dout, dq=dq, dk=dk, dv=dv)
        args.lse = lse.data_ptr()
        ctx.library.attention_backward(ctypes.byref(args))
        return None, dq, dk, dv, None
