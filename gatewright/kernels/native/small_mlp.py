"""The C++ residual MLP of many small models, LayerNorm included."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from gatewright.kernels.shapes import require

_I64, _PTR = ctypes.c_int64, ctypes.c_void_p
_BLOCK = 1024  # rows whose weight gradients are summed in C++
_PAD = 16


class SmallMlpArgs(ctypes.Structure):
    """Mirror of `SmallMlpArgs` in small_mlp.cpp."""

    _fields_ = (
        *((n, _I64) for n in ("members", "rows", "width", "hidden", "block", "threads")),
        *((n, _PTR) for n in ("u", "up", "up_bias", "down", "down_bias", "out", "dout", "du")),
        *((n, _PTR) for n in ("dup", "dup_bias", "ddown", "ddown_bias")),
    )


def _padded(n: int) -> int:
    return -(-n // _PAD) * _PAD


class SmallMlp(Function):
    """u (E, N, d) -> u + down SiLU(up LN(u) + up_bias) + down_bias, LN without affine part.

    up (E, h, d), up_bias (E, h), down (E, d, h), down_bias (E, d); all float32.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        library: ctypes.CDLL,
        u: Tensor,
        up: Tensor,
        up_bias: Tensor,
        down: Tensor,
        down_bias: Tensor,
    ) -> Tensor:
        (e, _, d), h = u.shape, up.shape[1]
        require(
            "SmallMlp",
            up=(up, (e, h, d)),
            up_bias=(up_bias, (e, h)),
            down=(down, (e, d, h)),
            down_bias=(down_bias, (e, d)),
        )
        kept = [t.contiguous() for t in (u, up, up_bias, down, down_bias)]
        args = _arguments(kept)
        out = torch.empty_like(kept[0])
        args.out = out.data_ptr()
        library.small_mlp_forward(ctypes.byref(args))
        ctx.save_for_backward(*kept)
        ctx.library = library
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        kept = ctx.saved_tensors
        u, up, *_ = kept
        members, hidden, width = up.shape
        dout, du = grads[0].contiguous(), torch.empty_like(u)
        args = _arguments(kept)
        h, d, blocks = _padded(hidden), _padded(width), -(-args.rows // _BLOCK)
        found = {
            "dup": torch.empty(members, blocks, d, h),
            "dup_bias": torch.empty(members, blocks, h),
            "ddown": torch.empty(members, blocks, h, d),
            "ddown_bias": torch.empty(members, blocks, d),
        }
        for name, t in found.items():
            setattr(args, name, t.data_ptr())
        args.dout, args.du = dout.data_ptr(), du.data_ptr()
        ctx.library.small_mlp_backward(ctypes.byref(args))
        total = {name: t.sum(1) for name, t in found.items()}
        return (
            *(None, du),
            total["dup"][:, :width, :hidden].transpose(1, 2),
            total["dup_bias"][:, :hidden],
            total["ddown"][:, :hidden, :width].transpose(1, 2),
            total["ddown_bias"][:, :width],
        )


def _arguments(kept: list[Tensor] | tuple[Tensor, ...]) -> SmallMlpArgs:
    u, up, *_ = kept
    members, hidden, width = up.shape
    rows = u.numel() // (members * width)
    args = SmallMlpArgs(members, rows, width, hidden, _BLOCK, torch.get_num_threads())
    for name, t in zip(("u", "up", "up_bias", "down", "down_bias"), kept, strict=True):
        setattr(args, name, t.data_ptr())
    return args
