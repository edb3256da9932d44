"""The C++ one-token step: the recurrence alone, or all of a mixer between its projections."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

_I64, _PTR, _F64 = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double


class StepArgs(ctypes.Structure):
    """Mirror of `StepArgs` in step.cpp."""

    _fields_ = (
        *((n, _I64) for n in ("batch", "heads", "head_dim", "groups", "d_state")),
        *((n, _I64) for n in ("width", "history", "norm_group", "threads", "softplus")),
        *((n, _F64) for n in ("dt_min", "dt_max", "eps")),
        *(("zxbcdt", _PTR), ("zxbcdt_b", _I64), ("out", _PTR), ("out_b", _I64)),
        *((n, _PTR) for n in ("conv_state", "conv_weight", "conv_bias", "dt_bias")),
        *((n, _PTR) for n in ("A_log", "D", "norm_weight", "state")),
    )


class StateStepArgs(ctypes.Structure):
    """Mirror of `StateStepArgs` in step.cpp."""

    _fields_ = (
        *((n, _I64) for n in ("batch", "heads", "head_dim", "groups", "d_state", "threads")),
        *(("state", _PTR), ("x", _PTR), ("x_b", _I64), ("x_h", _I64), ("dt", _PTR), ("A", _PTR)),
        *(("B", _PTR), ("B_b", _I64), ("B_g", _I64), ("C", _PTR), ("C_b", _I64), ("C_g", _I64)),
        *(("D", _PTR), ("y", _PTR)),
    )


def state_step(
    library: ctypes.CDLL,
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
) -> Tensor:
    """Advance `state` (b, h, p, n) in place and return y (b, h, p); all fp32.

    dt (b, h) is discretised; D is (h, p); x, B and C have contiguous last dimensions.
    """
    b, h, p, n = state.shape
    dt, A = dt.contiguous(), A.contiguous()
    y = torch.empty(b, h, p)
    args = StateStepArgs(b, h, p, B.shape[1], n, torch.get_num_threads(), state.data_ptr())
    args.x, args.x_b, args.x_h = x.data_ptr(), x.stride(0), x.stride(1)
    args.dt, args.A, args.y = dt.data_ptr(), A.data_ptr(), y.data_ptr()
    args.B, args.B_b, args.B_g = B.data_ptr(), B.stride(0), B.stride(1)
    args.C, args.C_b, args.C_g = C.data_ptr(), C.stride(0), C.stride(1)
    args.D = None if D is None else D.data_ptr()
    library.state_step(ctypes.byref(args))
    return y


def mixer_step(
    library: ctypes.CDLL,
    zxbcdt: Tensor,
    conv_state: Tensor,
    state: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    dt_bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    norm_weight: Tensor,
    eps: float,
    norm_group: int,
    groups: int,
    dt_limit: tuple[float, float],
) -> Tensor:
    """All of a Mamba-2 mixer between its projections for one token: (b, h * p).

    zxbcdt (b, 2 h p + 2 g n + h) holds [z | x | B | C | dt].  The states are advanced in place:
    conv_state (b, d, s) with s >= w-1, newest last; state (b, h, p, n).  Everything is fp32
    and contiguous (zxbcdt: its rows); parameters are those of the mixer as they are stored.
    """
    b, h, p, n = state.shape
    out = torch.empty(b, h * p)
    args = StepArgs(
        b,
        h,
        p,
        groups,
        n,
        conv_weight.shape[-1],
        conv_state.shape[2],
        norm_group,
        torch.get_num_threads(),
        1,
        dt_limit[0],
        dt_limit[1],
        eps,
        zxbcdt.data_ptr(),
        zxbcdt.stride(0),
        out.data_ptr(),
        out.stride(0),
        conv_state.data_ptr(),
        conv_weight.data_ptr(),
        None if conv_bias is None else conv_bias.data_ptr(),
        dt_bias.data_ptr(),
        A_log.data_ptr(),
        D.data_ptr(),
        norm_weight.data_ptr(),
        state.data_ptr(),
    )
    library.mixer_step(ctypes.byref(args))
    return out
