"""Rotary position embedding, on the joint query, key and value projection of a Transformer."""

from __future__ import annotations

import torch
from torch import Tensor

from gatewright.kernels import backend
from gatewright.kernels.native import rotary as native


def rotary_qkv(
    mixed: Tensor, cos: Tensor, sin: Tensor, groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a joint projection by head and rotate its queries and keys (RoFormer, section 3.4).

    Channels i and p/2 + i of a head turn by the token's i-th angle.

    Args:
        mixed: (l, b, g (r + 2) p): per group of heads r queries, a key and a value.
        cos, sin: (l, p / 2) of each token's angles, without gradients.
        groups: g, the number of key/value heads.

    Returns:
        q (b, g r, l, p), k and v (b, g, l, p), as attention reads them.

    Raises:
        ValueError: shapes that do not fit together.
    """
    l, b, width = mixed.shape
    p = 2 * cos.shape[1]
    if (
        cos.shape != sin.shape
        or cos.shape[0] != l
        or width % (groups * p)
        or width < 3 * groups * p
    ):
        raise ValueError(
            f"rotary_qkv: mixed {tuple(mixed.shape)}, cos {tuple(cos.shape)}, sin "
            f"{tuple(sin.shape)} and {groups} groups do not fit together"
        )
    library = backend.native_for(mixed)
    if library is not None and mixed.dtype != torch.float16:
        tables = (t.float().contiguous() for t in (cos, sin))
        return native.Rotary.apply(library, mixed, *tables, groups)
    r = width // (groups * p) - 2
    heads = mixed.view(l, b, groups, r + 2, p)
    q, k, v = heads.split([r, 1, 1], dim=3)
    q, k, v = (t.flatten(2, 3).permute(1, 2, 0, 3) for t in (q, k, v))
    return _turned(q, cos, sin), _turned(k, cos, sin), v


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    acc = torch.float64 if x.dtype == torch.float64 else torch.float32
    first, second = x.to(acc).chunk(2, dim=-1)
    cos, sin = cos.to(acc), sin.to(acc)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x.dtype)


def rotary_reference(
    mixed: Tensor, cos: Tensor, sin: Tensor, groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The same one head and one pair of channels at a time, as complex numbers."""
    l, b, width = mixed.shape
    half = cos.shape[1]
    heads = mixed.view(l, b, groups, width // (groups * 2 * half), 2 * half)
    out: dict[str, list[Tensor]] = {"q": [], "k": [], "v": []}
    turn = torch.complex(cos, sin)[:, None]
    for g in range(groups):
        for j in range(heads.shape[3]):
            head = heads[:, :, g, j]
            kind = "v" if j == heads.shape[3] - 1 else "k" if j == heads.shape[3] - 2 else "q"
            if kind != "v":
                turned = torch.complex(head[..., :half], head[..., half:]) * turn
                head = torch.cat([turned.real, turned.imag], dim=-1)
            out[kind].append(head.transpose(0, 1))
    q, k, v = (torch.stack(parts, dim=1) for parts in out.values())
    return q, k, v
