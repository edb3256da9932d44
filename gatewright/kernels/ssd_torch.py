"""The SSD scan in plain PyTorch: a loop over short chunks, with its own backward.

Within a chunk of L tokens the recurrence is a masked product (Mamba-2 paper, section 6),

    y_t = sum_{s<=t} E_ts (C_t . B_s) u_s  +  exp(cum_t) S C_t,      u_s = dt_s x_s,
    S'  = exp(cum_L) S + sum_s exp(cum_L - cum_s) u_s B_s^T,         E_ts = exp(cum_t - cum_s),

with cum the running sum of dt A inside the chunk and S the state before it.  Chunks are
visited in order so that every temporary stays in cache; B and C are shared by all heads of a
group, so the products with the state are one large matrix product per group.

Two choices keep fp32 within 1e-6 of a float64 recurrence.  cum is summed in float64 and split
into a high and a low fp32 part: under strong gates its absolute value is large while
differences between neighbours are small.  The gradient of the decay is accumulated from the
terms that really contain it (a strictly lower triangle), never as a difference of totals,
which would cancel under strong gates.

Only every `_KEEP`-th state is kept for the backward pass; it recomputes those between.

Shape legend: b batch, l length, L chunk, h heads, p head_dim, g groups, n d_state, c chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

_KEEP = 16  # chunks between the states that are kept for the backward pass
_LOW_PART_FROM = 8.0  # |cum| above which its fp32 rounding would show


class _Decay(NamedTuple):
    """Everything that follows from dt, A and seq_idx alone, one entry per chunk."""

    dt: tuple[Tensor, ...]  # (b, h, L)
    hi: tuple[Tensor, ...]  # (b, h, L) cum, rounded to the working precision
    lo: tuple[Tensor, ...] | None  # (b, h, L) what the rounding lost
    enter: tuple[Tensor, ...]  # (b, h, L) decay of the incoming state until token t
    leave: tuple[Tensor, ...]  # (b, h, L) decay of token s until the end of the chunk
    whole: tuple[Tensor, ...]  # (b, h) decay over the whole chunk
    mask: tuple[Tensor, ...]  # (b or 1, 1, L, L): 0 where t may see s, -inf elsewhere


def segments(seq_idx: Tensor) -> Tensor:
    """Number the runs of equal `seq_idx` from 0: (b, l) of int64."""
    new = torch.zeros_like(seq_idx, dtype=torch.long)
    new[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    return new.cumsum(1)


def _decays(dt: Tensor, A: Tensor, seq_idx: Tensor | None, L: int, dtype: torch.dtype) -> _Decay:
    b, l, h = dt.shape
    c = -(-l // L)
    pad = c * L - l
    dt_chunks = F.pad(dt.to(dtype), (0, 0, 0, pad)).view(b, c, L, h).permute(1, 0, 3, 2)
    dt_chunks = dt_chunks.contiguous()  # (c, b, h, L)
    cum = (dt_chunks.double() * A.double()[:, None]).cumsum(-1)
    hi = cum.to(dtype)
    lo = None
    if dtype != torch.float64 and bool(cum.amin() < -_LOW_PART_FROM):
        lo = (cum - hi.double()).to(dtype)
    last = cum[..., -1:]
    enter, leave = cum.exp().to(dtype), (last - cum).exp().to(dtype)
    whole = last[..., 0].exp().to(dtype)
    future = torch.ones(L, L, dtype=torch.bool, device=dt.device).triu_(1)
    mask = torch.zeros(L, L, dtype=dtype, device=dt.device).masked_fill_(future, -torch.inf)
    masks: tuple[Tensor, ...] = (mask.view(1, 1, L, L),) * c
    if seq_idx is not None:
        seg = F.pad(segments(seq_idx), (0, pad))
        if pad:
            seg[:, l:] = seg[:, l - 1 : l]
        seg = seg.view(b, c, L).transpose(0, 1)  # (c, b, L)
        seg_in = torch.cat([seg[:1, :, :1], seg[:-1, :, -1:]])  # of the token before the chunk
        seg_out = seg[:, :, -1:]
        enter *= (seg == seg_in)[:, :, None]
        leave *= (seg == seg_out)[:, :, None]
        whole *= seg_in == seg_out
        apart = seg[:, :, None, :, None] != seg[:, :, None, None, :]
        masks = mask.masked_fill(apart, -torch.inf).unbind(0)
    return _Decay(
        dt_chunks.unbind(0),
        hi.unbind(0),
        None if lo is None else lo.unbind(0),
        enter.unbind(0),
        leave.unbind(0),
        whole.unbind(0),
        masks,
    )


def _decay_matrix(d: _Decay, i: int, L: int) -> Tensor:
    """E (b, h, L, L) of chunk i, zero where t must not see s."""
    hi = d.hi[i][..., :L]
    E = hi[..., :, None] - hi[..., None, :]
    if d.lo is not None:
        lo = d.lo[i][..., :L]
        E += lo[..., :, None] - lo[..., None, :]
    return E.add_(d.mask[i][..., :L, :L]).exp_()


def _per_group(S: Tensor, g: int) -> Tensor:
    """(b, h, p, n) -> (b, g, h/g * p, n)."""
    b, _, _, n = S.shape
    return S.view(b, g, -1, n)


class _Scan(Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        initial: Tensor | None,
        seq_idx: Tensor | None,
        L: int,
    ) -> tuple[Tensor, Tensor]:
        b, _, h, p = x.shape
        g, n = B.shape[2:]
        acc = torch.float64 if x.dtype == torch.float64 else torch.float32
        d = _decays(dt, A, seq_idx, L, acc)
        S = x.new_zeros(b, h, p, n, dtype=acc)
        if initial is not None:
            S.copy_(initial)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        D_acc = None if D is None else (D if D.dim() == 2 else D[:, None]).to(acc)
        kept = []
        chunks = zip(x.split(L, 1), B.split(L, 1), C.split(L, 1), y.split(L, 1), strict=True)
        for i, (xc, Bc, Cc, yc) in enumerate(chunks):
            if i % _KEEP == 0:
                kept.append(S.clone())
            k = xc.shape[1]
            xc = xc.to(acc)
            Bc, Cc = Bc.to(acc).transpose(1, 2), Cc.to(acc).transpose(1, 2)  # (b, g, k, n)
            u = torch.mul(xc.transpose(1, 2), d.dt[i][..., :k, None])  # (b, h, k, p)
            M = _decay_matrix(d, i, k).view(b, g, -1, k, k)
            M *= (Cc @ Bc.transpose(-1, -2))[:, :, None]
            Y = (M.view(b * h, k, k) @ u.reshape(b * h, k, p)).view(b, h, k, p)
            # (b, g, k, h/g * p): rows of the state belong to tokens here, not to heads
            off = Cc @ _per_group(S, g).transpose(-1, -2)
            off = off.view(b, g, k, h // g, p).transpose(2, 3).reshape(b, h, k, p)
            Y = torch.addcmul(Y, off, d.enter[i][..., :k, None])
            if D_acc is not None:
                Y = torch.addcmul(Y, xc.transpose(1, 2), D_acc[:, None, :])
            yc.copy_(Y.transpose(1, 2))
            _advance(S, S, u, Bc, d, i, k)
        ctx.save_for_backward(x, dt, A, B, C, D, initial, seq_idx, *kept)
        ctx.chunk = L
        ctx.set_materialize_grads(False)
        return y, S

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        dy, dS_out = grads
        x, dt, A, B, C, D, initial, seq_idx, *kept = ctx.saved_tensors
        if dy is None:
            dy = torch.zeros_like(x)
        L = ctx.chunk
        b, l, h, p = x.shape
        g, n = B.shape[2:]
        acc = torch.float64 if x.dtype == torch.float64 else torch.float32
        d = _decays(dt, A, seq_idx, L, acc)
        dS = torch.zeros(b, h, p, n, dtype=acc, device=x.device)
        if dS_out is not None:
            dS.copy_(dS_out)
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        ddt = torch.empty(b, l, h, dtype=acc, device=x.device)
        dB = torch.empty_like(B, memory_format=torch.contiguous_format)
        dC = torch.empty_like(C, memory_format=torch.contiguous_format)
        dA = torch.zeros(h, dtype=torch.float64, device=x.device)
        dD = None if D is None else torch.zeros(h, p, dtype=torch.float64, device=x.device)
        D_acc = None if D is None else (D if D.dim() == 2 else D[:, None]).to(acc)
        A_acc = A.to(acc)[:, None]
        before = torch.ones(L, L, dtype=acc, device=x.device).triu_(1)  # [s, t] = 1 if s < t
        upto = torch.ones(L, L, dtype=acc, device=x.device).tril_()
        xs, Bs, Cs, dys = x.split(L, 1), B.split(L, 1), C.split(L, 1), dy.split(L, 1)
        dxs, ddts, dBs, dCs = dx.split(L, 1), ddt.split(L, 1), dB.split(L, 1), dC.split(L, 1)
        room = torch.empty(min(_KEEP, len(xs)) - 1, b, h, p, n, dtype=acc, device=x.device)
        for block in reversed(range(len(kept))):
            first = block * _KEEP
            stop = min(first + _KEEP, len(xs))
            states = [kept[block], *room.unbind(0)][: stop - first]
            for i in range(first, stop - 1):
                k = L  # only the last chunk of all can be short
                u = torch.mul(xs[i].to(acc).transpose(1, 2), d.dt[i][..., None])
                Bc = Bs[i].to(acc).transpose(1, 2)
                _advance(states[i + 1 - first], states[i - first], u, Bc, d, i, k)
            for i in reversed(range(first, stop)):
                k = xs[i].shape[1]
                S = states.pop()
                xc = xs[i].to(acc).transpose(1, 2)  # (b, h, k, p)
                dyc = dys[i].to(acc).transpose(1, 2)
                Bc, Cc = Bs[i].to(acc).transpose(1, 2), Cs[i].to(acc).transpose(1, 2)
                dtc = d.dt[i][..., :k, None]
                enter, leave = d.enter[i][..., :k, None], d.leave[i][..., :k, None]
                u = torch.mul(xc, dtc).reshape(b * h, k, p)
                dY = dyc.reshape(b * h, k, p)
                E = _decay_matrix(d, i, k)  # (b, h, k, k)
                CB = (Cc @ Bc.transpose(-1, -2))[:, :, None]  # (b, g, 1, k, k)
                M = E.view(b, g, -1, k, k) * CB
                dM = (dY @ u.transpose(1, 2)).view(b, g, -1, k, k)
                dME = dM.mul_(E.view(b, g, -1, k, k))
                dCB = dME.sum(2)  # (b, g, k, k)
                # da_t gathers W_rs for all s < t <= r
                W = dME.mul_(CB).view(b * h, k, k)
                da = ((W @ before[:k, :k]) * upto[:k, :k]).sum(1).view(b, h, k)

                du = (M.view(b * h, k, k).transpose(1, 2) @ dY).view(b, h, k, p)
                dS_g, S_g = _per_group(dS, g), _per_group(S, g)
                dw = (Bc @ dS_g.transpose(-1, -2)).view(b, g, k, h // g, p)
                dw = dw.transpose(2, 3).reshape(b, h, k, p) * leave
                V = (dw * u.view(b, h, k, p)).sum(-1)  # (b, h, k), of token s via the end state
                da[..., 1:] += V.cumsum(-1)[..., :-1]
                du += dw
                ddt_c = (du * xc).sum(-1)

                # rows (k, h/g * p) per group, with the decay folded in
                uw = u.view(b, h, k, p) * leave
                uw = uw.view(b, g, -1, k, p).transpose(2, 3).reshape(b, g, k, -1)
                dYe = dyc * enter
                dYe = dYe.view(b, g, -1, k, p).transpose(2, 3).reshape(b, g, k, -1)
                dBs[i].copy_((uw @ dS_g + dCB.transpose(-1, -2) @ Cc).transpose(1, 2))
                off = (Cc @ S_g.transpose(-1, -2)).view(b, g, k, h // g, p)
                through = (off * dYe.view(b, g, k, h // g, p)).sum(-1).transpose(2, 3)
                da += through.reshape(b, h, k).flip(-1).cumsum(-1).flip(-1)
                dCs[i].copy_((dYe @ S_g + dCB @ Bc).transpose(1, 2))

                dS.mul_(d.whole[i][..., None, None])
                da += (dS.view(b * h, 1, -1) @ S.view(b * h, -1, 1)).view(b, h, 1)
                _add_product(dS, dYe.transpose(-1, -2), Cc)

                dxc = du * dtc
                if dD is not None and D_acc is not None:
                    dxc = torch.addcmul(dxc, dyc, D_acc[:, None, :])
                    dD += (dyc * xc).sum((0, 2), dtype=torch.float64)
                dxs[i].copy_(dxc.transpose(1, 2))
                ddts[i].copy_((ddt_c + da * A_acc).transpose(1, 2))
                dA += (da * dtc[..., 0]).sum((0, 2), dtype=torch.float64)
        if dD is not None:
            dD = (dD if D.dim() == 2 else dD.sum(1)).to(D.dtype)
        d_initial = None if initial is None else dS.to(initial.dtype)
        return dx, ddt.to(dt.dtype), dA.to(A.dtype), dB, dC, dD, d_initial, None, None


def _advance(out: Tensor, S: Tensor, u: Tensor, Bc: Tensor, d: _Decay, i: int, k: int) -> None:
    """Write the state after chunk i into `out`, which may be S itself (b, h, p, n).

    u (b, h, k, p), Bc (b, g, k, n).  States are the largest tensors of a step: none is allocated.
    """
    b, h, p, _ = S.shape
    g = Bc.shape[1]
    uw = (u * d.leave[i][..., :k, None]).view(b, g, h // g, k, p).transpose(3, 4)
    torch.mul(S, d.whole[i][..., None, None], out=out)
    _add_product(out, uw.reshape(b, g, -1, k), Bc)


def _add_product(S: Tensor, left: Tensor, right: Tensor) -> None:
    """S (b, h, p, n) += left (b, g, h/g * p, k) @ right (b, g, k, n), in place."""
    b, g, rows, k = left.shape
    n = S.shape[-1]
    S.view(b * g, rows, n).baddbmm_(left.reshape(b * g, rows, k), right.reshape(b * g, k, n))


def ssd_torch(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return y (b, l, h, p) and the final states (b, h, p, n); `dt` is already discretised.

    Chunks are longer for large states, which every chunk passes over several times.
    """
    if chunk is None:
        chunk = 32 if B.shape[3] <= 64 else 64
    if x.shape[1] == 0:
        acc = torch.float64 if x.dtype == torch.float64 else torch.float32
        b, _, h, p = x.shape
        if initial_states is None:
            return x.clone(), x.new_zeros(b, h, p, B.shape[3], dtype=acc)
        return x.clone(), initial_states.to(acc).clone()
    return _Scan.apply(x, dt, A, B, C, D, initial_states, seq_idx, chunk)
