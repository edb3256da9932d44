"""Three-valued verdicts: a claim holds, is contradicted, or these seeds cannot decide it.

A difference is `a - b`, of mean accuracies (permutation test, Welch's interval) or of lock-in
rates (Fisher's exact test, Newcombe's interval from Wilson's).

| the claim | holds if | contradicted if |
|---|---|---|
| `greater` | difference > 0 and p < .05 | difference < 0 and p < .05 |
| `equal` | the 95% interval lies within +-margin | p < .05 |
| `not_less` | the interval's lower end is above -margin | difference < 0 and p < .05 |
| `never` (one arm) | no seed locks in, the mean's interval ends below floor + MARGIN | one does |
| `solved` (one arm) | every seed locks in, the mean's interval begins above LOCK_IN | none does |

Everything else is undecided, and so is all with fewer than FEWEST_SEEDS: no claim holds for lack
of seeds.  Nor do two arms compare of which neither has learnt anything to speak of (both means
below floor + BARELY), but at the wall, where that is the claim: seeds at the floor agree so well
that a tenth of a per cent is significant.  The margin is MARGIN unless the claim has its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from gatewright.statistics import Interval, student_interval, wilson_interval

LOCK_IN = 0.8  # the paper's threshold of a seed that "locks in"
LEVEL, MARGIN, BARELY = 0.05, 0.1, 0.02
FEWEST_SEEDS = 4  # with three against three no permutation test reaches p < .05
HOLDS, CONTRADICTED, UNDECIDED, NOT_RUN = "holds", "contradicted", "undecided", "not run"


def mean_interval(accuracy: Sequence[float]) -> Interval:
    """Return Student's 95% interval of a mean accuracy, clipped to [0, 1]."""
    found = student_interval(accuracy)
    return Interval(found.value, max(0.0, found.low), min(1.0, found.high))


def welch_interval(a: Sequence[float], b: Sequence[float]) -> Interval:
    """Return the 95% interval of a difference in mean accuracy (Welch 1947), clipped to [-1, 1].

    Groups of one value say nothing of their spread: the interval is then [-1, 1].
    """
    from scipy.stats import t

    gap = float(np.mean(a) - np.mean(b))
    if min(len(a), len(b)) < 2:
        return Interval(gap, -1.0, 1.0)
    parts = [float(np.var(x, ddof=1)) / len(x) for x in (a, b)]
    spread = sum(parts)
    if not spread:
        return Interval(gap, gap, gap)
    degrees = spread**2 / sum(v**2 / (len(x) - 1) for v, x in zip(parts, (a, b), strict=True))
    half = float(t.ppf(1 - LEVEL / 2, degrees)) * math.sqrt(spread)
    return Interval(gap, max(-1.0, gap - half), min(1.0, gap + half))


def newcombe_interval(a: tuple[int, int], b: tuple[int, int]) -> Interval:
    """Return the 95% interval of a difference of two rates, each (count, of) (Newcombe 1998)."""
    x, y = wilson_interval(*a), wilson_interval(*b)
    gap = x.value - y.value
    low = gap - math.hypot(x.value - x.low, y.high - y.value)
    high = gap + math.hypot(x.high - x.value, y.value - y.low)
    return Interval(gap, low, high)


def compared(expect: str, difference: Interval, p: float, margin: float = MARGIN) -> str:
    """Return the verdict on a claim about a difference."""
    gap = difference.value
    if expect == "greater":
        holds, against = gap > 0 and p < LEVEL, gap < 0 and p < LEVEL
    elif expect == "equal":
        holds, against = difference.low > -margin and difference.high < margin, p < LEVEL
    elif expect == "not_less":
        holds, against = difference.low > -margin, gap < 0 and p < LEVEL
    else:
        raise ValueError(f"no expectation {expect!r} of a difference")
    return HOLDS if holds else CONTRADICTED if against else UNDECIDED


def alone(expect: str, accuracy: Sequence[float], floor: float) -> str:
    """Return the verdict on a claim about one arm's lock-ins."""
    locked, interval = sum(x > LOCK_IN for x in accuracy), mean_interval(accuracy)
    if expect == "never":
        holds, against = not locked and interval.high < floor + MARGIN, locked > 0
    elif expect == "solved":
        holds, against = locked == len(accuracy) and interval.low > LOCK_IN, not locked
    else:
        raise ValueError(f"no expectation {expect!r} of one arm")
    return HOLDS if holds else CONTRADICTED if against else UNDECIDED
