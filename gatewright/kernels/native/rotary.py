"""The C++ rotary embedding of a joint query, key and value projection."""

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


class RotaryArgs(ctypes.Structure):
    """Mirror of `RotaryArgs` in rotary.cpp."""

    _fields_ = (
        *((n, _I64) for n in ("length", "batch", "groups", "per_group", "head_dim")),
        *(("threads", _I64), ("bf16", _I64)),
        *((n, _PTR) for n in ("mixed", "cos", "sin")),
        *_strided("q"),
        *_strided("k"),
        *_strided("v"),
    )


def _arguments(
    mixed: Tensor, cos: Tensor, sin: Tensor, groups: int, parts: dict[str, Tensor]
) -> RotaryArgs:
    length, batch, width = mixed.shape
    p = 2 * cos.shape[1]
    args = RotaryArgs(length, batch, groups, width // (groups * p) - 2, p)
    args.threads, args.bf16 = torch.get_num_threads(), mixed.dtype == torch.bfloat16
    args.mixed, args.cos, args.sin = mixed.data_ptr(), cos.data_ptr(), sin.data_ptr()
    for name, t in parts.items():
        setattr(args, name, t.data_ptr())
        for axis, letter in enumerate("bhl"):
            setattr(args, f"{name}_{letter}", t.stride(axis))
    return args


class Rotary(Function):
    """mixed (l, b, g (r + 2) p) -> q (b, g r, l, p), k and v (b, g, l, p)."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, library: ctypes.CDLL, mixed: Tensor, cos: Tensor, sin: Tensor, groups: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        mixed = mixed.contiguous()
        length, batch, width = mixed.shape
        p = 2 * cos.shape[1]
        heads = width // p - 2 * groups
        parts = {
            name: torch.empty(batch, n, length, p, dtype=mixed.dtype)
            for name, n in (("q", heads), ("k", groups), ("v", groups))
        }
        library.rotary_forward(ctypes.byref(_arguments(mixed, cos, sin, groups, parts)))
        ctx.save_for_backward(cos, sin)
        ctx.library, ctx.groups, ctx.shape = library, groups, mixed.shape
        return parts["q"], parts["k"], parts["v"]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        cos, sin = ctx.saved_tensors
        dmixed = torch.empty(ctx.shape, dtype=grads[0].dtype)
        rows = (g if g.stride(-1) == 1 else g.contiguous() for g in grads)
        parts = dict(zip("qkv", rows, strict=True))
        args = _arguments(dmixed, cos, sin, ctx.groups, parts)
        ctx.library.rotary_backward(ctypes.byref(args))
        return None, dmixed, None, None, None
