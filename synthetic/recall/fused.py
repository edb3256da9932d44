"""The harness's parts on C++ kernels: a cell with its LayerNorm and projections, and the MLP.

They compute what `cells` and `model` spell out in PyTorch (a test compares every cell, its
gradients too) and exist where the kernels do, for float32 on CPU.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.nn.functional import silu

from gatewright.kernels.backend import native_for
from gatewright.kernels.native import recall_cell, small_mlp
from synthetic import ensemble
from synthetic.ensemble import Parameters

Linear = tuple[Tensor, Tensor]


def at(x: Tensor, read: Tensor | None) -> Tensor:
    """Return x (E, B, L, n) at the asked tokens `read` (E, B, Q); all of it for None."""
    return x if read is None else x.gather(2, read[..., None].expand(-1, -1, -1, x.shape[-1]))


def library_for(layout: recall_cell.Layout | None, x: Tensor) -> ctypes.CDLL | None:
    """Return the kernels if they take these inputs, and this cell if one is given."""
    library = native_for(x) if x.dtype == torch.float32 and x.numel() else None
    if library is None or (layout is not None and not recall_cell.takes(library, layout)):
        return None
    return library


def layout_of(name: str, width: int, heads: int, d_state: int) -> recall_cell.Layout:
    """Return the columns of a cell's projections as `cell` lays them out."""
    if name == "mamba2":  # [x | B | dt | C]; taps [x | B | C]
        inner = 2 * width
        return recall_cell.Layout(
            *(name, d_state, inner),
            q_at=inner + d_state + heads,
            k_at=inner,
            v_at=0,
            q_tap=inner + d_state,
            k_tap=inner,
            v_tap=0,
            gate_at=inner + d_state,
            gate_width=heads,
            heads=heads,
        )
    # [k | v | gates | q]; taps [q | k | v]
    gated = {"gated_deltanet": width, "gated_deltanet_scalar": 1}.get(name, 0)
    delta, diagonal = name.endswith("deltanet") or gated, name == "rwkv7_diagonal"
    gates = 1 + gated if delta else width if diagonal else 2 * width
    after = 2 * width
    return recall_cell.Layout(
        *("gated_deltanet" if gated else name, width, width),
        q_at=after + gates,
        k_at=0,
        v_at=width,
        q_tap=0,
        k_tap=width,
        v_tap=2 * width,
        beta_at=after,
        gate_at=after + 1 if delta else after,
        gate_width=gated if delta else width,
        rate_at=after + width,
    )


def _folded(
    weight: Tensor, bias: Tensor, norm_weight: Tensor, norm_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Return weight (E, o, i) and bias (E, o) with a LayerNorm's affine part before them."""
    bias = torch.baddbmm(bias[..., None], weight, norm_bias[..., None]).squeeze(-1)
    return weight * norm_weight[:, None], bias


def cell(
    library: ctypes.CDLL,
    layout: recall_cell.Layout,
    p: Parameters,
    norm: Linear,
    u: Tensor,
    *,
    read: Tensor | None,
    reverse: bool,
) -> Tensor:
    """Return `cells.forward` of LN(u) before its output projection: (E, B, Q, V).

    Args:
        reverse: the recurrence goes from the last token to the first.
        norm: weight and bias (E, d) of the LayerNorm.
        u: the residual stream (E, B, L, d).
        read: the asked tokens (E, B, Q), counted from the first in either direction.
    """
    mamba, key = layout.kind == "mamba2", layout.key_width
    if mamba:
        inner, mixed = layout.value_width, layout.mixed
        w = p["in_proj"]  # [x | B | C | z | dt]
        query, others = w[:, mixed - key : mixed], w[:, : mixed - key]
        gates, gate_biases = [w[:, mixed + inner :]], [p["dt_bias"]]
    else:
        query, others = p["qkv"][:, :key], p["qkv"][:, key:]
        names = [n for n in ("beta", "gate", "decay", "rate") if n in p]
        gates, gate_biases = [p[n] for n in names], [p[f"{n}_bias"] for n in names]
    weights = torch.cat([others, *gates, query], 1)
    none = u.new_zeros(len(u), layout.mixed)
    biases = torch.cat([none[:, key:], *gate_biases, none[:, :key]], 1)
    o = recall_cell.RecallCell.apply(
        *(library, layout, u, *_folded(weights, biases, *norm)),
        *(reverse, read, p.get("conv"), p.get("conv_bias"), p.get("removal")),
        *((p["A_log"].exp(), p["skip"]) if mamba else (None, None)),
    )
    if mamba or "out_gate" in p:
        gate = w[:, mixed : mixed + inner] if mamba else p["out_gate"]
        o = o * silu(ensemble.linear(ensemble.layer_norm(at(u, read), *norm), gate))
    return o


def mix(
    library: ctypes.CDLL,
    layout: recall_cell.Layout,
    directions: list[Parameters],
    merge: Tensor | None,
    norm: Linear,
    u: Tensor,
    read: Tensor | None,
) -> Tensor:
    """Return a layer's cells, projected and merged: one direction, or forwards and backwards.

    Two directions' output projections and their merge are one linear map.
    """
    outs = [
        cell(library, layout, p, norm, u, read=read, reverse=i == 1)
        for i, p in enumerate(directions)
    ]
    weights = [p["out_proj"] for p in directions]
    if merge is not None:
        parts = zip(merge.chunk(len(weights), dim=-1), weights, strict=True)
        weights = [part @ w for part, w in parts]
    return ensemble.linear(torch.cat(outs, -1), torch.cat(weights, -1))


def mlp(library: ctypes.CDLL, norm: Linear, u: Tensor, up: Linear, down: Linear) -> Tensor:
    """Return u + down SiLU(up LN(u)) for u (E, ..., d); `up` and `down` are (weight, bias)."""
    flat = u.flatten(1, -2)
    return small_mlp.SmallMlp.apply(library, flat, *_folded(*up, *norm), *down).view(u.shape)
