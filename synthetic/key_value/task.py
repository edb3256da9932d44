"""The perturbed dictionary: retrieve values from the context that memory almost knows.

A static dictionary holds pairs of a key and a value, each of m symbols.  A sequence shows n
of its pairs with every value symbol replaced by another with probability eps, then asks for
some of them:

    k1:v1,k2:v2,...,kn:vn|k5:v5,k1:v1,...      (m = 2:  ab:cd,ef:gh,ij:kl|ef:gh)

Answers are the values as the context shows them, so knowing the dictionary by heart is right
with probability (1 - eps)^m only.  Best-first asks for the first max(1, ceil(q n)) keys,
best-last for the last ones, in random order.

Shape suffix: B sequences, N pairs at most, m symbols.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import torch
from torch import Tensor

from synthetic.sequences import Batch

Order = Literal["best_first", "best_last"]


@dataclasses.dataclass(frozen=True)
class Task:
    """Sizes of the task (paper: 10,000 pairs, m = 8, 64 symbols, N = 512, eps = q = 0.1).

    Attributes:
        symbols: alphabet of keys and values; `:`, `,` and `|` are three more tokens.
        entries: pairs of the dictionary; their keys differ.
        length: m.
        pairs: N, the most pairs of a training sequence.
        noise: eps.  A perturbed symbol is drawn from the other symbols.
        query_ratio: q.
    """

    symbols: int
    entries: int
    length: int
    pairs: int
    noise: float
    query_ratio: float
    order: Order

    def __post_init__(self) -> None:
        if self.entries > self.symbols**self.length:
            raise ValueError(
                f"{self.symbols} symbols make fewer than {self.entries} keys of {self.length}"
            )
        if self.pairs > self.entries:
            raise ValueError(f"{self.pairs} pairs are more than the {self.entries} entries")

    @property
    def vocab(self) -> int:
        return self.symbols + 3

    @property
    def colon(self) -> int:
        return self.symbols

    @property
    def comma(self) -> int:
        return self.symbols + 1

    @property
    def bar(self) -> int:
        return self.symbols + 2

    def queries(self, n: int) -> int:
        """Return how many of n keys are asked for."""
        return max(1, math.ceil(self.query_ratio * n))

    def tokens(self, n: int) -> int:
        """Return the length in tokens of a sequence of n pairs with its answers."""
        return (n + self.queries(n)) * (2 * self.length + 2) - 1

    def memory_accuracy(self) -> float:
        """Return the accuracy of answering from the dictionary alone, (1 - eps)^m."""
        return (1 - self.noise) ** self.length


def dictionary(task: Task, seed: int) -> Tensor:
    """Return (entries, 2 m) symbols, [key | value], no two keys alike."""
    g = torch.Generator().manual_seed(424_243 + seed)
    keys = torch.empty(0, task.length, dtype=torch.long)
    while len(keys) < task.entries:
        more = torch.randint(task.symbols, (task.entries, task.length), generator=g)
        every = torch.cat([keys, more])
        _, first = torch.unique(every, dim=0, return_inverse=True)
        # The first occurrence of each key, in the order in which they were drawn.
        seen = torch.full((int(first.max()) + 1,), len(every))
        seen.scatter_reduce_(0, first, torch.arange(len(every)), "amin")
        keys = every[seen.sort().values][: task.entries]
    values = torch.randint(task.symbols, (task.entries, task.length), generator=g)
    return torch.cat([keys, values], dim=1)


def sample(
    task: Task,
    entries: Tensor,
    count: int,
    g: torch.Generator,
    *,
    pairs: int | None = None,
    queries: int | None = None,
) -> Batch:
    """Return fresh sequences.

    Args:
        entries: the dictionary.
        pairs: n of every sequence; without it n ~ U[1, N] for each.
        queries: keys asked for in every sequence; without it the task's share of n.
    """
    most = pairs or task.pairs
    if most > task.entries:
        raise ValueError(f"{most} pairs are more than the {task.entries} entries")
    m, width = task.length, 2 * task.length + 2
    n = torch.full((count,), most)
    if pairs is None:
        n = torch.randint(1, most + 1, (count,), generator=g)
    asked = (task.query_ratio * n.double()).ceil().long().clamp(min=1)  # (B,)
    if queries is not None:
        asked = n.clamp(max=queries)
    chosen = torch.rand(count, task.entries, generator=g).topk(most, dim=1).indices
    shown = entries[chosen]  # (B, N, 2 m)
    noisy = torch.rand(count, most, m, generator=g) < task.noise
    shift = torch.randint(1, task.symbols, (count, most, m), generator=g) * noisy
    value = (shown[..., m:] + shift) % task.symbols
    full = torch.full((count, most, 1), task.colon)
    block = torch.cat([shown[..., :m], full, value, full + 1], dim=2)  # [k : v ,]

    slots = most + int(asked.max())
    slot = torch.arange(slots)[None]
    shuffled = torch.rand(count, slots, generator=g)
    rank = slot - n[:, None]
    query = (rank >= 0) & (rank < asked[:, None])
    # A random order of 0..asked-1 in the query slots, where it is moved to the asked keys.
    place = shuffled.masked_fill(~query, 2.0).argsort(1).argsort(1)
    if task.order == "best_last":
        place = place + (n - asked)[:, None]
    source = torch.where(query, place, slot).clamp(max=most - 1)
    tokens = block.gather(1, source[..., None].expand(-1, -1, width))
    tokens[:, :, -1].masked_fill_(slot == n[:, None] - 1, task.bar)
    valid = (slot < (n + asked)[:, None])[..., None].repeat(1, 1, width)
    valid[:, :, -1] &= slot != (n + asked)[:, None] - 1  # no comma at the end
    answer = query[..., None].repeat(1, 1, width)
    answer[:, :, : m + 1] = False
    answer[:, :, -1] = False
    length = int((n + asked).max()) * width - 1
    return Batch(
        tokens.flatten(1)[:, :length],
        valid.flatten(1)[:, :length],
        answer.flatten(1)[:, :length],
        m,
    )


def parse(task: Task, tokens: list[int]) -> tuple[list[tuple], list[tuple]]:
    """Read a sequence back into its context and its queries, lists of (key, value).

    Raises:
        ValueError: the tokens do not have the task's form.
    """

    def pairs(part: list[int]) -> list[tuple]:
        found = []
        for i in range(0, len(part), 2 * m + 2):
            one = part[i : i + 2 * m + 2]
            if (
                len(one) < 2 * m + 1
                or one[m] != task.colon
                or one[2 * m + 1 :]
                not in (
                    [],
                    [task.comma],
                )
            ):
                raise ValueError(f"not a pair: {one}")
            found.append((tuple(one[:m]), tuple(one[m + 1 : 2 * m + 1])))
        return found

    m = task.length
    at = tokens.index(task.bar)
    return pairs(tokens[:at]), pairs(tokens[at + 1 :])
