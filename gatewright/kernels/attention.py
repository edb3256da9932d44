"""Causal attention of a Transformer, without the matrix of scores."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from gatewright.kernels import backend
from gatewright.kernels.native import attention as native


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Return softmax(scale q k^T) v over each token's past and itself; see the reference.

    Args:
        q: (b, h, l, p). k, v: (b, g, l, p) with g dividing h: grouped queries share a key.
        scale: 1 / sqrt(p) when None.

    Returns:
        (b, h, l, p); on CPU it lies in memory as (l, b, h, p).

    Raises:
        ValueError: shapes that do not fit together.
    """
    b, h, l, p = q.shape
    g = k.shape[1]
    if k.shape != (b, g, l, p) or v.shape != k.shape or g < 1 or h % g:
        raise ValueError(
            f"causal_attention: q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} "
            "do not fit together"
        )
    same = q.dtype == k.dtype == v.dtype and q.dtype != torch.float16
    library = backend.native_for(q, k, v) if same and q.numel() else None
    if library is None:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=h != g
        )
    return native.Attention.apply(library, q, k, v, 1 / math.sqrt(p) if scale is None else scale)


def causal_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None
) -> Tensor:
    """The same with all scores, in the words of "Attention Is All You Need", section 3.2.1."""
    per_group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(per_group, dim=1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ v
