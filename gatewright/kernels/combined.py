"""The functions that Mamba-2 mixers call, under the names and signatures of mamba_ssm 2.3 and
causal_conv1d 1.7, so that Megatron-Core's and transformers' mixers need no other change.
"""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from gatewright.kernels import backend
from gatewright.kernels.conv import causal_conv1d, conv1d_step
from gatewright.kernels.native import conv as native_conv
from gatewright.kernels.native import mixer as native_mixer
from gatewright.kernels.native import norm as native_norm
from gatewright.kernels.native import ssd as native_ssd
from gatewright.kernels.norm import gated_rms_norm
from gatewright.kernels.shapes import require
from gatewright.kernels.ssd import ssd_scan
from gatewright.kernels.ssd_torch import segments
from gatewright.kernels.step import state_step


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """`ssd_scan` under mamba_ssm's name.

    With `cu_seqlens` (s + 1,) the single row holds s sequences end to end; then
    `return_varlen_states` adds their final states (s, h, p, n) to the result.
    """
    if not return_varlen_states:
        return ssd_scan(
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
            seq_idx=seq_idx,
            dt_softplus=dt_softplus,
            dt_limit=dt_limit,
            return_final_states=return_final_states,
        )
    if cu_seqlens is None or x.shape[0] != 1 or initial_states is not None:
        raise ValueError("return_varlen_states needs cu_seqlens, one row and no initial states")
    ends = cu_seqlens.tolist()
    ends = ends if ends[-1] == x.shape[1] else [*ends, x.shape[1]]  # padding after the last
    ys, finals = [], []
    for start, stop in itertools.pairwise(ends):
        part = slice(start, stop)
        y, final = ssd_scan(
            x[:, part],
            dt[:, part],
            A,
            B[:, part],
            C[:, part],
            chunk_size,
            D=D,
            z=None if z is None else z[:, part],
            dt_bias=dt_bias,
            dt_softplus=dt_softplus,
            dt_limit=dt_limit,
            return_final_states=True,
        )
        ys.append(y)
        finals.append(final)
    varlen = torch.cat(finals[: cu_seqlens.numel() - 1])
    y = torch.cat(ys, dim=1)
    return (y, finals[-1], varlen) if return_final_states else (y, varlen)


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    activation: str = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Everything between a Mamba-2 mixer's two projections (and the second one on request).

    Args:
        zxbcdt: (b, l, 2 d_inner + 2 g n + h), the input projection [z | x | B | C | dt]; a
            transposed (l, b, ...) is taken as it lies on CPU, and so is the result laid out.
        conv1d_weight: (d_inner + 2 g n, w) over [x | B | C].
        D: (h,) with `headdim`, or (h, p).
        rmsnorm_weight: (d_inner,); without it y is gated by silu(z) and not normalised.
        outproj_weight: (d_model, d_inner), applied last when given.

    Returns:
        (b, l, d_inner or d_model), and the final states (b, h, p, n) when asked for.

    Raises:
        ValueError: shapes that do not fit together.
    """
    if D.dim() == 1 and headdim is None:
        raise ValueError("headdim is needed when D is per head")
    h = D.shape[0]
    p = D.shape[1] if D.dim() == 2 else headdim
    assert p is not None
    d_inner, d_conv = h * p, conv1d_weight.shape[0]
    n = (d_conv - d_inner) // (2 * ngroups)
    if h % ngroups or d_conv != d_inner + 2 * ngroups * n or n < 1:
        raise ValueError(
            f"mamba_split_conv1d_scan_combined: {ngroups} groups and {h} heads of {p} do not "
            f"fit a convolution over {d_conv} channels"
        )
    b, l = zxbcdt.shape[:2]
    require(
        "mamba_split_conv1d_scan_combined",
        zxbcdt=(zxbcdt, (b, l, d_inner + d_conv + h)),
        conv1d_bias=(conv1d_bias, (d_conv,)),
        dt_bias=(dt_bias, (h,)),
        A=(A, (h,)),
        rmsnorm_weight=(rmsnorm_weight, (d_inner,)),
        seq_idx=(seq_idx, (b, l)),
        initial_states=(initial_states, (b, h, p, n)),
    )
    if zxbcdt.is_cuda and backend.active_backend() == "cuda":
        module = backend.cuda_module("mamba_ssm.ops.triton.ssd_combined")
        assert module is not None
        return module.mamba_split_conv1d_scan_combined(
            zxbcdt.contiguous(),
            conv1d_weight,
            conv1d_bias,
            dt_bias,
            A,
            D,
            chunk_size,
            initial_states=initial_states,
            seq_idx=None if seq_idx is None else seq_idx.to(torch.int32),
            dt_limit=dt_limit,
            return_final_states=return_final_states,
            activation=activation,
            rmsnorm_weight=rmsnorm_weight,
            rmsnorm_eps=rmsnorm_eps,
            outproj_weight=outproj_weight,
            outproj_bias=outproj_bias,
            headdim=headdim,
            ngroups=ngroups,
            norm_before_gate=norm_before_gate,
        )
    library = backend.native_for(zxbcdt)
    fused = (
        library is not None
        and zxbcdt.dtype != torch.float16
        and zxbcdt.numel() > 0
        and activation in ("silu", "swish")
        and native_conv.takes(conv1d_weight)
        and native_norm.takes(h * p // ngroups)
        and p <= native_ssd.MAX_HEAD_DIM
        and initial_states is None
        and not return_final_states
    )
    if fused:
        y = native_mixer.Mixer.apply(
            library,
            zxbcdt,
            conv1d_weight,
            conv1d_bias,
            dt_bias,
            A,
            D,
            None if seq_idx is None else segments(seq_idx).int(),
            rmsnorm_weight,
            native_mixer.Sizes(h, p, ngroups, n, rmsnorm_eps, norm_before_gate, dt_limit),
        )
        if outproj_weight is not None:
            y = F.linear(y.to(outproj_weight.dtype), outproj_weight, outproj_bias)
        return y
    z, xBC, dt = zxbcdt.split([d_inner, d_conv, h], dim=-1)
    xBC = causal_conv1d(xBC.transpose(1, 2), conv1d_weight, conv1d_bias, activation, seq_idx)
    assert isinstance(xBC, Tensor)
    x, B, C = xBC.transpose(1, 2).split([d_inner, ngroups * n, ngroups * n], dim=-1)
    y, final = ssd_scan(
        x.unflatten(-1, (h, p)),
        dt,
        A,
        B.unflatten(-1, (ngroups, n)),
        C.unflatten(-1, (ngroups, n)),
        chunk_size,
        D=D,
        z=None if rmsnorm_weight is not None else z.unflatten(-1, (h, p)),
        dt_bias=dt_bias,
        initial_states=initial_states,
        seq_idx=seq_idx,
        dt_softplus=True,
        dt_limit=dt_limit,
        return_final_states=True,
    )
    y = y.flatten(-2)
    if rmsnorm_weight is not None:
        size = d_inner // ngroups
        y = gated_rms_norm(y, rmsnorm_weight, rmsnorm_eps, z, size, norm_before_gate)
    if outproj_weight is not None:
        y = F.linear(y.to(outproj_weight.dtype), outproj_weight, outproj_bias)
    return (y, final) if return_final_states else y


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`causal_conv1d` under causal_conv1d's name."""
    out = causal_conv1d(x, weight, bias, activation, seq_idx, initial_states, return_final_states)
    if final_states_out is not None and isinstance(out, tuple):
        final_states_out.copy_(out[1])
    return out


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """`conv1d_step` under causal_conv1d's name: x (b, d) or (b, d, l), state updated in place.

    Args:
        conv_state_indices: (b,), the rows of `conv_state` that the inputs belong to.
    """
    if cache_seqlens is not None:
        raise ValueError("cache_seqlens (circular buffers) are not supported on CPU")
    state = conv_state if conv_state_indices is None else conv_state[conv_state_indices]
    steps = x[:, :, None] if x.dim() == 2 else x
    out = torch.stack(
        [conv1d_step(t, state, weight, bias, activation) for t in steps.unbind(2)], dim=2
    )
    if conv_state_indices is not None:
        conv_state[conv_state_indices] = state
    return out[:, :, 0] if x.dim() == 2 else out


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
) -> Tensor:
    """`state_step` under mamba_ssm's name and with its expanded arguments.

    dt (b, h, p), A (h, p, n), D (h, p) and dt_bias (h, p) hold one value per head, repeated
    (that is what makes it Mamba-2); the first of each head is read.
    """
    chosen = state if state_batch_indices is None else state[state_batch_indices]
    y = state_step(
        chosen,
        x,
        dt[..., 0],
        A[:, 0, 0],
        B,
        C,
        D=D,
        z=z,
        dt_bias=None if dt_bias is None else dt_bias[:, 0],
        dt_softplus=dt_softplus,
    )
    if state_batch_indices is not None:
        state[state_batch_indices] = chosen
    return y
