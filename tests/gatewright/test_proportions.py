"""Wilson intervals and McNemar's test of gatewright.statistics."""

import math

import pytest
from scipy.stats import binomtest

from gatewright.statistics import mcnemar_exact, wilson_interval


@pytest.mark.parametrize(("successes", "n"), [(0, 10), (3, 10), (10, 10), (200, 400), (1, 1)])
def test_wilson_equals_scipy(successes: int, n: int) -> None:
    ours = wilson_interval(successes, n)
    peer = binomtest(successes, n).proportion_ci(0.95, method="wilson")
    assert (ours.value, ours.low, ours.high) == pytest.approx((successes / n, peer.low, peer.high))
    assert 0 <= ours.low <= ours.value <= ours.high <= 1


def test_wilson_without_trials_knows_nothing() -> None:
    interval = wilson_interval(0, 0)
    assert math.isnan(interval.value)
    assert (interval.low, interval.high) == (0, 1)
    with pytest.raises(ValueError, match="5 successes of 4"):
        wilson_interval(5, 4)


def test_mcnemar_is_a_binomial_test_of_the_discordant_pairs() -> None:
    for a, b in [(0, 0), (1, 1), (0, 5), (12, 30), (30, 12), (200, 150)]:
        peer = binomtest(a, a + b).pvalue if a + b else 1.0
        assert mcnemar_exact(a, b) == pytest.approx(peer)
