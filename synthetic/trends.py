"""Does a measure rise along an ordered setting?  Page's test, with seeds as blocks.

Of two levels, which have no order to test, seeds' differences are tested by flipping signs.

A seed starts from the same weights and sees the same data at every level of the setting, so
its values are compared with each other only.  Page's L (Page 1963) is the most usual test of
an ordered alternative over such blocks.  Its p value is that of permuting each seed's values,
exact also where values tie.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gatewright.statistics import Interval, bootstrap_interval, sign_flip_test
from synthetic.sweep import Row

LEVEL = 0.05  # of significance
SEEDS = 5  # at least, for a claim to hold
_PERMUTED = 8  # levels at most whose orders are enumerated (8! = 40,320)
_SAMPLES = 20_000


@dataclasses.dataclass(frozen=True)
class Trend:
    """Page's test of `value rises with level`.

    Attributes:
        blocks: seeds that have a value at every level.
        test: the test's name.
        p: one-sided p value; None with fewer than two blocks or two levels.
        rho: mean over blocks of Spearman's rank correlation; None if every value ties.
    """

    levels: tuple[float, ...]
    blocks: int
    p: float | None
    rho: float | None
    test: str = "Page's test"

    @property
    def holds(self) -> bool:
        """Return whether the test is significant, over enough seeds."""
        return self.p is not None and self.p < LEVEL and self.blocks >= SEEDS

    def said(self) -> str:
        """Return test and p value in words, and that the seeds are too few if they are."""
        found = f"{self.test} " + ("has too few runs" if self.p is None else f"p = {self.p:.2g}")
        return found + few(self.blocks)


def rises(rows: Sequence[Row], level: str, value: str, *, falls: bool = False) -> Trend:
    """Test whether `value` rises (or falls) with `level` over the rows' seeds.

    Every seed compared has every level compared: of unfinished sweeps, either the levels that
    all seeds have or the seeds that have all levels, whichever are more runs.

    Values that are equal share their ranks, so runs that all reached a limit do not count as
    ordered.
    """
    from scipy.stats import rankdata

    table = {(r["seed"], float(r[level])): float(r[value]) for r in rows}
    seeds = sorted({s for s, _ in table})
    levels = tuple(sorted({x for _, x in table}))
    whole = [s for s in seeds if all((s, x) in table for x in levels)]
    common = tuple(x for x in levels if all((s, x) in table for s in seeds))
    if len(common) * len(seeds) > len(whole) * len(levels):
        levels, whole = common, seeds
    data = np.array([[table[s, x] for x in levels] for s in whole])
    if len(whole) < 2 or len(levels) < 2:
        return Trend(levels, len(whole), None, None)
    if falls:
        data = -data
    if len(levels) == 2:
        gaps = data[:, 1] - data[:, 0]
        p = sign_flip_test(gaps.tolist(), alternative="greater")
        mean = float(np.sign(gaps).mean()) * (-1 if falls else 1)
        return Trend(levels, len(whole), p, mean, "sign-flip test")
    ranks = rankdata(data, axis=1)
    order = np.arange(len(levels), dtype=float)
    spread = ranks.std(axis=1)
    rho = [
        float(np.corrcoef(row, order)[0, 1]) if s > 0 else 0.0
        for row, s in zip(ranks, spread, strict=True)
    ]
    mean = float(np.mean(rho)) * (-1 if falls else 1)
    return Trend(levels, len(whole), page_p(ranks), mean)


def page_p(ranks: NDArray[np.float64]) -> float:
    """Return the p value of Page's L, the sum of rank times place, under permuted blocks.

    Exact for up to 8 levels; beyond, 20,000 permutations are drawn, always the same ones, and
    the observed one is counted too.

    Args:
        ranks: (blocks, levels) within each block from 1, equal values sharing their mean.
    """
    twice = np.rint(2 * ranks).astype(np.int64)  # shared ranks are halves
    levels = twice.shape[1]
    observed = int((twice * np.arange(levels)).sum())
    if levels <= _PERMUTED:
        # Blocks are permuted apart: the chances of their sums are those of one, convolved.
        chances = functools.reduce(np.convolve, [_chances(tuple(sorted(b))) for b in twice])
        return min(1.0, float(chances[observed:].sum()))
    rng = np.random.default_rng(0)
    sums = np.zeros(_SAMPLES, dtype=np.int64)
    for block in twice:
        sums += rng.permuted(np.tile(block, (_SAMPLES, 1)), axis=1) @ np.arange(levels)
    return float(((sums >= observed).sum() + 1) / (_SAMPLES + 1))


@functools.cache
def _chances(block: tuple[int, ...]) -> NDArray[np.float64]:
    """Return the chance of every sum of rank times place over the orders of one block."""
    orders = np.array(list(itertools.permutations(block)))
    counts = np.bincount(orders @ np.arange(len(block)))
    return counts / counts.sum()


def few(seeds: int) -> str:
    """Return words that say so if there are fewer seeds than a claim needs, else nothing."""
    return f"; {seeds} seed{'s' * (seeds != 1)}, fewer than {SEEDS}" if seeds < SEEDS else ""


def interval(values: Sequence[float]) -> Interval:
    """Return the mean with its 95% bootstrap interval over seeds."""
    return bootstrap_interval(values)
