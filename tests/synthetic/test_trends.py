"""Page's test over seeds, against its definition."""

import itertools

import numpy as np
import pytest

from synthetic import trends


def table(values: list[list[float]]) -> list[dict]:
    return [
        {"seed": s, "offset": float(o), "y": v}
        for s, row in enumerate(values)
        for o, v in enumerate(row)
    ]


def test_the_p_value_is_the_share_of_orders_that_are_as_sorted() -> None:
    values = [[1.0, 2.0, 4.0], [3.0, 5.0, 4.0], [0.0, 1.0, 9.0]]
    found = trends.rises(table(values), "offset", "y")
    ranks = np.argsort(np.argsort(values, axis=1), axis=1) + 1
    weights = np.array([1, 2, 3])
    observed = (ranks * weights).sum()
    orders = [np.array(p) for p in itertools.permutations((1, 2, 3))]
    sums = [
        sum(int((o * weights).sum()) for o in three)
        for three in itertools.product(orders, repeat=3)
    ]
    exact = np.mean([x >= observed for x in sums])
    assert found.p == pytest.approx(exact)
    assert found.blocks == 3
    assert found.rho == pytest.approx(np.mean([1.0, 0.5, 1.0]))


def test_falling_values_are_the_mirror_of_rising_ones() -> None:
    values = [[1.0, 2.0, 4.0, 7.0]] * 4
    up = trends.rises(table(values), "offset", "y")
    down = trends.rises(table([[-v for v in row] for row in values]), "offset", "y", falls=True)
    assert up.p == down.p
    assert up.p is not None
    assert up.p < 0.001
    assert up.rho == 1
    assert down.rho == -1
    wrong = trends.rises(table(values), "offset", "y", falls=True)
    assert wrong.p is not None
    assert wrong.p > 0.9


def test_ties_and_missing_runs_count_for_nothing() -> None:
    tied = trends.rises(table([[5.0, 5.0, 5.0]] * 5), "offset", "y")
    assert tied.p == 1.0
    assert tied.rho == 0.0
    rows = table([[1.0, 2.0, 3.0]] * 5)
    part = [r for r in rows if not (r["seed"] < 2 and r["offset"] == 1)]
    by_level = trends.rises(part, "offset", "y")  # 5 seeds at 2 levels: more than 3 at 3
    assert (by_level.blocks, by_level.levels) == (5, (0.0, 2.0))
    part = [r for r in rows if not (r["seed"] < 1 and r["offset"] == 1)]
    by_seed = trends.rises(part, "offset", "y")  # 4 seeds at 3 levels: more than 5 at 2
    assert (by_seed.blocks, len(by_seed.levels)) == (4, 3)
    assert trends.rises(rows[:3], "offset", "y").p is None
    assert trends.rises([r for r in rows if r["offset"] < 1], "offset", "y").p is None


def test_two_levels_are_compared_by_flipping_signs() -> None:
    rows = table([[0.0, 1.0], [0.0, 2.0], [0.0, 3.0], [0.0, 4.0], [1.0, 0.5]])
    found = trends.rises(rows, "offset", "y")
    # Of 32 sign patterns only the one without the last flip and the observed reach 9.5.
    assert found.p == pytest.approx(2 / 32)
    assert found.rho == pytest.approx(0.6)
    assert found.test in found.said()
    mirrored = trends.rises(rows, "offset", "y", falls=True)
    assert mirrored.p is not None
    assert mirrored.p > 0.9


def test_ties_are_permuted_too() -> None:
    """Four levels tie and one stands out in each of five seeds: 4 ** -5 of all orders."""
    values = [[400.0, 3000.0, 3000.0, 3000.0]] * 5
    found = trends.rises(table(values), "offset", "y")
    assert found.p == pytest.approx(0.25**5)
    assert found.holds


def test_many_levels_are_sampled() -> None:
    rising = [[float(x) for x in range(9)]] * 5
    found = trends.rises(table(rising), "offset", "y")
    assert found.p == pytest.approx(1 / 20_001)
    rng = np.random.default_rng(0)
    some = np.stack([rng.permutation(9) for _ in range(5)]).astype(float) + 1
    few = np.stack([rng.permutation(8) for _ in range(5)]).astype(float) + 1
    assert 0 < trends.page_p(some) <= 1
    both = trends.page_p(few), _sampled(few)
    assert both[0] == pytest.approx(both[1], abs=0.02)


def _sampled(ranks: np.ndarray) -> float:
    rng = np.random.default_rng(1)
    places = np.arange(ranks.shape[1])
    sums = [(rng.permuted(ranks, axis=1) @ places).sum() for _ in range(4000)]
    return float(np.mean([s >= (ranks @ places).sum() for s in sums]))


def test_twenty_seeds_at_two_levels_take_no_time() -> None:
    values = [[0.0, float(s)] for s in range(1, 21)]  # 2 ** 20 sign patterns
    assert trends.rises(table(values), "offset", "y").p == pytest.approx(1 / 20_001)


@pytest.mark.parametrize(
    ("seeds", "said"), [(4, "4 seeds, fewer than 5"), (1, "1 seed, fewer"), (5, "")]
)
def test_fewer_than_five_seeds_do_not_hold(seeds: int, said: str) -> None:
    found = trends.rises(table([[1.0, 2.0, 4.0, 7.0]] * seeds), "offset", "y")
    assert found.holds == (seeds == 5)
    assert said in found.said()
    assert ("fewer" in found.said()) == (seeds < 5)
