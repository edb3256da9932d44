import itertools

import numpy as np
import pytest
from scipy.stats import chisquare, kstest

from gatewright import bm25
from gatewright.errors import UserError
from gatewright.plackett_luce import gumbel_noise, log_probability, ranking, utilities

X = np.array([0.0, 0.3, 1.0, 0.55])


def draws(beta: float, n: int) -> dict[tuple[int, ...], int]:
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(n):
        order = tuple(int(i) for i in ranking(X, beta, gumbel_noise(4, "query", seed)))
        counts[order] = counts.get(order, 0) + 1
    return counts


@pytest.mark.parametrize("beta", [0.0, 0.05, 2.0])
def test_rankings_have_the_enumerated_probabilities(beta: float) -> None:
    counts, n = draws(beta, 6000), 6000
    orders = list(itertools.permutations(range(4)))
    p = np.exp([log_probability(o, X, beta) for o in orders])
    assert p.sum() == pytest.approx(1)
    if beta == 0:
        np.testing.assert_allclose(p, 1 / 24)
    assert chisquare([counts.get(o, 0) for o in orders], n * p).pvalue > 1e-3


def test_the_probability_is_the_product_of_successive_choices() -> None:
    w = np.exp(2 * X)
    expected = w[2] / w.sum() * w[0] / (w.sum() - w[2]) * w[3] / (w[3] + w[1])
    assert np.exp(log_probability([2, 0, 3, 1], X, 2)) == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["minmax", "rank", "score"])
def test_large_beta_is_bm25(kind: str) -> None:
    scores = np.array([3.0, 0.0, 7.5, 7.0, 1.25, 7.75])
    x = utilities(scores, kind)  # type: ignore[arg-type]
    expected = bm25.ranking(scores).tolist()
    for seed in range(50):
        noise = gumbel_noise(6, "q", seed)
        assert ranking(x, 1e6, noise).tolist() == expected
        assert ranking(x, float("inf"), noise).tolist() == expected


def test_infinite_beta_breaks_ties_as_bm25_does() -> None:
    scores = np.array([0.0, 2.0, 0.0, 2.0 + 1e-13, 0.0])
    for kind in ("minmax", "rank", "score"):
        order = ranking(utilities(scores, kind), float("inf"), gumbel_noise(5, 1))  # type: ignore[arg-type]
        assert order.tolist() == bm25.ranking(scores).tolist() == [1, 3, 0, 2, 4]


def test_utilities_are_as_named() -> None:
    scores = [2.0, 6.0, 4.0, 2.0]
    assert utilities(scores, "minmax").tolist() == [0, 1, 0.5, 0]
    assert utilities(scores, "rank").tolist() == pytest.approx([-2 / 3, 0, -1 / 3, -1])
    assert utilities(scores, "score").tolist() == scores
    assert utilities([5.0, 5.0], "minmax").tolist() == [0, 0]
    assert utilities([5.0], "rank").tolist() == [0]


def test_noise_belongs_to_its_key_alone_and_is_standard_gumbel() -> None:
    np.testing.assert_array_equal(gumbel_noise(5, "a", 1), gumbel_noise(5, "a", 1))
    assert not np.array_equal(gumbel_noise(5, "a", 1), gumbel_noise(5, "a", 2))
    assert not np.array_equal(gumbel_noise(5, "a", 11), gumbel_noise(5, "a1", 1))
    # Written down once: the same on every platform and in every process.
    np.testing.assert_allclose(gumbel_noise(2, "simple_python_0", 0), NOISE, rtol=1e-12)
    many = np.concatenate([gumbel_noise(100, "ks", i) for i in range(50)])
    assert kstest(many, "gumbel_r").pvalue > 1e-3


NOISE = [-0.662877586034006, -0.5494424610509405]


def test_batches_of_queries_rank_row_by_row() -> None:
    x = np.stack([X, X[::-1]])
    noise = np.zeros((2, 4))
    assert ranking(x, 1.0, noise).tolist() == [[2, 3, 1, 0], [1, 0, 2, 3]]


@pytest.mark.parametrize("beta", [-1.0, float("nan")])
def test_a_beta_below_zero_is_refused(beta: float) -> None:
    with pytest.raises(UserError, match="--beta"):
        ranking(X, beta, np.zeros(4))


def test_an_unknown_utility_is_refused() -> None:
    with pytest.raises(UserError, match="--utility cosine.*minmax"):
        utilities([1.0], "cosine")  # type: ignore[arg-type]
