"""The C++ SSD scan as a differentiable function."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

CHUNK = 64  # tokens; temporaries of one head stay in the first-level cache
KEEP_EVERY = 8  # chunks between states kept for the backward pass
MAX_HEAD_DIM = 1024

_I64, _PTR = ctypes.c_int64, ctypes.c_void_p


def _strided(name: str, third: str = "h") -> list[tuple[str, Any]]:
    return [(name, _PTR), (f"{name}_b", _I64), (f"{name}_l", _I64), (f"{name}_{third}", _I64)]


class SsdArgs(ctypes.Structure):
    """Mirror of `SsdArgs` in ssd.cpp."""

    _fields_ = (
        *((n, _I64) for n in ("batch", "length", "heads", "head_dim", "groups", "d_state")),
        *((n, _I64) for n in ("chunk", "keep_every", "splits", "threads", "bf16")),
        *_strided("x"),
        *_strided("B", "g"),
        *_strided("C", "g"),
        *((n, _PTR) for n in ("dt", "A", "D", "initial", "segment")),
        *_strided("y"),
        *((n, _PTR) for n in ("final_state", "kept")),
        *_strided("dy"),
        ("dfinal", _PTR),
        *_strided("dx"),
        *((n, _PTR) for n in ("ddt", "dB", "dC", "dA", "dD", "dinitial")),
    )


def put(args: SsdArgs, third: str = "h", **tensors: Tensor) -> None:
    for name, t in tensors.items():
        setattr(args, name, t.data_ptr())
        setattr(args, f"{name}_b", t.stride(0))
        setattr(args, f"{name}_l", t.stride(1))
        setattr(args, f"{name}_{third}", t.stride(2))


def _ptr(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def rows(t: Tensor) -> Tensor:
    """Return `t`, copied only when its last dimension is not contiguous."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def splits(batch: int, groups: int, heads: int) -> int:
    """Parts of a group's heads, so that all threads have the same number of units."""
    threads = torch.get_num_threads()
    return min(threads // math.gcd(batch * groups, threads), heads // groups)


def _pad16(v: int) -> int:
    return -(-v // 16) * 16


def arguments(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    initial: Tensor | None,
    segment: Tensor | None,
) -> SsdArgs:
    """Fill the block of inputs; the tensors must outlive it."""
    b, l, h, p = x.shape
    g, n = B.shape[2:]
    args = SsdArgs(b, l, h, p, g, n, CHUNK, KEEP_EVERY, splits(b, g, h))
    args.threads, args.bf16 = torch.get_num_threads(), x.dtype == torch.bfloat16
    put(args, x=x)
    put(args, "g", B=B, C=C)
    args.dt, args.A, args.D = dt.data_ptr(), A.data_ptr(), _ptr(D)
    args.initial, args.segment = _ptr(initial), _ptr(segment)
    return args


def kept_states(args: SsdArgs, like: Tensor) -> Tensor:
    """Room for the states that the backward pass starts from."""
    keeps = -(-args.length // (CHUNK * KEEP_EVERY))
    size = (args.batch, args.heads, keeps, _pad16(args.d_state), _pad16(args.head_dim))
    return torch.empty(size, dtype=torch.float32, device=like.device)


class Scan(Function):
    """dt, A, D and the states are fp32 and contiguous; x, B and C fp32 or bf16."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        library: ctypes.CDLL,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        initial: Tensor | None,
        segment: Tensor | None,
        want_final: bool,
    ) -> tuple[Tensor, Tensor | None]:
        b, _, h, p = x.shape
        x, B, C = rows(x), rows(B), rows(C)
        args = arguments(x, dt, A, B, C, D, initial, segment)
        y = torch.empty(x.shape, dtype=x.dtype)
        put(args, y=y)
        final = torch.empty(b, h, p, B.shape[3]) if want_final else None
        args.final_state = _ptr(final)
        kept = None
        if any(ctx.needs_input_grad):
            kept = kept_states(args, x)
            args.kept = kept.data_ptr()
        library.ssd_forward(ctypes.byref(args))
        ctx.save_for_backward(x, dt, A, B, C, D, initial, segment, kept)
        ctx.library = library
        ctx.set_materialize_grads(False)
        return y, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        x, dt, A, B, C, D, initial, segment, kept = ctx.saved_tensors
        dy, dfinal = grads
        if dy is None:
            dy = torch.zeros_like(x)
        args = arguments(x, dt, A, B, C, D, initial, segment)
        args.kept = kept.data_ptr()
        dy = rows(dy.to(x.dtype))
        dx = torch.empty(x.shape, dtype=x.dtype)
        put(args, dy=dy, dx=dx)
        out = gradient_buffers(args, dt, D, initial, dfinal)
        ctx.library.ssd_backward(ctypes.byref(args))
        dA, dB, dC, dD = reduce_gradients(out, B.dtype, D)
        return None, dx, out["ddt"], dA, dB, dC, dD, out["dinitial"], None, None


def gradient_buffers(
    args: SsdArgs, dt: Tensor, D: Tensor | None, initial: Tensor | None, dfinal: Tensor | None
) -> dict[str, Tensor | None]:
    """Allocate what `ssd_backward` writes and enter it into `args`."""
    b, l, h, p, g, n = (
        getattr(args, k) for k in ("batch", "length", "heads", "head_dim", "groups", "d_state")
    )
    out: dict[str, Tensor | None] = {
        "ddt": torch.empty_like(dt),
        "dB": torch.empty(args.splits, b, l, g, n),
        "dC": torch.empty(args.splits, b, l, g, n),
        "dA": torch.empty(b, h, dtype=torch.float64),
        "dD": None if D is None else torch.empty(b, h, p, dtype=torch.float64),
        "dinitial": None if initial is None else torch.empty(b, h, p, n),
        "dfinal": None if dfinal is None else dfinal.float().contiguous(),
    }
    for name, t in out.items():
        setattr(args, name, _ptr(t))
    return out


def reduce_gradients(
    out: dict[str, Tensor | None], dtype: torch.dtype, D: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Sum the partial gradients of A, B, C and D over batch rows and splits."""
    dA, dB, dC, dD = out["dA"], out["dB"], out["dC"], out["dD"]
    assert dA is not None
    assert dB is not None
    assert dC is not None
    whole = [(t[0] if t.shape[0] == 1 else t.sum(0)).to(dtype) for t in (dB, dC)]
    return dA.sum(0).float(), whole[0], whole[1], None if dD is None else dD.sum(0).float()
