"""Does a measure rise along an ordered setting?  Page's test, with seeds as blocks.

Of two levels, which have no order to test, seeds' differences are tested by flipping signs.

A seed starts from the same weights and sees the same data at every level of the setting, so
its values are compared with each other only.  Page's L (Page 1963) is the most usual test of
an ordered alternative over such blocks.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from gatewright.statistics import Interval, bootstrap_interval
from synthetic.sweep import Row


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

    def said(self) -> str:
        """Return test and p value in words."""
        return f"{self.test} " + ("has too few runs" if self.p is None else f"p = {self.p:.2g}")


def rises(rows: Sequence[Row], level: str, value: str, *, falls: bool = False) -> Trend:
    """Test whether `value` rises (or falls) with `level` over the rows' seeds.

    Every seed compared has every level compared: of unfinished sweeps, either the levels that
    all seeds have or the seeds that have all levels, whichever are more runs.

    Values that are equal share their ranks, so runs that all reached a limit do not count as
    ordered.
    """
    from scipy.stats import page_trend_test, rankdata

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
        flips = np.array(list(itertools.product((1, -1), repeat=len(whole))))
        p = float((flips @ gaps >= gaps.sum() - 1e-12).mean())
        mean = float(np.sign(gaps).mean()) * (-1 if falls else 1)
        return Trend(levels, len(whole), p, mean, "sign-flip test")
    ranks = rankdata(data, axis=1)
    order = np.arange(len(levels), dtype=float)
    spread = ranks.std(axis=1)
    rho = [
        float(np.corrcoef(row, order)[0, 1]) if s > 0 else 0.0
        for row, s in zip(ranks, spread, strict=True)
    ]
    p = float(page_trend_test(data).pvalue) if spread.any() else 1.0
    mean = float(np.mean(rho)) * (-1 if falls else 1)
    return Trend(levels, len(whole), p, mean)


def interval(values: Sequence[float]) -> Interval:
    """Return the mean with its 95% bootstrap interval over seeds."""
    return bootstrap_interval(values)
