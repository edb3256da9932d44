"""Several layers and several heads of the linear Mamba (theorems 4.6 and 4.7).

Layers: `u <- u + P_out y(u)`, the loss on `E u` at the queries.  Heads: with M heads of
2D/M channels each,

    mha  every head has its own values, keys and queries
    mva  own values, shared keys and queries (Mamba's own pattern)
    mqa  own queries, shared values and keys
    mka  own keys, shared values and queries

A shared value is the first 2D/M channels, read by every head.  One head is `single`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import torch
from torch import Tensor

from synthetic import ensemble
from synthetic.capacity import training
from synthetic.capacity.linear_mamba import EMBEDDING_STD, EXPAND, OPTIMIZER
from synthetic.capacity.tasks import Batch, Task
from synthetic.ensemble import Parameters

Pattern = Literal["single", "mha", "mva", "mqa", "mka"]


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes shared by all members of a run (they differ in seed only)."""

    vocab: int
    d: int
    n: int
    layers: int = 1
    pattern: Pattern = "single"
    heads: int = 1

    def __post_init__(self) -> None:
        if (EXPAND * self.d) % self.heads:
            raise ValueError(f"--heads {self.heads} does not divide {EXPAND * self.d} channels")
        if self.pattern == "single" and self.heads != 1:
            raise ValueError("pattern single has one head")

    @property
    def key_heads(self) -> int:
        return self.heads if self.pattern in ("mha", "mka") else 1

    @property
    def query_heads(self) -> int:
        return self.heads if self.pattern in ("mha", "mqa") else 1

    @property
    def shares_value(self) -> bool:
        return self.pattern in ("mqa", "mka")


def initial(size: Size, seeds: list[int]) -> Parameters:
    """Return fresh parameters of every member."""
    g = ensemble.generators(seeds, stream=0)
    inner = EXPAND * size.d
    p = {"embedding": ensemble.normal(g, EMBEDDING_STD, size.vocab, size.d)}
    for i in range(size.layers):
        p[f"in_proj.{i}"] = ensemble.uniform(g, size.d**-0.5, inner, size.d)
        p[f"conv.{i}"] = ensemble.uniform(g, 2**-0.5, inner, 2)
        p[f"b_proj.{i}"] = ensemble.uniform(g, inner**-0.5, size.key_heads * size.n, inner)
        p[f"c_proj.{i}"] = ensemble.uniform(g, inner**-0.5, size.query_heads * size.n, inner)
        p[f"out_proj.{i}"] = ensemble.uniform(g, inner**-0.5, size.d, inner)
    return p


def _heads(x: Tensor, heads: int) -> Tensor:
    """Split (E, B, T, heads * n) into (E, B, heads, T, n)."""
    return x.unflatten(-1, (heads, -1)).transpose(2, 3)


def _mix(p: Parameters, size: Size, i: int, u: Tensor, rows: Tensor | None = None) -> Tensor:
    """Return layer i's output for inputs u (E, B, L, D), at `rows` (E, B, R) if given.

    z, B and C are linear in two successive inputs, so the maps before them are multiplied once:
    `wide` is z's from [previous | current], (E, 2D, 2D).
    """
    projections = (p[f"in_proj.{i}"] * p[f"conv.{i}"][..., tap : tap + 1] for tap in (0, 1))
    wide = torch.cat(list(projections), dim=2)
    inner = wide.shape[1]
    value = wide[:, : inner // size.heads] if size.shares_value else wide
    if size.heads == 1:  # P_out comes first: D is half of z
        value = torch.bmm(p[f"out_proj.{i}"], value)
    write = torch.cat([value, torch.bmm(p[f"b_proj.{i}"], wide)], dim=1)

    both = torch.cat([torch.nn.functional.pad(u[:, :, :-1], (0, 0, 1, 0)), u], dim=-1)
    asking = both
    times = torch.arange(u.shape[2])
    past = times <= times[:, None]  # (L, L)
    if rows is not None:
        asking = both.gather(2, rows[..., None].expand(-1, -1, -1, both.shape[-1]))
        past = (times <= rows[..., None])[:, :, None]  # (E, B, 1, R, L)
    x, b = ensemble.linear(both, write).split([value.shape[1], len(write[0]) - value.shape[1]], -1)
    c = _heads(ensemble.linear(asking, torch.bmm(p[f"c_proj.{i}"], wide)), size.query_heads)
    weights = (c @ _heads(b, size.key_heads).transpose(-1, -2)) * past
    own_values = 1 if size.shares_value or size.heads == 1 else size.heads
    y = (weights @ _heads(x, own_values)).transpose(2, 3).flatten(3)
    return y if size.heads == 1 else ensemble.linear(y, p[f"out_proj.{i}"])


def readout(size: Size, p: Parameters, batch: Batch) -> Tensor:
    """Return what the last layer's stream holds at the queries (E, B, Q, D)."""
    u = ensemble.embedding(p["embedding"], batch.tokens)
    for i in range(size.layers - 1):
        u = u + _mix(p, size, i, u)
    last = _mix(p, size, size.layers - 1, u, batch.positions)
    if size.layers > 1:
        last = last + u.gather(2, batch.positions[..., None].expand(*last.shape))
    return last


def logits(p: Parameters, size: Size, batch: Batch) -> Tensor:
    """Return the queries' logits (E, B, Q, V)."""
    return ensemble.linear(readout(size, p, batch), p["embedding"])


def train(size: Size, seeds: list[int], task: Task, steps: int, desc: str) -> Parameters:
    """Train one member per seed and return their parameters."""
    read = functools.partial(readout, size)
    return training.train(initial(size, seeds), read, seeds, task, steps, OPTIMIZER, desc)


def accuracy(p: Parameters, size: Size, task: Task, sequences: int) -> list[float]:
    """Return each member's accuracy over the same fresh sequences."""
    return training.accuracy(p, functools.partial(readout, size), task, sequences)
