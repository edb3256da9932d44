"""Causal depthwise convolution before the scan, over sequences and one token at a time."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from gatewright.kernels import backend
from gatewright.kernels.native import conv as native
from gatewright.kernels.reference import causal_conv1d_reference
from gatewright.kernels.ssd_torch import segments


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Depthwise causal convolution with an optional SiLU; see `causal_conv1d_reference`.

    x (b, d, l) may lie in memory as (b, l, d), which is the faster order on CPU; the result
    lies as x does.

    Raises:
        ValueError: an activation other than None, "silu" or "swish", or shapes that do not fit.
    """
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"activation={activation!r}: only None, 'silu' and 'swish' exist here")
    b, d, l = x.shape
    if (
        weight.shape[0] != d
        or (bias is not None and bias.shape != (d,))
        or (seq_idx is not None and seq_idx.shape != (b, l))
    ):
        given = [None if t is None else tuple(t.shape) for t in (x, weight, bias, seq_idx)]
        raise ValueError(f"causal_conv1d: x, weight, bias, seq_idx {given} do not fit together")
    silu = activation is not None
    simple = initial_states is None and not return_final_states
    if x.is_cuda and simple and seq_idx is None and backend.active_backend() == "cuda":
        module = backend.cuda_module("causal_conv1d")
        if module is not None:
            return module.causal_conv1d_fn(x, weight, bias, activation=activation)
    out = _convolve(x, weight, bias, initial_states, seq_idx, silu)
    if not return_final_states:
        return out
    _, final = causal_conv1d_reference(  # of the last w-1 tokens: cheap, and obviously right
        *_tail(x, weight, seq_idx, initial_states), return_final_states=True
    )
    return out, final


def _convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial: Tensor | None,
    seq_idx: Tensor | None,
    silu: bool,
) -> Tensor:
    library = backend.native_for(x)
    needs = initial is not None and initial.requires_grad and torch.is_grad_enabled()
    if library is None or needs or not native.takes(weight) or not x.numel():
        return _Conv.apply(x, weight, bias, initial, seq_idx, silu)
    rows = x.transpose(1, 2)
    past = None if initial is None else initial.transpose(1, 2).float().contiguous()
    segment = None if seq_idx is None else segments(seq_idx).int()
    if x.dtype == torch.float16:
        rows = rows.float()
    out = native.Conv.apply(library, rows, weight, bias, past, segment, silu)
    return out.to(x.dtype).transpose(1, 2)


def _tail(
    x: Tensor, weight: Tensor, seq_idx: Tensor | None, initial: Tensor | None
) -> tuple[Tensor, Tensor, None, None, Tensor | None, Tensor | None]:
    """The arguments that give the same final state from the last w tokens alone."""
    w = weight.shape[1]
    if x.shape[2] < w:
        return x, weight, None, None, seq_idx, initial
    return x[:, :, -w:], weight, None, None, None if seq_idx is None else seq_idx[:, -w:], None


class _Conv(Function):
    """Shifted multiply-adds over (b, l, d); the backward pass recomputes the pre-activation."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        initial: Tensor | None,
        seq_idx: Tensor | None,
        silu: bool,
    ) -> Tensor:
        seg = None if seq_idx is None else segments(seq_idx)
        pre = _pre_activation(x, weight, bias, initial, seg)
        ctx.save_for_backward(x, weight, bias, initial, seg)
        ctx.silu = silu
        return (F.silu(pre, inplace=True) if silu else pre).to(x.dtype).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight, bias, initial, seg = ctx.saved_tensors
        w, l = weight.shape[1], x.shape[2]
        t = _rows(x)
        dpre = _rows(grads[0])
        if ctx.silu:
            pre = _pre_activation(x, weight, bias, initial, seg)
            dpre = torch.ops.aten.silu_backward(dpre, pre)
        taps = weight.to(t.dtype)
        dt = dpre * taps[:, -1]
        dweight = torch.empty_like(taps)
        dweight[:, -1] = (dpre * t).sum((0, 1))
        for j in range(1, w):
            d = dpre[:, j:]
            if seg is not None:
                d = d * (seg[:, j:] == seg[:, :-j])[..., None]
            dt[:, : max(l - j, 0)] += d * taps[:, w - 1 - j]
            dweight[:, w - 1 - j] = (d * t[:, : max(l - j, 0)]).sum((0, 1))
        dinitial = None
        if initial is not None:
            dinitial = torch.zeros_like(initial, dtype=t.dtype)
            past = initial.to(t.dtype)
            for j in range(1, w):  # output i < j reads past input w-1 - (j - i)
                for i in range(min(j, l)):
                    d = dpre[:, i] if seg is None else dpre[:, i] * (seg[:, i] == 0)[:, None]
                    dinitial[:, :, w - 1 - j + i] += d * taps[:, w - 1 - j]
                    dweight[:, w - 1 - j] += (d * past[:, :, w - 1 - j + i]).sum(0)
            dinitial = dinitial.to(initial.dtype)
        dbias = None if bias is None else dpre.sum((0, 1)).to(bias.dtype)
        return dt.to(x.dtype).transpose(1, 2), dweight.to(weight.dtype), dbias, dinitial, None, None


def _rows(x: Tensor) -> Tensor:
    """(b, d, l) -> (b, l, d) in the precision of the sums."""
    return x.transpose(1, 2).to(torch.float64 if x.dtype == torch.float64 else torch.float32)


def _pre_activation(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial: Tensor | None, seg: Tensor | None
) -> Tensor:
    """bias + sum_j weight_{w-1-j} x_{t-j}: (b, l, d)."""
    t, w = _rows(x), weight.shape[1]
    l = t.shape[1]
    taps = weight.to(t.dtype)
    if bias is None:
        pre = t * taps[:, -1]
    else:
        pre = torch.addcmul(bias.to(t.dtype), t, taps[:, -1])
    for j in range(1, w):
        if j < l:
            seen = t[:, :-j]
            if seg is not None:
                seen = seen * (seg[:, j:] == seg[:, :-j])[..., None]
            pre[:, j:].addcmul_(seen, taps[:, w - 1 - j])
        if initial is not None:
            k = min(j, l)
            past = initial[:, :, w - 1 - j : w - 1 - j + k].transpose(1, 2).to(t.dtype)
            if seg is not None:
                past = past * (seg[:, :k] == 0)[..., None]
            pre[:, :k].addcmul_(past, taps[:, w - 1 - j])
    return pre


@torch.no_grad()
def conv1d_step(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """One token of the convolution: returns (b, d) and shifts `conv_state` in place.

    For inference: no gradient is recorded.

    Args:
        x: (b, d). weight: (d, w).
        conv_state: (b, d, s) with s >= w-1, the newest input last.
    """
    w = weight.shape[1]
    if conv_state.shape[2] < w - 1:
        raise ValueError(f"conv_state holds {conv_state.shape[2]} inputs; {w - 1} are needed")
    joined = torch.cat([conv_state, x[:, :, None].to(conv_state.dtype)], dim=2)
    conv_state.copy_(joined[:, :, 1:])
    out = (joined[:, :, -w:] * weight).sum(-1)
    if bias is not None:
        out += bias
    return (out if activation is None else F.silu(out)).to(x.dtype)
