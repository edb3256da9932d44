"""Tests and intervals that reports quote: Wilson, McNemar, permutation, Fisher, bootstrap, lines.

Every function takes plain sequences of numbers and returns plain floats or a small
dataclass; randomised ones take a seed and are reproducible.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike


@dataclasses.dataclass(frozen=True)
class Interval:
    """A point estimate with a confidence interval."""

    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class LinearFit:
    """A least-squares line `y = slope * x + intercept` and its coefficient of determination."""

    slope: float
    intercept: float
    r2: float


def permutation_test(
    a: Sequence[float], b: Sequence[float], *, samples: int = 20_000, seed: int = 0
) -> float:
    """Return the two-sided p value of the difference in means of two independent groups.

    All splits are enumerated when there are at most `samples` of them; otherwise `samples`
    random splits are drawn and the observed one is counted too, so p is never 0.

    Raises:
        ValueError: a group is empty.
    """
    if not len(a) or not len(b):
        raise ValueError("permutation_test needs two non-empty groups")
    pooled = np.asarray([*a, *b], dtype=np.float64)
    n, m = len(a), len(pooled)
    observed = abs(pooled[:n].mean() - pooled[n:].mean())
    tolerance = 1e-12 * max(1.0, float(np.abs(pooled).max()))
    total = pooled.sum()
    if math.comb(m, n) <= samples:
        sums = np.array([pooled[list(c)].sum() for c in itertools.combinations(range(m), n)])
        gaps = np.abs(sums / n - (total - sums) / (m - n))
        return float((gaps >= observed - tolerance).mean())
    rng = np.random.default_rng(seed)
    order = np.argsort(rng.random((samples, m)), axis=1)[:, :n]
    sums = pooled[order].sum(axis=1)
    gaps = np.abs(sums / n - (total - sums) / (m - n))
    return float(((gaps >= observed - tolerance).sum() + 1) / (samples + 1))


def fisher_exact(
    successes_a: int, n_a: int, successes_b: int, n_b: int, *, alternative: str = "two-sided"
) -> float:
    """Return Fisher's exact p value for two success counts.

    Args:
        alternative: `two-sided`, `greater` (a succeeds more often) or `less`.
    """
    from scipy.stats import fisher_exact as scipy_fisher

    table = [[successes_a, n_a - successes_a], [successes_b, n_b - successes_b]]
    return float(scipy_fisher(table, alternative=alternative)[1])


def bootstrap_interval(
    values: Sequence[float], *, level: float = 0.95, samples: int = 10_000, seed: int = 0
) -> Interval:
    """Return the mean with its percentile bootstrap interval.

    A single value has no spread to resample; its interval is the value itself.

    Raises:
        ValueError: no values.
    """
    x = np.asarray(values, dtype=np.float64)
    if not x.size:
        raise ValueError("bootstrap_interval needs at least one value")
    rng = np.random.default_rng(seed)
    means = x[rng.integers(0, x.size, (samples, x.size))].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(x.mean()), float(low), float(high))


def student_interval(values: Sequence[float], *, level: float = 0.95) -> Interval:
    """Return the mean of a few independent values with Student's t interval.

    A single value says nothing of its spread; its interval is (-inf, inf).

    Raises:
        ValueError: no values.
    """
    from scipy.stats import t

    x = np.asarray(values, dtype=np.float64)
    if not x.size:
        raise ValueError("student_interval needs at least one value")
    mean = float(x.mean())
    if x.size == 1:
        return Interval(mean, -math.inf, math.inf)
    half = float(t.ppf((1 + level) / 2, x.size - 1) * x.std(ddof=1) / math.sqrt(x.size))
    return Interval(mean, mean - half, mean + half)


def student_test(differences: Sequence[float]) -> float | None:
    """Return the two-sided p value of Student's t test that the mean of differences is 0.

    It is below 1 - level exactly where `student_interval` at that level leaves 0 out.  Without
    any spread it is the limit: 1 if all are 0, else 0.  A single difference has none: None.

    Raises:
        ValueError: no differences.
    """
    from scipy.stats import t

    x = np.asarray(differences, dtype=np.float64)
    if not x.size:
        raise ValueError("student_test needs at least one difference")
    if x.size == 1:
        return None
    if not np.ptp(x):
        return 0.0 if x[0] else 1.0
    statistic = abs(float(x.mean())) * math.sqrt(x.size) / float(x.std(ddof=1))
    return float(2 * t.sf(statistic, x.size - 1))


def sign_flip_test(
    differences: Sequence[float],
    *,
    alternative: Literal["two-sided", "greater"] = "two-sided",
    samples: int = 20_000,
    seed: int = 0,
) -> float:
    """Return the p value of paired differences whose signs could as well be turned.

    All signs are enumerated when there are at most `samples` ways; otherwise `samples` random
    ones are drawn and the observed one is counted too.  Zeros do not matter; without any other
    difference p is 1.

    Args:
        alternative: `two-sided`, or `greater` (the differences are above 0).
    """
    x = np.asarray(differences, dtype=np.float64)
    x = x[x != 0]
    if not x.size:
        return 1.0
    size = np.abs if alternative == "two-sided" else np.asarray
    observed = float(size(x.sum()))
    tolerance = 1e-9 * max(1.0, abs(observed))
    if 2.0**x.size <= samples:
        signs = np.array(list(itertools.product((-1.0, 1.0), repeat=x.size)))
        return float((size(signs @ x) >= observed - tolerance).mean())
    rng = np.random.default_rng(seed)
    signs = rng.integers(0, 2, (samples, x.size)) * 2.0 - 1.0
    return float(((size(signs @ x) >= observed - tolerance).sum() + 1) / (samples + 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values adjusted for how many tests there are (Holm 1979), in the same order."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    out = [1.0] * len(p_values)
    highest = 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[i]))
        out[i] = highest
    return out


def r_squared(measured: ArrayLike, predicted: ArrayLike) -> float:
    """Return `1 - residual / total` sum of squares of a prediction that was not fitted here.

    It is negative when the prediction is worse than the mean, and NaN when the measured
    values do not vary.
    """
    y, p = np.asarray(measured, dtype=np.float64), np.asarray(predicted, dtype=np.float64)
    total = float(((y - y.mean()) ** 2).sum())
    return float("nan") if total == 0 else 1 - float(((y - p) ** 2).sum()) / total


def linear_fit(
    x: Sequence[float], y: Sequence[float], *, through_origin: bool = False
) -> LinearFit:
    """Return the least-squares line through the points.

    R^2 is about the mean of `y` also for a line through the origin, so the two forms can be
    compared.

    Raises:
        ValueError: fewer than two points (one through the origin), or all `x` alike.
    """
    u, v = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if through_origin:
        if not u.size or not (u**2).sum():
            raise ValueError("linear_fit through the origin needs a non-zero x")
        slope, intercept = float((u * v).sum() / (u**2).sum()), 0.0
    else:
        if u.size < 2 or np.ptp(u) == 0:
            raise ValueError("linear_fit needs at least two different x")
        centred = u - u.mean()
        slope = float((centred * v).sum() / (centred**2).sum())
        intercept = float(v.mean() - slope * u.mean())
    return LinearFit(slope, intercept, r_squared(v, slope * u + intercept))


def wilson_interval(successes: float, n: int, *, level: float = 0.95) -> Interval:
    """Return a proportion with its Wilson score interval (Wilson 1927).

    It stays inside [0, 1] and keeps its coverage near 0 and 1, where accuracies of small
    models live.  Without any trial the value is NaN and the interval is [0, 1].

    Args:
        successes: may be a fraction, when each trial is itself a mean.

    Raises:
        ValueError: not 0 <= successes <= n.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n} trials")
    if n == 0:
        return Interval(float("nan"), 0.0, 1.0)
    z = NormalDist().inv_cdf((1 + level) / 2)
    p = successes / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    # The bounds at no success and at no failure are exact; rounding would miss them.
    low = 0.0 if successes == 0 else middle - half
    high = 1.0 if successes == n else middle + half
    return Interval(p, low, high)


def mcnemar_exact(only_a: int, only_b: int) -> float:
    """Return the two-sided exact McNemar p value of two paired success rates.

    Args:
        only_a: pairs in which only a succeeds.
        only_b: pairs in which only b succeeds.  Pairs with equal results do not matter.
    """
    n, low = only_a + only_b, min(only_a, only_b)
    if n == 0:
        return 1.0
    tail = sum(math.comb(n, i) for i in range(low + 1))
    return min(1.0, 2 * tail / 2**n)
