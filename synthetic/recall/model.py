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

from synthetic import ensemble
from synthetic.ensemble import Parameters
from synthetic.recall import cells
from synthetic.recall.cells import Cell


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


def _mix(p: Parameters, size: Size, i: int, u: Tensor) -> Tensor:
    h = ensemble.layer_norm(u, p[f"{i}.norm1.weight"], p[f"{i}.norm1.bias"])
    outs = []
    for direction in size.directions:
        back = direction == "backward"
        x = h.flip(2) if back else h
        y = cells.forward(
            size.cell, _part(p, f"{i}.{direction}."), x, causal=not size.bidirectional
        )
        outs.append(y.flip(2) if back else y)
    return outs[0] if len(outs) == 1 else ensemble.linear(torch.cat(outs, -1), p[f"{i}.merge"])


def logits(p: Parameters, size: Size, tokens: Tensor, positions: Tensor) -> Tensor:
    """Return logits (E, B, Q, vocab) at `positions` (E, B, Q) of `tokens` (E, B, L)."""
    u = ensemble.embedding(p["embedding"], tokens)
    u = u + p["positions"][:, None, : tokens.shape[2]]
    for i in range(size.layers):
        u = u + _mix(p, size, i, u)
        if i == size.layers - 1:  # nothing after this mixes positions: keep the asked ones
            u = u.gather(2, positions[..., None].expand(-1, -1, -1, u.shape[-1]))
        h = ensemble.layer_norm(u, p[f"{i}.norm2.weight"], p[f"{i}.norm2.bias"])
        h = silu(ensemble.linear(h, p[f"{i}.up"], p[f"{i}.up_bias"]))
        u = u + ensemble.linear(h, p[f"{i}.down"], p[f"{i}.down_bias"])
    u = ensemble.layer_norm(u, p["norm.weight"], p["norm.bias"])
    return ensemble.linear(u, p["embedding"])
