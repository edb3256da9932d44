"""Permutation, Fisher, bootstrap and lines against enumeration and known values."""

import functools
import math

import numpy as np
import pytest
import scipy.stats

from gatewright import statistics


def test_permutation_enumerates_small_groups() -> None:
    # 3 against 3, fully separated: only the split itself and its mirror reach the gap.
    assert statistics.permutation_test([1, 2, 3], [10, 11, 12]) == pytest.approx(2 / 20)
    assert statistics.permutation_test([1.0, 2.0], [1.0, 2.0]) == pytest.approx(1.0)


def test_sampled_permutations_agree_with_enumeration_and_are_never_zero() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(0.8, 1, 8).tolist(), rng.normal(0, 1, 8).tolist()
    exact = statistics.permutation_test(a, b, samples=20_000)  # 12870 splits
    sampled = statistics.permutation_test(a, b, samples=10_000, seed=1)
    assert sampled == pytest.approx(exact, abs=0.02)
    far = statistics.permutation_test([0.0] * 20, [1.0] * 20, samples=500)
    assert far == pytest.approx(1 / 501)
    with pytest.raises(ValueError, match="non-empty"):
        statistics.permutation_test([], [1.0])


def test_fisher_gives_the_papers_values() -> None:
    # Seed 001: lock-in 7 of 10 against 1 of 10 (two-sided), 6 of 6 against 0 of 6 (one-sided).
    assert statistics.fisher_exact(7, 10, 1, 10) == pytest.approx(0.02, abs=0.001)
    assert statistics.fisher_exact(6, 6, 0, 6, alternative="greater") == pytest.approx(
        1 / math.comb(12, 6)
    )


def test_bootstrap_covers_the_mean_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(2)
    hits = 0
    for i in range(200):
        interval = statistics.bootstrap_interval(rng.normal(3, 1, 30).tolist(), samples=400, seed=i)
        hits += interval.low <= 3 <= interval.high
    assert 0.88 <= hits / 200 <= 0.99
    assert statistics.bootstrap_interval([0.5]) == statistics.Interval(0.5, 0.5, 0.5)


def test_lines_and_r_squared() -> None:
    x = [1.0, 2.0, 4.0]
    fit = statistics.linear_fit(x, [3.0, 5.0, 9.0])
    assert (fit.slope, fit.intercept, fit.r2) == pytest.approx((2, 1, 1))
    origin = statistics.linear_fit(x, [2.0, 4.0, 8.0], through_origin=True)
    assert (origin.slope, origin.intercept, origin.r2) == pytest.approx((2, 0, 1))
    assert statistics.r_squared([1, 2, 3], [2, 2, 2]) == pytest.approx(0)
    assert statistics.r_squared([1, 2, 3], [3, 2, 1]) < 0
    assert math.isnan(statistics.r_squared([1, 1], [1, 1]))
    with pytest.raises(ValueError, match="two different x"):
        statistics.linear_fit([1.0, 1.0], [1.0, 2.0])


def test_students_interval_is_the_textbooks() -> None:
    found = statistics.student_interval([1.0, 2.0, 3.0])
    assert found.value == 2.0
    assert found.high == pytest.approx(2 + 4.302653 / math.sqrt(3), abs=1e-5)
    assert found.low == pytest.approx(2 - 4.302653 / math.sqrt(3), abs=1e-5)
    alone = statistics.student_interval([5.0])
    assert (alone.low, alone.high) == (-math.inf, math.inf)
    with pytest.raises(ValueError, match="at least one"):
        statistics.student_interval([])


@pytest.mark.parametrize("shift", [-0.01, 0.01])
def test_students_test_is_the_intervals(shift: float) -> None:
    values = [1.0, 2.0, 3.0]
    edge = statistics.student_interval(values).low  # moved by it, 0 is on the interval's bound
    moved = [v - edge + shift for v in values]
    p = statistics.student_test(moved)
    assert p == pytest.approx(scipy.stats.ttest_1samp(moved, 0).pvalue)
    assert p is not None
    assert (p < 0.05) == (statistics.student_interval(moved).low > 0) == (shift > 0)


def test_students_test_without_spread_is_its_limit() -> None:
    assert statistics.student_test([0.0, 0.0, 0.0]) == 1
    assert statistics.student_test([0.1, 0.1, 0.1]) == 0
    assert statistics.student_test([0.1]) is None
    with pytest.raises(ValueError, match="at least one"):
        statistics.student_test([])


def test_sign_flips_enumerate_and_sample() -> None:
    assert statistics.sign_flip_test([]) == statistics.sign_flip_test([0, 0]) == 1.0
    assert statistics.sign_flip_test([1, 1, 1]) == 2 / 8
    assert statistics.sign_flip_test([1, 1, 1, 0, -1]) == pytest.approx(10 / 16)
    one_sided = statistics.sign_flip_test([1.0] * 8 + [-1.0])
    assert one_sided == statistics.mcnemar_exact(8, 1)
    sampled = statistics.sign_flip_test([1.0] * 8 + [-1.0], samples=500, seed=3)
    assert sampled == pytest.approx(one_sided, abs=0.03)
    assert statistics.sign_flip_test([1.0] * 40) == pytest.approx(1 / 20_001)
    greater = functools.partial(statistics.sign_flip_test, alternative="greater")
    assert greater([1, 2, 3, 4, -0.5]) == 2 / 32
    assert greater([-1, -2, -3]) == greater([0, 0]) == 1.0
    assert greater([1.0] * 40) == pytest.approx(1 / 20_001)


def test_holm_adjusts_in_steps() -> None:
    assert statistics.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert statistics.holm([0.9, 0.9]) == [1.0, 1.0]
    assert statistics.holm([]) == []
