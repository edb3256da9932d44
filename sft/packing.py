"""Several samples in one sequence: which go together, and the tensors that keep them apart.

    tokens        a a a a b b b c c . .
    segment       0 0 0 0 1 1 1 2 2 3 3     one number per sample; padding has its own
    position      0 1 2 3 0 1 2 0 1 0 1     starts again in every sample
    predicted at  . x x . . x . . . . .     where the next token carries loss and belongs
                                            to the same sample

A plan is a function of (lengths, context, seed, epoch) alone, so a resumed run packs as the
interrupted one did, and every rank knows the whole plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from gatewright.plackett_luce import generator
from sft.dataset import Samples

OPEN_PACKS = 64
"""Packs that are kept open for a sample that still fits."""


def plan(lengths: NDArray[np.int64], context_tokens: int, key: Sequence[object]) -> list[list[int]]:
    """Return one epoch's packs: lists of sample numbers whose lengths sum to the context at most.

    Samples come in a random order; each goes into the fullest open pack that has room.

    Args:
        lengths: tokens of each sample, none longer than the context.
        key: fixes the order (seed, epoch, ...).
    """
    random = generator("packing", *key)
    packs: list[list[int]] = []
    open_packs: list[list[int]] = []
    room = np.zeros(0, dtype=np.int64)
    for sample in random.permutation(len(lengths)):
        length = int(lengths[sample])
        fits = np.flatnonzero(room >= length)
        if len(fits):
            where = int(fits[np.argmin(room[fits])])
            open_packs[where].append(int(sample))
            room[where] -= length
            continue
        if len(open_packs) == OPEN_PACKS:
            full = int(np.argmin(room))
            packs.append(open_packs.pop(full))
            room = np.delete(room, full)
        open_packs.append([int(sample)])
        room = np.append(room, context_tokens - length)
    packs += open_packs
    return [packs[i] for i in random.permutation(len(packs))]


class PackStream:
    """An endless stream of packs over samples whose pools are small enough.

    Args:
        samples: the training split.
        context_tokens: tokens of one packed sequence.
        seed: fixes the order.

    Raises:
        ValueError: a sample is longer than the context.
    """

    def __init__(self, samples: Samples, context_tokens: int, seed: int) -> None:
        longest = int(samples.index["length"].max(initial=0))
        if longest > context_tokens:
            raise ValueError(f"a sample of {longest} tokens is longer than {context_tokens}")
        self._lengths = samples.index["length"].astype(np.int64)
        self._pool_sizes = samples.index["pool_size"]
        self.context_tokens = context_tokens
        self.seed = seed
        self.max_pool_size: int | None = None
        self._level = -1
        self._position = 0
        self._epoch = -1
        self._packs: list[list[int]] = []

    def limit(self, max_pool_size: int) -> int:
        """Use samples with pools of at most `max_pool_size`; return how many there are.

        Sizes are uniform in 1..k, so the ones that stay are uniform in 1..max_pool_size.  A
        new limit starts a new pass over the samples that it admits.
        """
        if max_pool_size != self.max_pool_size:
            self.max_pool_size = max_pool_size
            self._level += 1
            self._position = 0
            self._epoch = -1
        return int((self._pool_sizes <= max_pool_size).sum())

    def take(self, count: int) -> list[list[int]]:
        """Return the next packs; an epoch ends and the next begins without a gap."""
        return [self._next() for _ in range(count)]

    def _next(self) -> list[int]:
        if self._epoch < 0:
            self._begin(0)
        if self._position >= len(self._packs):
            self._begin(self._epoch + 1)
            self._position = 0
        self._position += 1
        return self._packs[self._position - 1]

    def _begin(self, epoch: int) -> None:
        allowed = np.flatnonzero(self._pool_sizes <= (self.max_pool_size or 0))
        if not len(allowed):
            raise ValueError(f"no sample has a pool of at most {self.max_pool_size} tools")
        key = (self.seed, self._level, epoch)
        packs = plan(self._lengths[allowed], self.context_tokens, key)
        self._packs = [[int(allowed[i]) for i in pack] for pack in packs]
        self._epoch = epoch

    def state(self) -> dict[str, int | None]:
        """Return what `restore` needs to go on with the very next pack."""
        return {
            "max_pool_size": self.max_pool_size,
            "level": self._level,
            "epoch": self._epoch,
            "position": self._position,
        }

    def restore(self, state: dict[str, int]) -> None:
        self.max_pool_size = state["max_pool_size"]
        self._level = state["level"]
        if state["epoch"] >= 0:
            self._begin(state["epoch"])
        self._epoch = state["epoch"]
        self._position = state["position"]


@dataclasses.dataclass
class Batch:
    """Packed sequences as tensors.

    Attributes:
        input_ids: (B, L) int64.
        segments: (B, L) int32, number of the sample within its row, rising from 0.
        position_ids: (B, L) int64, restarting at 0 in every sample.
        predict: (N,) int64, flat positions in (B*L) whose next token carries loss.
        labels: (N,) int64, that next token.
        boundaries: per row, the starts of its samples and the row's end.
    """

    input_ids: torch.Tensor
    segments: torch.Tensor
    position_ids: torch.Tensor
    predict: torch.Tensor
    labels: torch.Tensor
    boundaries: list[list[int]]

    def to(self, device: torch.device | str) -> Batch:
        moved = {
            f.name: value.to(device, non_blocking=True)
            for f in dataclasses.fields(self)
            if isinstance(value := getattr(self, f.name), torch.Tensor)
        }
        return dataclasses.replace(self, **moved)


def collate(
    samples: Samples, packs: Sequence[Sequence[int]], pad_id: int, multiple: int = 1
) -> Batch:
    """Return packs as one batch, padded to the longest row, rounded up to `multiple` tokens.

    The first token of a sample is never a target: nothing of its own sample precedes it.
    """
    rows = [[samples[i] for i in pack] for pack in packs]
    longest = max(sum(len(ids) for ids, _ in row) for row in rows)
    length = -(-longest // multiple) * multiple
    shape = (len(rows), length)
    input_ids = np.full(shape, pad_id, dtype=np.int64)
    target = np.zeros(shape, dtype=bool)
    segments = np.zeros(shape, dtype=np.int32)
    positions = np.zeros(shape, dtype=np.int64)
    boundaries = []
    for b, row in enumerate(rows):
        at = 0
        starts = []
        for n, (ids, mask) in enumerate(row):
            end = at + len(ids)
            input_ids[b, at:end] = ids
            target[b, at + 1 : end] = mask[1:] != 0
            segments[b, at:end] = n
            positions[b, at:end] = np.arange(len(ids))
            starts.append(at)
            at = end
        if at < length:
            segments[b, at:] = len(row)
            positions[b, at:] = np.arange(length - at)
            starts.append(at)
        boundaries.append([*starts, length])
    where = np.flatnonzero(target.ravel())
    # A target never is a row's first token, so the position before it lies in the same row.
    return Batch(
        torch.from_numpy(input_ids),
        torch.from_numpy(segments),
        torch.from_numpy(positions),
        torch.from_numpy(where - 1),
        torch.from_numpy(input_ids.ravel()[where]),
        boundaries,
    )


def targets(samples: Samples, pack: Sequence[int]) -> int:
    """Return how many tokens of a pack carry loss (the first of a sample never does)."""
    return sum(int(np.count_nonzero(samples[i][1][1:])) for i in pack)
