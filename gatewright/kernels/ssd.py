"""The SSD chunk scan of Mamba-2, for training and prefill."""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from gatewright.kernels import backend
from gatewright.kernels.native import ssd as native_ssd
from gatewright.kernels.norm import silu_gate
from gatewright.kernels.reference import discretize_dt
from gatewright.kernels.shapes import require
from gatewright.kernels.ssd_torch import segments, ssd_torch


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int = 64,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Mamba-2's state space recurrence over whole sequences, in chunks.

    The arguments and results are those of `ssd_reference` (and of mamba_ssm's
    `mamba_chunk_scan_combined`).  Inputs may be fp32, bf16, fp16 or (slowly) float64; sums are
    fp32 at least.  Final states are fp32, or float64 for float64 inputs.

    Args:
        chunk_size: used by the CUDA kernels only; the CPU ones choose what suits the cache.
    """
    if x.is_cuda and backend.active_backend() == "cuda":
        module = backend.cuda_module("mamba_ssm.ops.triton.ssd_combined")
        assert module is not None
        return module.mamba_chunk_scan_combined(
            x,
            dt,
            A,
            B,
            C,
            chunk_size,
            D=D,
            z=z,
            dt_bias=dt_bias,
            initial_states=initial_states,
            seq_idx=None if seq_idx is None else seq_idx.to(torch.int32),
            dt_softplus=dt_softplus,
            dt_limit=dt_limit,
            return_final_states=return_final_states,
        )
    _check(x, dt, A, B, C)
    b, l, h, p = x.shape
    require(
        "ssd_scan",
        z=(z, (b, l, h, p)),
        initial_states=(initial_states, (b, h, p, B.shape[3])),
        seq_idx=(seq_idx, (b, l)),
    )
    acc = torch.float64 if x.dtype == torch.float64 else torch.float32
    step = discretize_dt(
        dt.to(acc), None if dt_bias is None else dt_bias.to(acc), dt_softplus, dt_limit
    )
    library = backend.native_for(x, B, C)
    if library is None or x.shape[1] == 0 or x.shape[3] > native_ssd.MAX_HEAD_DIM:
        y, final = ssd_torch(x, step, A.to(acc), B, C, D, initial_states, seq_idx)
    else:
        y, final = _native(
            library, x, step, A, B, C, D, initial_states, seq_idx, return_final_states
        )
    if z is not None:
        y = silu_gate(y, z)
    return (y, final) if return_final_states else y


def _native(
    library: ctypes.CDLL,
    x: Tensor,
    step: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    initial: Tensor | None,
    seq_idx: Tensor | None,
    want_final: bool,
) -> tuple[Tensor, Tensor]:
    """Bring the arguments into the C++ kernel's types; autograd brings gradients back."""
    dtype = x.dtype if x.dtype in (torch.float32, torch.bfloat16) else torch.float32
    if D is not None:
        D = (D if D.dim() == 2 else D[:, None]).float().expand(x.shape[2:]).contiguous()
    y, final = native_ssd.Scan.apply(
        library,
        x.to(dtype),
        step.contiguous(),
        A.float().contiguous(),
        B.to(dtype),
        C.to(dtype),
        D,
        None if initial is None else initial.float().contiguous(),
        None if seq_idx is None else segments(seq_idx).int(),
        want_final,
    )
    return y.to(x.dtype), final


def _check(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> None:
    b, l, h, _ = x.shape
    g, n = B.shape[2:]
    ok = dt.shape == (b, l, h) and A.shape == (h,) and B.shape == C.shape == (b, l, g, n)
    if not ok or h % g:
        raise ValueError(
            "ssd_scan: shapes disagree: "
            f"x {tuple(x.shape)}, dt {tuple(dt.shape)}, A {tuple(A.shape)}, "
            f"B {tuple(B.shape)}, C {tuple(C.shape)}"
        )
