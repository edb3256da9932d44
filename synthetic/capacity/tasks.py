"""Associative recall (AR) and its multi-query form (MQAR).

Tokens 0 .. V/2-1 are keys, V/2 .. V-1 are values.  A sequence starts with the facts,

    k1 v1 k2 v2 ... kF vF

distinct keys, distinct values, all drawn afresh.  AR ends with one query, one of the keys.
In MQAR every key is queried once, in random order.  Queries stand at every other place (with
room to spare, at random ones of these), the rest are random tokens of the whole vocabulary:

    k1 v1 ... kF vF  k3 u k1 u k7 u ...          u: random tokens

This is the layout of Zoology's MQAR at its usual length 4 F, and what the paper's theorem 4.2
counts: a query is followed by a value half of the time, so that on average `F/2 + t/4`
(key, value) pairs have been written before place t.

The answer at a query is the key's value; nothing else is scored.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

Name = Literal["ar", "mqar"]


@dataclasses.dataclass(frozen=True)
class Task:
    """One task's sizes.

    Attributes:
        name: `ar` or `mqar`.
        vocab: V, even: half keys, half values.
        facts: key-value pairs in the context.
        length: tokens in a sequence; for AR always 2 facts + 1.
    """

    name: Name
    vocab: int
    facts: int
    length: int

    def __post_init__(self) -> None:
        if self.vocab % 2 or self.facts < 1 or self.facts > self.vocab // 2:
            raise ValueError(
                f"a vocabulary of {self.vocab} must be even and hold {self.facts} facts' distinct "
                "keys in one half"
            )
        need = 2 * self.facts + (1 if self.name == "ar" else 2 * self.facts)
        if self.length < need:
            raise ValueError(f"length {self.length} is too short: facts and queries take {need}")
        if self.name == "ar" and self.length != need:
            raise ValueError(f"AR ends with its one query: the length must be {need}")

    @property
    def queries(self) -> int:
        return 1 if self.name == "ar" else self.facts


def make(name: Name, vocab: int, facts: int, length: int | None = None) -> Task:
    """Return a task; the length defaults to the paper's (4 facts for MQAR)."""
    default = 2 * facts + 1 if name == "ar" else 4 * facts
    return Task(name, vocab, facts, default if length is None else length)


@dataclasses.dataclass
class Batch:
    """Sequences with their queries: tokens (B, L), positions and answers (B, Q)."""

    tokens: Tensor
    positions: Tensor
    answers: Tensor


def _distinct(batch: int, pool: int, count: int, g: torch.Generator) -> Tensor:
    return torch.rand(batch, pool, generator=g).topk(count, dim=1).indices


def sample(task: Task, batch: int, generator: torch.Generator) -> Batch:
    """Draw a batch of sequences."""
    half, facts = task.vocab // 2, task.facts
    keys = _distinct(batch, half, facts, generator)
    values = _distinct(batch, half, facts, generator) + half
    context = torch.stack([keys, values], dim=2).flatten(1)
    if task.name == "ar":
        which = torch.randint(facts, (batch, 1), generator=generator)
        tokens = torch.cat([context, keys.gather(1, which)], dim=1)
        return Batch(tokens, torch.full((batch, 1), 2 * facts), values.gather(1, which))
    rest = task.length - 2 * facts
    slots = 2 * _distinct(batch, rest // 2, facts, generator)  # in random order: i queries key i
    tail = torch.randint(task.vocab, (batch, rest), generator=generator)
    tail.scatter_(1, slots, keys)
    return Batch(torch.cat([context, tail], dim=1), slots + 2 * facts, values)


class Stream:
    """An endless stream of one member's batches, drawn in larger chunks to save overhead."""

    def __init__(self, task: Task, batch: int, generator: torch.Generator, chunk: int = 16) -> None:
        self.task, self.batch, self.chunk = task, batch, chunk
        self.generator = generator
        self._left: list[Batch] = []

    def next(self) -> Batch:
        if not self._left:
            b = sample(self.task, self.batch * self.chunk, self.generator)
            parts = zip(
                b.tokens.split(self.batch),
                b.positions.split(self.batch),
                b.answers.split(self.batch),
                strict=True,
            )
            self._left = [Batch(*p) for p in parts][::-1]
        return self._left.pop()


def stack(batches: list[Batch]) -> Batch:
    """Stack one batch per member: every field gains the leading member axis."""
    return Batch(
        torch.stack([b.tokens for b in batches]),
        torch.stack([b.positions for b in batches]),
        torch.stack([b.answers for b in batches]),
    )
