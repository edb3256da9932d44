"""Slow, obvious definitions of every kernel, which the fast ones are tested against.

Each is a plain recurrence or a plain sum in the dtype of its inputs; call them with float64
inputs to obtain the truth.  All are differentiable by autograd.

Shape legend: b batch, l length, h heads, p head_dim, g groups, n d_state, d channels,
w convolution width.  A is negative (h,), dt is positive after softplus and limits.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def discretize_dt(
    dt: Tensor, dt_bias: Tensor | None, dt_softplus: bool, dt_limit: tuple[float, float]
) -> Tensor:
    """Return the step sizes dt_t = clamp(softplus(dt + dt_bias), dt_limit), shape of `dt`."""
    if dt_bias is not None:
        dt = dt + dt_bias
    if dt_softplus:
        dt = F.softplus(dt)
    if dt_limit[0] > 0.0 or dt_limit[1] < math.inf:
        dt = dt.clamp(min=dt_limit[0], max=dt_limit[1])
    return dt


def ssd_reference(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Mamba-2's state space recurrence, one token after the other.

    S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T and y_t = S_t C_t + D x_t, times silu(z_t);
    Mamba-2 paper (arXiv 2405.21060) section 3.  Where `seq_idx` changes the state restarts
    from zero; `initial_states` belong to the first segment.

    Args:
        x: (b, l, h, p). dt: (b, l, h). A: (h,). B, C: (b, l, g, n). D: (h,) or (h, p).
        z: (b, l, h, p). initial_states: (b, h, p, n). seq_idx: (b, l), integers.
        chunk_size: ignored; here so that the arguments are those of `ssd_scan`.

    Returns:
        y (b, l, h, p), with the final states (b, h, p, n) when asked for.
    """
    b, l, h, p = x.shape
    g, n = B.shape[2:]
    dt = discretize_dt(dt, dt_bias, dt_softplus, dt_limit)
    B = B.repeat_interleave(h // g, dim=2)
    C = C.repeat_interleave(h // g, dim=2)
    state = x.new_zeros(b, h, p, n) if initial_states is None else initial_states
    rows = []
    for t in range(l):
        alpha = torch.exp(dt[:, t] * A)  # (b, h)
        if seq_idx is not None and t > 0:
            alpha = alpha * (seq_idx[:, t] == seq_idx[:, t - 1])[:, None]
        update = (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None, :]
        state = alpha[..., None, None] * state + update
        rows.append((state * C[:, t, :, None, :]).sum(-1))
    y = torch.stack(rows, dim=1) if rows else torch.zeros_like(x)
    if D is not None:
        y = y + (D if D.dim() == 2 else D[:, None]) * x
    if z is not None:
        y = y * F.silu(z)
    return (y, state) if return_final_states else y


def causal_conv1d_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Depthwise causal convolution, out_t = act(bias + sum_j weight_{w-1-j} x_{t-j}).

    Args:
        x: (b, d, l). weight: (d, w). bias: (d,). seq_idx: (b, l): inputs of another segment
            count as zero. initial_states: (b, d, w-1), the inputs before the first.
        activation: None or "silu".

    Returns:
        (b, d, l), with the last w-1 inputs (b, d, w-1) when final states are asked for
        (inputs of earlier segments as zero).
    """
    b, d, l = x.shape
    w = weight.shape[1]
    past = x.new_zeros(b, d, w - 1) if initial_states is None else initial_states
    padded = torch.cat([past, x], dim=2)
    if seq_idx is None:
        segment = torch.zeros(b, w - 1 + l, dtype=torch.long, device=x.device)
    else:
        new = torch.zeros(b, w - 1 + l, dtype=torch.long, device=x.device)
        if l > 1:
            new[:, w:] = (seq_idx[:, 1:] != seq_idx[:, :-1]).long()
        segment = new.cumsum(1)
    out = x.new_zeros(b, d, l)
    for j in range(w):  # j tokens back
        sight = (segment[:, w - 1 :] == segment[:, w - 1 - j : w - 1 - j + l])[:, None]
        out = out + weight[:, w - 1 - j, None] * padded[:, :, w - 1 - j : w - 1 - j + l] * sight
    if bias is not None:
        out = out + bias[:, None]
    if activation == "silu":
        out = F.silu(out)
    if not return_final_states:
        return out
    kept = (segment[:, l:] == segment[:, -1:])[:, None]
    return out, padded[:, :, l:] * kept


def conv1d_step_reference(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """One token of the causal convolution: returns the output (b, d) and the new state.

    conv_state (b, d, s) holds the last s >= w-1 inputs, newest last.
    """
    joined = torch.cat([conv_state, x[:, :, None]], dim=2)
    out = (joined[:, :, -weight.shape[1] :] * weight).sum(-1)
    if bias is not None:
        out = out + bias
    if activation == "silu":
        out = F.silu(out)
    return out, joined[:, :, -conv_state.shape[2] :]


def state_step_reference(
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
    dt_limit: tuple[float, float] = (0.0, math.inf),
) -> tuple[Tensor, Tensor]:
    """One token of `ssd_reference`: returns y (b, h, p) and the new state (b, h, p, n).

    x (b, h, p), dt (b, h), B and C (b, g, n), z (b, h, p).
    """
    y, new = ssd_reference(
        x[:, None],
        dt[:, None],
        A,
        B[:, None],
        C[:, None],
        D=D,
        z=None if z is None else z[:, None],
        dt_bias=dt_bias,
        initial_states=state,
        dt_softplus=dt_softplus,
        dt_limit=dt_limit,
        return_final_states=True,
    )
    return y[:, 0], new


def gated_rms_norm_reference(
    x: Tensor,
    weight: Tensor,
    eps: float,
    z: Tensor | None = None,
    group_size: int | None = None,
    norm_before_gate: bool = False,
) -> Tensor:
    """RMSNorm over groups of the last dimension, gated by silu(z) before or after it."""
    if z is not None and not norm_before_gate:
        x = x * F.silu(z)
    grouped = x.unflatten(-1, (-1, group_size or x.shape[-1]))
    x = (grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)).flatten(-2) * weight
    if z is not None and norm_before_gate:
        x = x * F.silu(z)
    return x
