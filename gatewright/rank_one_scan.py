"""The recurrence behind every cell: a diagonal-plus-rank-one state transition.

    S_t = S_{t-1} (diag(w_t) - a_t b_t^T) + v_t k_t^T,      o_t = S_t q_t

DeltaNet: w = 1, a = beta k, b = k, written value beta v.  Gated DeltaNet: w = alpha,
a = alpha beta k.  RWKV-7 as in the recall summary's equation 3: w, a = a kappa, b = kappa (its
published code has the two the other way round).  Diagonal cells and Mamba-2: no a, b.

`recurrence` is this line, token by token.  `scan` computes it fast: in C++ where that can be
had (the same recurrence with the state in registers, see kernels/native/rank_one.h), else by
`chunked`.  `delta_scan` is its DeltaNet case, with less work.

`chunked` uses PyTorch's matrix products on chunks: with the decays' running product L_t inside
a chunk, `S_t = S~_t diag(L_t)` turns the update into

    S~_t = S~_{t-1} - u_t (b_t / L_t)^T + v_t (k_t / L_t)^T,   u_t = S~_{t-1} (L_{t-1} a_t)

and all u of a chunk solve one unit lower triangular system (the WY form with decay).
Dividing by L is exact in relative terms; it only must not overflow, so `log_w` is bounded
below by MIN_LOG_DECAY (a decay of 0.0067 a token).

Shape suffixes: R rows (members x sequences x heads), L length, K key width, V value width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from gatewright.kernels import backend
from gatewright.kernels.native import rank_one as native

MIN_LOG_DECAY = -5.0
CHUNK = 16  # CHUNK * MIN_LOG_DECAY = -80: exp(80) is a float32


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, log_w: Tensor, a: Tensor | None = None, b: Tensor | None = None
) -> Tensor:
    """Return o (R, L, V) token by token.

    Args:
        q, k: (R, L, K); v: (R, L, V).
        log_w: log decays (R, L, K) or (R, L, 1), between MIN_LOG_DECAY and 0.
        a, b: the rank-one removal (R, L, K); both or neither.
    """
    state = v.new_zeros(v.shape[0], v.shape[2], k.shape[2])
    out = []
    for t in range(k.shape[1]):
        old = state
        state = old * log_w[:, t, None].exp()
        if a is not None and b is not None:
            removed = (old * a[:, t, None]).sum(-1)
            state = state - removed[..., None] * b[:, t, None]
        state = state + v[:, t, :, None] * k[:, t, None]
        out.append((state * q[:, t, None]).sum(-1))
    return torch.stack(out, dim=1)


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_w: Tensor,
    a: Tensor | None = None,
    b: Tensor | None = None,
    chunk: int = CHUNK,
) -> Tensor:
    """Return the same as `recurrence` by matrix products over chunks of `chunk` tokens."""
    rows, length, _ = k.shape
    if not rows * length:
        return torch.zeros_like(v)
    count = -(-length // chunk)

    def cut(x: Tensor) -> Tensor:  # (R, L, *) -> (R, count, chunk, *); zeros pad the end
        return pad(x, (0, 0, 0, count * chunk - length)).view(rows, count, chunk, -1)

    q, k, v, log_w = cut(q), cut(k), cut(v), cut(log_w)
    total = log_w.cumsum(2)
    grow, shrink = (-total).exp(), total.exp()
    k_in, q_in = k * grow, q * shrink
    lower = torch.ones(chunk, chunk, dtype=torch.bool).tril()
    from_v = (q_in @ k_in.mT).masked_fill(~lower, 0)
    last = shrink[:, :, -1, None]  # (R, count, 1, K)
    k_end = k_in * last  # what a token leaves in the state after its chunk
    if a is None or b is None:
        inner = from_v @ v
        added = v.mT @ k_end  # (R, count, V, K)
    else:
        # a is multiplied by the decays before its token, b divided by those up to it.
        a_in, b_in = cut(a) * (total - log_w).exp(), cut(b) * grow
        strict = lower.tril(-1)
        t = (a_in @ b_in.mT).masked_fill(~strict, 0)
        mixed = (a_in @ k_in.mT).masked_fill(~strict, 0)
        # [u from the old state | u from the chunk's own values], by one triangular solve.
        right = torch.cat([a_in, mixed @ v], dim=-1)
        solved = torch.linalg.solve_triangular(
            t + torch.eye(chunk, dtype=t.dtype), right, upper=False, unitriangular=True
        )
        u_state, u_own = solved.split([k.shape[-1], v.shape[-1]], dim=-1)
        from_u = (q_in @ b_in.mT).masked_fill(~lower, 0)
        inner = from_v @ v - from_u @ u_own
        q_in = q_in - from_u @ u_state
        b_end = b_in * last
        added = v.mT @ k_end - u_own.mT @ b_end
        carried = u_state.mT @ b_end  # (R, count, K, K)
    # unbind, not indexing: its backward is one stack instead of a zero-filled copy a chunk
    carries = [None] * count if a is None or b is None else carried.unbind(1)
    state = v.new_zeros(rows, v.shape[-1], k.shape[-1])
    out = []
    steps = zip(
        inner.unbind(1), q_in.unbind(1), last.unbind(1), added.unbind(1), carries, strict=True
    )
    for inner_c, q_c, last_c, added_c, carried_c in steps:
        out.append(inner_c + q_c @ state.mT)
        kept = state * last_c
        if carried_c is not None:
            kept = kept - state @ carried_c
        state = kept + added_c
    return torch.cat(out, dim=1)[:, :length]


def _require_fitting(
    q: Tensor, k: Tensor, v: Tensor, log_w: Tensor | None, *removal: Tensor | None
) -> None:
    keys = [t.shape for t in (q, *removal) if t is not None]
    decays = (k.shape, (*k.shape[:2], 1))
    if (
        any(shape != k.shape for shape in keys)
        or v.shape[:2] != k.shape[:2]
        or (log_w is not None and log_w.shape not in decays)
    ):
        given = [tuple(t.shape) for t in (q, k, v, log_w, *removal) if t is not None]
        raise ValueError(f"rank-one scan: q, k, v and the rest, {given}, do not fit together")


def scan(
    q: Tensor, k: Tensor, v: Tensor, log_w: Tensor, a: Tensor | None = None, b: Tensor | None = None
) -> Tensor:
    """Return the same as `recurrence` by the fastest form there is here.

    Raises:
        ValueError: shapes that do not fit together, or one of a and b without the other.
    """
    if (a is None) != (b is None):
        raise ValueError("scan: give both a and b or neither")
    _require_fitting(q, k, v, log_w, a, b)
    library = backend.native_for(q, k, v, log_w, a, b)
    if library is None or not native.takes(library, k):
        return chunked(q, k, v, log_w, a, b)
    return native.RankOne.apply(library, q, k, v, log_w, a, b, None)


def delta_scan(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_w: Tensor | None = None
) -> Tensor:
    """Return (gated) DeltaNet's o: the recurrence with a = beta w k, b = k, values beta v.

    Args:
        q, k: (R, L, K); v: (R, L, V); beta: (R, L, 1).
        log_w: log decays (R, L, K) or (R, L, 1), applied before the delta; None for none.

    Raises:
        ValueError: shapes that do not fit together.
    """
    _require_fitting(q, k, v, log_w)
    if beta.shape != (*k.shape[:2], 1):
        raise ValueError(f"beta {tuple(beta.shape)} is not one number per key of {tuple(k.shape)}")
    library = backend.native_for(q, k, v, beta, log_w)
    if library is None or not native.takes(library, k):
        log_w = torch.zeros_like(beta) if log_w is None else log_w
        return chunked(q, k, beta * v, log_w, beta * k * log_w.exp(), k)
    return native.RankOne.apply(library, q, k, v, log_w, None, None, beta)
