"""The harness that every cell shares: embedding, positions, merge of directions, MLP, readout.

    u = E x + position;  per layer  u += merge(cell(LN u), reversed cell(reversed LN u))
                                    u += MLP(LN u)
    logits = E LN u   (tied), at the asked positions only

Bidirectional models run the cell in both directions with separate weights and merge by a
linear layer that starts as their mean; causal models run it forwards only.  Settings are the
authors': d 32, learned absolute positions, SiLU MLP of 4 d.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn.functional import silu

from gatewright.kernels.native.recall_cell import Layout
from synthetic import ensemble
from synthetic.ensemble import Parameters
from synthetic.recall import cells, fused
from synthetic.recall.cells import Cell
from synthetic.recall.fused import Linear, at


@dataclasses.dataclass(frozen=True)
class Size:
    """A model's sizes.

    Attributes:
        vocab: token ids, the mask included.
        length: longest sequence (positions are learned).
        bidirectional: a masked denoiser in both directions; otherwise causal.
    """

    cell: Cell
    vocab: int
    length: int
    layers: int = 1
    bidirectional: bool = True

    @property
    def directions(self) -> tuple[str, ...]:
        # Attention without a causal mask sees both sides by itself.
        both = self.bidirectional and self.cell.name != "attention"
        return ("forward", "backward") if both else ("forward",)


def initial(size: Size, seeds: list[int]) -> Parameters:
    """Return fresh parameters of every member."""
    g, d = ensemble.generators(seeds, stream=0), size.cell.width
    members = len(seeds)
    p = {
        "embedding": ensemble.normal(g, d**-0.5, size.vocab, d),
        "positions": ensemble.normal(g, d**-0.5, size.length, d),
        "norm.weight": torch.ones(members, d),
        "norm.bias": torch.zeros(members, d),
    }
    for i in range(size.layers):
        for direction in size.directions:
            part = cells.initial(size.cell, g)
            p |= {f"{i}.{direction}.{k}": v for k, v in part.items()}
        if len(size.directions) == 2:
            half = 0.5 * torch.eye(d)
            p[f"{i}.merge"] = torch.cat([half, half], dim=1).repeat(members, 1, 1)
        p |= {
            f"{i}.norm1.weight": torch.ones(members, d),
            f"{i}.norm1.bias": torch.zeros(members, d),
            f"{i}.norm2.weight": torch.ones(members, d),
            f"{i}.norm2.bias": torch.zeros(members, d),
            f"{i}.up": ensemble.uniform(g, d**-0.5, 4 * d, d),
            f"{i}.up_bias": torch.zeros(members, 4 * d),
            f"{i}.down": ensemble.uniform(g, (4 * d) ** -0.5, d, 4 * d),
            f"{i}.down_bias": torch.zeros(members, d),
        }
    return p


def parameter_count(size: Size) -> int:
    """Return the number of parameters of one member."""
    return sum(v[0].numel() for v in initial(size, [0]).values())


def _part(p: Parameters, prefix: str) -> Parameters:
    return {k[len(prefix) :]: v for k, v in p.items() if k.startswith(prefix)}


def _mix(p: Parameters, size: Size, i: int, u: Tensor, read: Tensor | None) -> Tensor:
    """Return the merged cell outputs of layer i; with `read` (E, B, Q) at these tokens only."""
    norm = p[f"{i}.norm1.weight"], p[f"{i}.norm1.bias"]
    parts = [_part(p, f"{i}.{direction}.") for direction in size.directions]
    merge = p.get(f"{i}.merge")
    layout = kernel_layout(size.cell)
    library = None if layout is None else fused.library_for(layout, u)
    if library is not None and layout is not None:
        return fused.mix(library, layout, parts, merge, norm, u, read)
    outs = [_plain(size, q, norm, u, read, reverse=n == 1) for n, q in enumerate(parts)]
    return outs[0] if merge is None else ensemble.linear(torch.cat(outs, -1), merge)


def kernel_layout(cell: Cell) -> Layout | None:
    """Return how the C++ kernel sees the cell; None for what it is not made for."""
    if cell.name == "attention" or not cell.fast:
        return None
    return fused.layout_of(cell.name, cell.width, cell.mamba_heads, cells.MAMBA_STATE)


def _plain(
    size: Size, p: Parameters, norm: Linear, u: Tensor, read: Tensor | None, reverse: bool
) -> Tensor:
    x = ensemble.layer_norm(u, *norm)
    if reverse:
        x = x.flip(2)
        read = None if read is None else u.shape[2] - 1 - read
    if read is not None and size.cell.name != "attention":
        x = x[:, :, : int(read.max()) + 1]  # no later token reaches an asked one
    y = cells.forward(size.cell, p, x, causal=not size.bidirectional, read=read)
    return y.flip(2) if reverse and read is None else y


def _mlp(p: Parameters, size: Size, i: int, u: Tensor) -> Tensor:
    norm = p[f"{i}.norm2.weight"], p[f"{i}.norm2.bias"]
    up, down = ((p[f"{i}.{n}"], p[f"{i}.{n}_bias"]) for n in ("up", "down"))
    library = fused.library_for(None, u) if size.cell.fast else None
    if library is not None:
        return fused.mlp(library, norm, u, up, down)
    h = silu(ensemble.linear(ensemble.layer_norm(u, *norm), *up))
    return u + ensemble.linear(h, *down)


def logits(p: Parameters, size: Size, tokens: Tensor, positions: Tensor) -> Tensor:
    """Return logits (E, B, Q, vocab) at `positions` (E, B, Q) of `tokens` (E, B, L)."""
    u = ensemble.embedding(p["embedding"], tokens)
    u = u + p["positions"][:, None, : tokens.shape[2]]
    for i in range(size.layers):
        # nothing after the last layer's cell mixes positions: only the asked ones go on
        read = positions if i == size.layers - 1 else None
        u = at(u, read) + _mix(p, size, i, u, read)
        u = _mlp(p, size, i, u)
    u = ensemble.layer_norm(u, p["norm.weight"], p["norm.bias"])
    return ensemble.linear(u, p["embedding"])
