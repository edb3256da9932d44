"""A sweep's statistics: means over seeds, differences from the baseline, what is written."""

import csv
import math
from pathlib import Path
from typing import Any

import pytest

from sft import compare


def row(scale: float, curriculum: str, seed: int, k: int, right: float, loss: float | None = 2.0):
    return {
        "scale": scale, "curriculum": curriculum, "seed": seed, "k": k, "questions": 10,
        "held_out_loss": loss, "parsed": 1.0, "first_tool": right, "right_tool": right,
        "exact": right / 2, "hallucinated": 0.0,
    }  # fmt: skip


def five_seeds(gain: float) -> list[dict[str, Any]]:
    noise = (0.00, 0.02, -0.01, 0.03, -0.02)
    return [row(1, "fixed", s, 8, 0.5 + e) for s, e in enumerate(noise)] + [
        row(1, "gated", s, 8, 0.5 + e + gain) for s, e in enumerate(noise)
    ]


def test_the_table_is_mean_and_deviation_over_seeds() -> None:
    rows = [row(1, "ramp", seed, 8, 0.5, loss=2.0 + seed) for seed in (0, 1, 2)]
    line = compare.table(rows).splitlines()[1]
    assert line.split()[:4] == ["1", "ramp", "8", "3"]
    assert "3.000 ± 1.000" in line
    assert "0.500 ± 0.000" in line
    assert "- " in compare.table([row(1, "ramp", 0, 8, 0.5, loss=None)])


def test_a_steady_gain_is_found_and_five_seeds_bound_its_p() -> None:
    found = {r["measure"]: r for r in compare.comparisons(five_seeds(0.2))}
    right = found["right_tool"]
    assert right["curriculum"] == "gated"
    assert right["baseline_curriculum"] == "fixed"
    assert right["seeds"] == 5
    assert right["difference"] == pytest.approx(0.2)
    assert right["low"] == pytest.approx(0.2)  # the same gain for every seed: no spread
    assert right["p_sign_flip"] == pytest.approx(2 / 32)
    assert right["p_permutation"] == pytest.approx(2 / 252)
    assert found["exact"]["difference"] == pytest.approx(0.1)
    assert found["held_out_loss"]["p_permutation"] == 1
    assert right["p_holm"] == pytest.approx(2 / 252)  # the only comparison of this measure


def test_no_gain_is_no_finding() -> None:
    right = next(r for r in compare.comparisons(five_seeds(0.0)) if r["measure"] == "right_tool")
    assert right["difference"] == pytest.approx(0)
    assert right["p_sign_flip"] == right["p_permutation"] == right["p_holm"] == 1


def test_arms_are_compared_seed_by_seed_with_unscaled_gates() -> None:
    rows = [row(s, "ramp", seed, 8, s / 10 + seed / 100) for s in (0.5, 1, 2) for seed in (0, 1)]
    rows.append(row(2, "ramp", 7, 8, 0.9))  # a seed that the baseline lacks does not count
    found = [r for r in compare.comparisons(rows) if r["measure"] == "right_tool"]
    assert [(r["scale"], r["baseline_scale"], r["seeds"]) for r in found] == [
        (0.5, 1, 2),
        (2, 1, 2),
        (2, 0.5, 2),
    ]
    assert [r["difference"] for r in found] == pytest.approx([-0.05, 0.1, 0.15])


def test_many_arms_are_compared_with_the_baseline_alone_and_each_measure_is_adjusted() -> None:
    arms = (0.25, 0.5, 1, 2, 4)
    rows = [row(s, "ramp", seed, 8, s / 10 + seed / 100) for s in arms for seed in (0, 1, 2)]
    found = [r for r in compare.comparisons(rows) if r["measure"] == "right_tool"]
    assert [(r["scale"], r["baseline_scale"]) for r in found] == [
        (0.25, 1), (0.5, 1), (2, 1), (4, 1),
    ]  # fmt: skip
    smallest = min(r["p_permutation"] for r in found)
    assert smallest == pytest.approx(2 / 20)
    assert found[-1]["p_holm"] == pytest.approx(4 * smallest)


def test_one_seed_has_no_interval_and_one_arm_nothing_to_compare() -> None:
    one = compare.comparisons([row(1, "fixed", 0, 8, 0.5), row(2, "fixed", 0, 8, 0.7)])
    assert all(math.isinf(r["low"]) for r in one)
    assert all(r["p_sign_flip"] == 1 for r in one)
    assert compare.comparisons([row(1, "fixed", 0, 8, 0.5)]) == []


def test_files_say_what_the_text_says(tmp_path: Path) -> None:
    text = compare.write(five_seeds(0.2), tmp_path)
    assert (tmp_path / "table.txt").read_text() == text + "\n"
    with open(tmp_path / "comparisons.csv", newline="") as f:
        rows = list(csv.DictReader(f))
    assert {r["measure"] for r in rows} == set(compare.COMPARED)
    assert float(rows[-1]["p_holm"]) == pytest.approx(2 / 252)
    with open(tmp_path / "table.csv", newline="") as f:
        assert len(list(csv.DictReader(f))) == 10
    assert "+0.2000 [+0.200, +0.200]" in text
