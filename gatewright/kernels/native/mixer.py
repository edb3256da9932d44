"""All of a Mamba-2 mixer between its projections, as one differentiable function in C++.

It keeps the input projection's output, the scan's output and a state every few hundred
tokens; convolution, step sizes and gates are recomputed in the backward pass.  Gradients of
the parts [z | x | B | C | dt] are written straight into one tensor.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from gatewright.kernels.native import conv, norm, ssd


class Sizes(NamedTuple):
    """What the tensors' shapes do not say."""

    heads: int
    head_dim: int
    groups: int
    d_state: int
    eps: float
    norm_before_gate: bool
    dt_limit: tuple[float, float]


class _Parts(NamedTuple):
    """Views of a (b, l, 2 d_inner + 2 g n + h) tensor: [z | xBC | dt]."""

    z: Tensor
    xBC: Tensor
    dt: Tensor


def _parts(t: Tensor, s: Sizes) -> _Parts:
    inner = s.heads * s.head_dim
    return _Parts(*t.split([inner, inner + 2 * s.groups * s.d_state, s.heads], dim=-1))


def _heads(xBC: Tensor, s: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """Views x (b, l, h, p), B and C (b, l, g, n) of the convolution's channels."""
    gn = s.groups * s.d_state
    x, B, C = xBC.split([s.heads * s.head_dim, gn, gn], dim=-1)
    return (
        x.unflatten(-1, (s.heads, s.head_dim)),
        B.unflatten(-1, (s.groups, s.d_state)),
        C.unflatten(-1, (s.groups, s.d_state)),
    )


def _empty(like: Tensor, *width: int) -> Tensor:
    """Room for (b, l, *width) in the memory order of `like`: rows by batch, or by token.

    Megatron's activations are (l, b, d); a transposed view of them is taken as it lies.
    """
    b, l, _ = like.shape
    if like.stride(0) < like.stride(1):
        return torch.empty(l, b, *width, dtype=like.dtype).transpose(0, 1)
    return torch.empty(b, l, *width, dtype=like.dtype)


def _rows(t: Tensor) -> Tensor:
    """View (b, l, d) as (rows, d) in memory order."""
    return norm.as_rows(t.transpose(0, 1) if t.stride(0) < t.stride(1) else t)


def _as_laid(t: Tensor, like: Tensor) -> Tensor:
    """Return `t` (b, l, d) in the memory order of `like`, copied only if it lies otherwise."""
    flipped = like.stride(0) < like.stride(1)
    inner = t.transpose(0, 1) if flipped else t
    inner = inner.to(like.dtype).contiguous()
    return inner.transpose(0, 1) if flipped else inner


def _f32(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.detach().float().contiguous()


class _Inputs:
    """What both passes compute from the saved tensors."""

    def __init__(
        self,
        library: ctypes.CDLL,
        s: Sizes,
        zxbcdt: Tensor,
        conv_weight: Tensor,
        conv_bias: Tensor | None,
        dt_bias: Tensor,
        A: Tensor,
        D: Tensor,
        segment: Tensor | None,
        norm_weight: Tensor | None,
    ) -> None:
        self.parts = _parts(zxbcdt, s)
        self.taps = conv_weight.detach().t().float().contiguous()
        self.conv_bias = _f32(conv_bias)
        self.norm_weight = _f32(norm_weight)
        self.segment = segment
        self.xBC = _empty(zxbcdt, self.taps.shape[1])
        self.conv_args = conv.arguments(
            self.parts.xBC, self.taps, self.conv_bias, None, segment, True
        )
        conv.conv_forward(library, self.conv_args, self.xBC)
        self.raw = self.parts.dt.float() + dt_bias.float()
        soft = F.softplus(self.raw)
        self.inside = None
        if s.dt_limit[0] > 0.0 or s.dt_limit[1] < math.inf:
            self.inside = (soft >= s.dt_limit[0]) & (soft <= s.dt_limit[1])
            soft = soft.clamp(*s.dt_limit)
        self.dt = soft.contiguous()
        self.A = A.float().contiguous()
        wide = (D if D.dim() == 2 else D[:, None]).float()
        self.D = wide.expand(s.heads, s.head_dim).contiguous()
        self.ssd_args = ssd.arguments(
            *(self.x_B_C(s)[:1]), self.dt, self.A, *(self.x_B_C(s)[1:]), self.D, None, segment
        )

    def x_B_C(self, s: Sizes) -> tuple[Tensor, Tensor, Tensor]:
        return _heads(self.xBC, s)

    def norm_args(self, y: Tensor, s: Sizes) -> norm.NormArgs:
        eps = norm.NO_NORM if self.norm_weight is None else s.eps
        group = s.heads * s.head_dim // s.groups
        after = s.norm_before_gate and self.norm_weight is not None
        rows, z = _rows(y.flatten(2)), _rows(self.parts.z)
        return norm.arguments(rows, z, self.norm_weight, eps, group, after)


class Mixer(Function):
    """zxbcdt (b, l, 2 d_inner + 2 g n + h) -> (b, l, d_inner)."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        library: ctypes.CDLL,
        zxbcdt: Tensor,
        conv_weight: Tensor,
        conv_bias: Tensor | None,
        dt_bias: Tensor,
        A: Tensor,
        D: Tensor,
        segment: Tensor | None,
        norm_weight: Tensor | None,
        s: Sizes,
    ) -> Tensor:
        if zxbcdt.stride(0) >= zxbcdt.stride(1) or not zxbcdt.transpose(0, 1).is_contiguous():
            zxbcdt = zxbcdt.contiguous()
        given = (conv_weight, conv_bias, dt_bias, A, D, segment, norm_weight)
        i = _Inputs(library, s, zxbcdt, *given)
        y = _empty(zxbcdt, s.heads, s.head_dim)
        ssd.put(i.ssd_args, y=y)
        kept = None
        if any(ctx.needs_input_grad):
            kept = ssd.kept_states(i.ssd_args, zxbcdt)
            i.ssd_args.kept = kept.data_ptr()
        library.ssd_forward(ctypes.byref(i.ssd_args))
        out = _empty(zxbcdt, s.heads * s.head_dim)
        norm.norm_forward(library, i.norm_args(y, s), _rows(out))
        ctx.save_for_backward(zxbcdt, *given, y, kept)
        ctx.library, ctx.sizes = library, s
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        zxbcdt, *given, y, kept = ctx.saved_tensors
        conv_weight, conv_bias, dt_bias, A, D, _, norm_weight = given
        s, library = ctx.sizes, ctx.library
        i = _Inputs(library, s, zxbcdt, *given)
        d = _empty(zxbcdt, zxbcdt.shape[2])
        dparts = _parts(d, s)

        dout = _rows(_as_laid(grads[0], zxbcdt))
        dy = _empty(zxbcdt, s.heads, s.head_dim)
        dnorm = norm.norm_backward(
            library, i.norm_args(y, s), dout, _rows(dy.flatten(2)), _rows(dparts.z)
        )

        dxBC = _empty(zxbcdt, i.xBC.shape[2])
        dx, dB, dC = _heads(dxBC, s)
        i.ssd_args.kept = kept.data_ptr()
        ssd.put(i.ssd_args, dy=dy, dx=dx)
        out = ssd.gradient_buffers(i.ssd_args, i.dt, i.D, None, None)
        library.ssd_backward(ctypes.byref(i.ssd_args))
        dA, dB_sum, dC_sum, dD = ssd.reduce_gradients(out, zxbcdt.dtype, D)
        dB.copy_(dB_sum)
        dC.copy_(dC_sum)
        dconv, dconv_bias = conv.conv_backward(library, i.conv_args, dxBC, dparts.xBC)

        ddt = out["ddt"]
        assert ddt is not None
        ddt *= torch.sigmoid(i.raw)
        if i.inside is not None:
            ddt *= i.inside
        dparts.dt.copy_(ddt)
        assert dD is not None
        return (
            None,
            d,
            dconv.to(conv_weight.dtype),
            None if dconv_bias is None or conv_bias is None else dconv_bias.to(conv_bias.dtype),
            ddt.sum((0, 1)).to(dt_bias.dtype),
            dA.to(A.dtype),
            (dD if D.dim() == 2 else dD.sum(1)).to(D.dtype),
            None,
            None if dnorm is None else dnorm.to(norm_weight.dtype),
            None,
        )
