"""The four tasks, their honest floors and the rebinding control.

Ids: 0 pad, 63 (or the last) mask, keys 5 .. 5+K-1, values from 5+K up to the mask.  `[v]` is
masked in the input and scored.

MQAR, the authors' layout (`fixed`): keys in a fixed order at even places, ONE query, and 6
random tail tokens; neither random keys nor many queries, so that a model may bind values to
places instead of keys:

    k5 v k6 v ... k(5+K-1) v  q [v]  t t t t t t                      length 2K + 8

MQAR, the honest layout (`shuffled`): the table in random order, 8 queries of distinct keys:

    k17 v k5 v ...            q [v] q [v] ... q [v]                   length 2K + 16

Haystack: 4 pairs, a gap of distractor values, `dense` queries at the end (measured at the last
of them); a shorter gap leaves pads in front, so the query stays at the end:

    0 0 0  k v k v k v k v  x x x x x x x x  q [v]                    length L

Collision keys: the gap holds decoy pairs of the table's own keys with fresh values; the
first binding counts.  S5: the running product of random permutations, all products masked:

    g1 [g1] g2 [g2 g1] g3 [g3 g2 g1] ...                              length 2 depth
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Literal

import torch
from torch import Tensor

Name = Literal["mqar", "haystack", "collision", "s5"]
Layout = Literal["fixed", "shuffled"]
VOCAB, MASK, FIRST_KEY, TAIL, HONEST_QUERIES, HAYSTACK_PAIRS = 64, 63, 5, 6, 8, 4
S5_SIZE = 120


@dataclasses.dataclass
class Batch:
    """Sequences and what is asked of them: tokens (B, L), positions and answers (B, Q)."""

    tokens: Tensor
    positions: Tensor
    answers: Tensor


@dataclasses.dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        pairs: K, key-value pairs of the table (MQAR).
        layout: MQAR's, see the module's docstring.
        length: L of haystack and collision, or twice the depth of S5.
        dense: queries per training sequence (haystack, collision).
    """

    name: Name
    pairs: int = 32
    layout: Layout = "fixed"
    length: int = 64
    dense: int = 1

    def __post_init__(self) -> None:
        if self.name == "mqar" and not 1 <= self.pairs <= MASK - FIRST_KEY - 2:
            raise ValueError(f"--pairs lies between 1 and {MASK - FIRST_KEY - 2}, not {self.pairs}")
        if self.queries_after_gap:
            if not 1 <= self.dense <= HAYSTACK_PAIRS:
                raise ValueError(f"--dense lies between 1 and {HAYSTACK_PAIRS}, not {self.dense}")
            if self.max_gap < 0:
                raise ValueError(f"--length {self.length} is too short for table and queries")
        if self.name == "s5" and (self.length < 2 or self.length % 2):
            raise ValueError(f"--length of s5 is even and at least 2, not {self.length}")

    @property
    def table(self) -> int:
        return self.pairs if self.name == "mqar" else HAYSTACK_PAIRS

    @property
    def first_value(self) -> int:
        return FIRST_KEY + self.table

    @property
    def values(self) -> int:
        """How many different values there are."""
        return MASK - self.first_value

    @property
    def tokens(self) -> int:
        """Tokens in a sequence."""
        if self.name != "mqar":
            return self.length
        return 2 * self.pairs + (2 + TAIL if self.layout == "fixed" else 2 * self.queries)

    @property
    def queries(self) -> int:
        """Scored answers per sequence when training."""
        if self.name == "s5":
            return self.length // 2
        if self.name == "mqar":
            return 1 if self.layout == "fixed" else min(HONEST_QUERIES, self.pairs)
        return self.dense

    @property
    def queries_after_gap(self) -> bool:
        """Whether this is a haystack or collision: a gap, and `dense` queries at the end."""
        return self.name in ("haystack", "collision")

    @property
    def max_gap(self) -> int:
        """Tokens between table and queries when the gap is full."""
        return self.length - 2 * HAYSTACK_PAIRS - 2 * self.dense

    @property
    def vocab(self) -> int:
        return S5_SIZE + 1 if self.name == "s5" else VOCAB


def sample(
    task: Task, batch: int, g: torch.Generator, cap: int | None = None, rebind: bool = False
) -> Batch:
    """Draw a batch.

    Args:
        cap: haystack and collision: the gap is uniform in [0, cap]; None for the full gap.
        rebind: roll the table's values by one place, keep the answers: a model that really
            reads the bindings then answers the key's new value and is right only where that
            happens to equal the old one.
    """
    if task.name == "s5":
        if rebind:
            raise ValueError("S5 has no bindings to derange")
        return _s5(task, batch, g)
    if task.name == "mqar":
        return _mqar(task, batch, g, rebind)
    return _haystack(task, batch, g, cap, rebind)


def _table(task: Task, batch: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    keys = torch.arange(FIRST_KEY, FIRST_KEY + task.table).expand(batch, -1)
    if not (task.name == "mqar" and task.layout == "fixed"):
        order = torch.rand(batch, task.table, generator=g).argsort(1)
        keys = keys.gather(1, order)
    values = torch.randint(task.first_value, MASK, (batch, task.table), generator=g)
    return keys, values


def _interleave(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack([a, b], dim=2).flatten(1)


def _asked(keys: Tensor, values: Tensor, count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pick `count` distinct pairs to query; return queries with masks, and answers."""
    which = torch.rand(keys.shape, generator=g).topk(count, dim=1).indices
    queries = keys.gather(1, which)
    return _interleave(queries, torch.full_like(queries, MASK)), values.gather(1, which)


def _mqar(task: Task, batch: int, g: torch.Generator, rebind: bool) -> Batch:
    keys, values = _table(task, batch, g)
    questions, answers = _asked(keys, values, task.queries, g)
    shown = values.roll(1, dims=1) if rebind else values
    parts = [_interleave(keys, shown), questions]
    if task.layout == "fixed":
        parts.append(torch.randint(FIRST_KEY, MASK, (batch, TAIL), generator=g))
    where = 2 * task.pairs + 1 + 2 * torch.arange(task.queries)
    return Batch(torch.cat(parts, 1), where.expand(batch, -1), answers)


def _haystack(task: Task, batch: int, g: torch.Generator, cap: int | None, rebind: bool) -> Batch:
    keys, values = _table(task, batch, g)
    questions, answers = _asked(keys, values, task.dense, g)
    shown = values.roll(1, dims=1) if rebind else values
    full = task.max_gap
    if cap is None:
        gap = torch.full((batch,), full)
    else:
        gap = torch.randint(0, min(cap, full) + 1, (batch,), generator=g)
    if task.name == "collision":
        pairs = full // 2 + 1
        again = torch.randint(HAYSTACK_PAIRS, (batch, pairs), generator=g)
        fresh = torch.randint(task.first_value, MASK, (batch, pairs), generator=g)
        gap = gap // 2 * 2  # decoys come as whole pairs
        filler = _interleave(keys.gather(1, again), fresh)
    else:
        filler = torch.randint(task.first_value, MASK, (batch, full), generator=g)
    # Right-aligned: [pads | table | gap | questions]; place t reads source t - start.
    body = torch.cat([_interleave(keys, shown), filler], dim=1)
    used = 2 * HAYSTACK_PAIRS + gap
    room = full + 2 * HAYSTACK_PAIRS
    source = torch.arange(room) - (room - used)[:, None]
    content = body.gather(1, source.clamp_min(0).clamp_max(body.shape[1] - 1))
    content = content.masked_fill(source < 0, 0)
    where = room + 1 + 2 * torch.arange(task.dense)
    return Batch(torch.cat([content, questions], 1), where.expand(batch, -1), answers)


@functools.cache
def _s5_table() -> Tensor:
    """Return (120, 120): the index of `a` after `b` for all permutations of five things."""
    permutations = list(itertools.permutations(range(5)))
    index = {p: i for i, p in enumerate(permutations)}
    return torch.tensor(
        [[index[tuple(a[b[i]] for i in range(5))] for b in permutations] for a in permutations]
    )


def _s5(task: Task, batch: int, g: torch.Generator) -> Batch:
    depth = task.length // 2
    elements = torch.randint(S5_SIZE, (batch, depth), generator=g)
    products = [elements[:, 0]]
    for t in range(1, depth):
        products.append(_s5_table()[elements[:, t], products[-1]])
    answers = torch.stack(products, 1)
    tokens = _interleave(elements, torch.full_like(elements, S5_SIZE))
    return Batch(tokens, (1 + 2 * torch.arange(depth)).expand(batch, -1), answers)


def floors(task: Task, *, samples: int = 20_000, seed: int = 0) -> dict[str, float]:
    """Return what a model scores that binds nothing.

    MQAR, haystack, collision: `marginal` answers any one value; `table` answers a value of
    the table at random; `most_frequent` the table's most frequent value, which is the strongest
    of the three (collision's decoys are not counted: their values are noise, and the most
    frequent value over table and decoys scores less); computed by simulation with exact counting
    per sequence.  S5: the first product is given, the others are uniform.
    """
    if task.name == "s5":
        depth = task.length // 2
        return {"marginal": 1 / S5_SIZE, "floor": (1 + (depth - 1) / S5_SIZE) / depth}
    g = torch.Generator().manual_seed(seed)
    values = torch.randint(task.values, (samples, task.table), generator=g)
    counts = torch.zeros(samples, task.values).scatter_add_(
        1, values, torch.ones(samples, task.table)
    )
    share = counts / task.table
    found = {
        "marginal": 1 / task.values,
        "table": float(share.square().sum(1).mean()),
        "most_frequent": float(share.max(1).values.mean()),
    }
    return {**found, "floor": max(found.values())}
