"""The C++ product of large fp32 matrices."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

_I64, _PTR = ctypes.c_int64, ctypes.c_void_p
LEAST = 64
"""Rows, columns and depth below which packing does not pay."""


class GemmArgs(ctypes.Structure):
    """Mirror of `GemmArgs` in gemm.cpp."""

    _fields_ = (
        *((n, _I64) for n in ("m", "n", "k", "add", "threads")),
        *(("a", _PTR), ("a_row", _I64), ("a_col", _I64)),
        *(("b", _PTR), ("b_row", _I64), ("b_col", _I64)),
        *(("c", _PTR), ("c_row", _I64)),
    )


def takes(a: Tensor, b: Tensor) -> bool:
    """Say whether the C++ code is made for this product: fp32, large, rows or columns adjacent."""
    return (
        a.dtype == b.dtype == torch.float32
        and a.dim() == b.dim() == 2
        and a.shape[1] == b.shape[0]  # where not, torch says so
        and min(a.shape[0], *b.shape) >= LEAST
        and all(1 in t.stride() and min(t.stride()) > 0 for t in (a, b))
    )


def multiply(library: ctypes.CDLL, a: Tensor, b: Tensor, out: Tensor, *, add: bool) -> None:
    """Write a b (m, k) (k, n) into out (m, n) with contiguous rows, or add it to what is there."""
    args = GemmArgs(a.shape[0], b.shape[1], a.shape[1], add, torch.get_num_threads())
    args.a, args.a_row, args.a_col = a.data_ptr(), a.stride(0), a.stride(1)
    args.b, args.b_row, args.b_col = b.data_ptr(), b.stride(0), b.stride(1)
    args.c, args.c_row = out.data_ptr(), out.stride(0)
    library.gemm_f32(ctypes.byref(args))
