"""The capacity law: the reference table, both b, both printed forms, and its inverses."""

import math

import numpy as np
import pytest

from gatewright import recall_law

# MQAR, V = 512, 16 facts, a = 5/4, b = m_V; rows D 16, 32, 64, columns N 2, 4, 8, 16, 32.
TABLE = {
    16: (0.044, 0.100, 0.219, 0.402, 0.588),
    32: (0.113, 0.272, 0.543, 0.804, 0.936),
    64: (0.308, 0.637, 0.913, 0.992, 1.000),
}


def test_remark_4_3_gives_the_reference_table() -> None:
    b = recall_law.mean_of_max(512)
    for d, row in TABLE.items():
        for n, want in zip((2, 4, 8, 16, 32), row, strict=True):
            assert recall_law.recall(d, n, 16, 1.25, b) == pytest.approx(want, abs=6e-4)


def test_the_two_reaches_and_a_simulation() -> None:
    assert recall_law.mean_of_max(512) == pytest.approx(2.915, abs=1e-3)
    assert recall_law.sqrt_2_log_v(512) == pytest.approx(3.532, abs=1e-3)
    largest = np.random.default_rng(0).normal(size=(4000, 512)).max(1).mean()
    assert (
        abs(largest - recall_law.mean_of_max(512)) < 0.15 < recall_law.sqrt_2_log_v(512) - largest
    )


def test_the_printed_theorem_drops_the_width_term() -> None:
    b = recall_law.mean_of_max(512)
    printed = recall_law.recall_as_printed(8, 32, 16, b, "ar")
    assert printed > recall_law.recall(8, 32, 16, 1, b)
    wide = recall_law.recall_as_printed(4096, 1, 16, b, "ar")
    assert wide == pytest.approx(recall_law.recall(4096, 1, 16, 1, b), abs=1e-3)
    # At length 4 F the written pairs average 5/4 F.
    mqar = recall_law.recall_as_printed(32, 8, 16, b, "mqar", 64)
    assert mqar == pytest.approx(recall_law.recall(1e9, 8 * 32 / 1e9, 16, 1.25, b), abs=0.03)
    with pytest.raises(ValueError, match="length"):
        recall_law.recall_as_printed(32, 8, 16, b, "mqar", 32)


def test_layers_multiply_the_state() -> None:
    b = recall_law.mean_of_max(512)
    assert recall_law.recall(32, 4, 16, 1.25, b, layers=3) == pytest.approx(
        recall_law.recall(32, 12, 16, 1.25, b)
    )


@pytest.mark.parametrize("target", [0.1, 0.5, 0.95])
def test_inverses(target: float) -> None:
    b = recall_law.mean_of_max(1024)
    facts = recall_law.facts_at(target, 64, 16, 1.25, b, layers=2)
    assert recall_law.recall(64, 16, facts, 1.25, b, layers=2) == pytest.approx(target)
    n = recall_law.state_size_for(target, facts, 64, 1.25, b, layers=2)
    assert n == pytest.approx(16)
    assert recall_law.facts_at(0.99, 8, 1000, 1.25, b) == 0.0
    assert math.isinf(recall_law.state_size_for(0.99, 16, 8, 1.25, b))
    width = recall_law.smallest_width(target, b)
    assert recall_law.state_size_for(target, 16, width * 1.01, 1.25, b) < math.inf
    assert math.isinf(recall_law.state_size_for(target, 16, width * 0.99, 1.25, b))
    with pytest.raises(ValueError, match="strictly"):
        recall_law.facts_at(1.0, 8, 8, 1, b)


def test_mqar_writes_as_many_pairs_as_theorem_4_2_counts_at_any_length() -> None:
    for length in (64, 128):
        # The theorem's mean over the queries' places t = 2 F .. L of F / 2 + t / 4.
        mean = sum(16 / 2 + t / 4 for t in range(32, length)) / (length - 32) / 16
        found = recall_law.pairs_per_fact("linear", "mqar", 16, length)
        assert found == pytest.approx(mean, abs=0.01)
    assert recall_law.pairs_per_fact("full", "mqar", 16, 64) == 0.625
    assert recall_law.pairs_per_fact("linear", "ar", 16, 33) == 1
