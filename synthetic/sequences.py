"""Batches of token sequences with answers, and a split into train and test by content.

A sequence belongs to the test half of its task's space if a fixed hash of its tokens says so
(one in eight), and to the training half otherwise.  So no test sequence is ever trained on,
whatever the seeds, the sizes and the number of steps.

Shape suffix: B sequences, L tokens of the longest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

TEST_ONE_IN = 8


@dataclasses.dataclass(frozen=True)
class Batch:
    """Sequences of unequal length, padded on the right.

    Attributes:
        tokens: (B, L) int64; what stands beyond a sequence's end means nothing.
        valid: (B, L) bool, the tokens that belong to the sequence.
        answer: (B, L) bool, the tokens to predict, each from the token before it; the answers
            of one sequence are groups of `group` tokens.
        group: tokens of one answer.
    """

    tokens: Tensor
    valid: Tensor
    answer: Tensor
    group: int

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, index: Tensor | slice) -> Batch:
        """Return some of the sequences, without the padding that they no longer need."""
        valid = self.valid[index]
        length = int(valid.sum(1).max()) if len(valid) else 0
        return Batch(
            self.tokens[index][:, :length],
            valid[:, :length],
            self.answer[index][:, :length],
            self.group,
        )

    def to(self, device: str) -> Batch:
        """Return the batch on a device."""
        return dataclasses.replace(
            self,
            tokens=self.tokens.to(device),
            valid=self.valid.to(device),
            answer=self.answer.to(device),
        )

    def targets(self) -> Tensor:
        """Return the tokens to predict, sequence after sequence, (answers * group,)."""
        return self.tokens[self.answer]


def concatenate(batches: list[Batch]) -> Batch:
    """Put batches under each other, padded to the longest."""
    length = max(b.tokens.shape[1] for b in batches)

    def wide(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (0, length - x.shape[1]))

    return Batch(
        torch.cat([wide(b.tokens) for b in batches]),
        torch.cat([wide(b.valid) for b in batches]),
        torch.cat([wide(b.answer) for b in batches]),
        batches[0].group,
    )


def in_test(batch: Batch) -> Tensor:
    """Return (B,) bool: which sequences belong to the test half, by a hash of their tokens."""
    length = batch.tokens.shape[1]
    # Two rounds of a multiplicative hash; int64 wraps around.  Positions have odd factors.
    position = torch.arange(1, length + 1, device=batch.tokens.device) * 2_654_435_761 | 1
    mixed = (batch.tokens + 1) * position
    mixed = (mixed ^ (mixed >> 29)) * 0x2545F4914F6CDD1D
    total = (mixed * batch.valid).sum(1)
    total = (total ^ (total >> 32)) * 0x2545F4914F6CDD1D
    return ((total >> 33) & 0x7FFFFFFF) % TEST_ONE_IN == 0


def draw(sample: Callable[[int], Batch], count: int, *, test: bool) -> Batch:
    """Draw `count` sequences of one half of the space.

    Args:
        sample: number of sequences -> fresh sequences of the whole space.

    Raises:
        ArithmeticError: the sampler gives hardly any sequence of that half.
    """
    share = 1 / TEST_ONE_IN if test else 1 - 1 / TEST_ONE_IN
    parts: list[Batch] = []
    missing = count
    for _ in range(50):
        batch = sample(int(missing / share * 1.1) + 8)
        batch = batch.rows((in_test(batch) == test).nonzero()[:missing, 0])
        parts.append(batch)
        missing -= len(batch)
        if not missing:
            return concatenate([p for p in parts if len(p)])
    raise ArithmeticError("the sampler gives hardly any sequence of this half of its space")
