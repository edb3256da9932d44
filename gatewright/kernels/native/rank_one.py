"""The C++ rank-one recurrence and its backward pass."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

_I64, _PTR = ctypes.c_int64, ctypes.c_void_p
_INPUTS = ("q", "k", "v", "log_w", "a", "b", "beta")
DIAGONAL, DELTA, GENERAL = range(3)


class RankOneArgs(ctypes.Structure):
    """Mirror of `RankOneArgs` in rank_one.cpp."""

    _fields_ = (
        *((n, _I64) for n in ("rows", "length", "key_width", "value_width", "rank")),
        *((n, _I64) for n in ("decay_width", "threads")),
        *((n, _PTR) for n in (*_INPUTS, "o", "removed", "checkpoints", "dout")),
        *((n, _PTR) for n in ("dq", "dk", "dv", "dlog_w", "da", "db", "dbeta")),
    )


@functools.cache
def _call(library: ctypes.CDLL, name: str, *arguments: int) -> int:
    function = getattr(library, f"rank_one_{name}")
    function.argtypes, function.restype = [_I64] * len(arguments), _I64
    return int(function(*arguments))


def max_width(library: ctypes.CDLL) -> int:
    """Return how wide keys may be."""
    return _call(library, "max_width")


def padded_width(library: ctypes.CDLL, width: int) -> int:
    """Return how wide the kernel keeps keys of `width`."""
    return _call(library, "padded_width", width)


def padded_rows(library: ctypes.CDLL, rows: int) -> int:
    """Return how many value rows the kernel keeps for `rows`."""
    return _call(library, "padded_rows", rows)


def chunk(library: ctypes.CDLL) -> int:
    """Return how many tokens lie between two kept states."""
    return _call(library, "chunk")


def takes(library: ctypes.CDLL, k: Tensor) -> bool:
    """Say whether the kernel is made for these keys (R, L, K); empty inputs it leaves alone."""
    return k.numel() > 0 and k.shape[-1] <= max_width(library)


def _pointer(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


class RankOne(Function):
    """q, k (R, L, K), v (R, L, V), log_w (R, L, K | 1), then a, b (R, L, K) or beta (R, L, 1)."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, library: ctypes.CDLL, *inputs: Tensor | None
    ) -> Tensor:
        dtype = next(t.dtype for t in inputs if t is not None)
        kept = [None if t is None else t.detach().float().contiguous() for t in inputs]
        _, k, v, _, a, _, beta = kept
        assert k is not None
        assert v is not None
        rows, length, _ = k.shape
        rank = DELTA if beta is not None else DIAGONAL if a is None else GENERAL
        padded = padded_rows(library, v.shape[-1])
        removed = None if rank == DIAGONAL else torch.empty(rows, length, padded)
        states = None
        if any(ctx.needs_input_grad):
            count = -(-length // chunk(library))
            states = torch.empty(rows, count, padded, padded_width(library, k.shape[-1]))
        o = torch.empty_like(v)
        args = _arguments(rank, kept, removed, states)
        args.o = o.data_ptr()
        library.rank_one_forward(ctypes.byref(args))
        ctx.save_for_backward(*kept, removed, states)
        ctx.library, ctx.rank = library, rank
        ctx.dtypes = [None if t is None else t.dtype for t in inputs]
        return o.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        *kept, removed, states = ctx.saved_tensors
        dout = grads[0].float().contiguous()
        args = _arguments(ctx.rank, kept, removed, states)
        args.dout = dout.data_ptr()
        found = [None if t is None else torch.empty_like(t) for t in kept]
        for name, t in zip(_INPUTS, found, strict=True):
            setattr(args, f"d{name}", _pointer(t))
        ctx.library.rank_one_backward(ctypes.byref(args))
        cast = [None if t is None else t.to(d) for t, d in zip(found, ctx.dtypes, strict=True)]
        return (None, *cast)


def _arguments(
    rank: int, inputs: list[Tensor | None], removed: Tensor | None, states: Tensor | None
) -> RankOneArgs:
    _, k, v, log_w, *_ = inputs
    assert k is not None
    assert v is not None
    args = RankOneArgs(*k.shape, v.shape[-1], rank)
    args.decay_width = 0 if log_w is None else log_w.shape[-1]
    args.threads = torch.get_num_threads()
    for name, t in zip(_INPUTS, inputs, strict=True):
        setattr(args, name, _pointer(t))
    args.removed, args.checkpoints = _pointer(removed), _pointer(states)
    return args
