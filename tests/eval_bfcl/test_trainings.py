import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval_bfcl import figures, pools, report, score, tally, trainings
from gatewright import bfcl
from gatewright.statistics import holm, mcnemar_exact, student_interval, wilson_interval
from tests.eval_bfcl.gold import call_text, gold_text, write_results

RIGHT = {  # (gate scale, seed) -> how many of 40 questions are right, from the first on
    (0.5, 0): 30,
    (0.5, 1): 26,
    (0.5, 2): 28,
    (1.0, 0): 10,
    (1.0, 1): 6,
    (1.0, 2): 8,
    (2.0, 0): 10,
    (2.0, 1): 6,
    (2.0, 2): 8,
}


def model(right: int) -> Callable[[bfcl.Question, pools.Row], str]:
    def answer(q: bfcl.Question, row: pools.Row) -> str:
        n = int(q.id.rsplit("_", 1)[1])
        if n < right:
            return gold_text(q)
        return call_text((row.gold or "", {})) if n % 2 else "no idea"

    return answer


@pytest.fixture(scope="module")
def scores(make_pools: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("trainings")
    folder = make_pools(split="simple_python", retriever="bm25", pool_sizes="4")
    out = []
    for (scale, seed), right in RIGHT.items():
        label = f"mamba2-s{scale:g}-seed{seed}"
        run: dict[str, Any] = {"gate_scale": scale, "sft_seed": seed, "base": "mamba2"}
        run["state"] = {"d": 64, "n": 16, "layers": 2, "vocab": 512}
        results = write_results(root / label, folder, model(right), label=label, limit=40, **run)
        score.main(score.Args(results=results, pools=folder, out=root / f"s-{label}"))
        out.append(root / f"s-{label}")
    return out


@pytest.fixture(scope="module")
def found(scores: list[Path]) -> list[trainings.Setup]:
    return trainings.setups([tally.load(folder) for folder in scores])


def test_a_setups_rates_are_means_over_its_seeds(found: list[trainings.Setup]) -> None:
    assert [s.name for s in found] == [f"mamba2 s{s}" for s in ("0.5", "1", "2")]
    row = trainings.summarise(found)[0]
    assert row["accuracy_each"] == [0.75, 0.65, 0.7]
    assert row["accuracy"] == pytest.approx(0.7)
    over_seeds, pooled = student_interval([0.75, 0.65, 0.7]), wilson_interval(84, 120)
    assert row["accuracy_low"] == min(over_seeds.low, pooled.low) == over_seeds.low
    assert row["accuracy_high"] == max(over_seeds.high, pooled.high) == over_seeds.high
    assert row["right_tool"] == pytest.approx((35 + 33 + 34) / 120)
    assert row["n_correct"] == 84
    assert row["training_seeds"] == [0, 1, 2]


def test_agreeing_seeds_do_not_hide_that_questions_are_few(found: list[trainings.Setup]) -> None:
    (facts, rows) = found[0].runs[0]
    same = trainings.Setup("x", "x", None, "s", dict.fromkeys(range(3), (facts, rows)))
    row = trainings.summarise([same])[0]
    assert row["accuracy_each"] == [0.75] * 3
    assert row["accuracy_low"] == wilson_interval(90, 120).low


def test_setups_are_compared_with_unscaled_gates_question_by_question(
    found: list[trainings.Setup],
) -> None:
    tests = trainings.differences(found)
    assert {d.b for d in tests} == {"mamba2 s1"}
    (d,) = (d for d in tests if d.a == "mamba2 s0.5" and d.rate == "accuracy")
    assert (d.points, d.low, d.high) == (50, 50, 50)
    assert (d.only_a, d.only_b, d.seeds) == (60, 0, 3)
    assert d.p_mcnemar == mcnemar_exact(60, 0)
    assert d.p_questions == pytest.approx(1 / 20_001)  # 24 questions, always in one direction
    (equal,) = (d for d in tests if d.a == "mamba2 s2" and d.rate == "accuracy")
    assert (equal.points, equal.p_questions, equal.p_holm) == (0, 1, 1)
    assert d.p_holm == holm([d.p_questions, 1.0])[0]


def test_seeds_that_tell_nothing_apart_are_no_setup(scores: list[Path]) -> None:
    runs = [tally.load(folder) for folder in scores[:3]]
    alone = [({**facts, "sft_seed": None}, rows) for facts, rows in runs]
    assert trainings.setups(alone) == []
    twins = [({**facts, "sft_seed": 7}, rows) for facts, rows in runs]
    assert trainings.setups(twins) == []
    assert trainings.setups(runs[:1]) == []


def test_the_report_shows_setups_instead_of_their_models(
    scores: list[Path], tmp_path: Path
) -> None:
    report.main(report.Args(scores=tuple(scores), out=tmp_path / "r", explorer_questions=1))
    summary = json.loads((tmp_path / "r/summary.json").read_text())
    assert len(summary["setups"]) == 3
    assert summary["mcnemar"] == []  # setups are compared, not each of their models
    assert len(summary["differences"]) == 2 * len(trainings.RATES)
    text = (tmp_path / "r/accuracy.svg").read_text()
    assert text.count("<title>mamba2 s0.5, 4: 70.0 %") == 1
    assert "seed0" not in text
    assert text.count("predicted ceiling: D 64, N 16, 2 layers, 4: ") == 1
    scale = (tmp_path / "r/accuracy_against_scale.svg").read_text()
    assert "k = 4, 0.5: 70.0 %" in scale
    assert "k = 4, 2: 20.0 %" in scale
    board = (tmp_path / "r/leaderboard.md").read_text()
    assert "| mamba2 s0.5 | mamba2 s1 | simple_python, bm25 | 4 | Accuracy |" in board
    html = (tmp_path / "r/index.html").read_text()
    assert "Over training seeds" in html
    assert '"only_a":60' in html


def test_models_outside_a_setup_keep_their_own_line(scores: list[Path]) -> None:
    runs = [tally.load(folder) for folder in scores[:4]]  # the fourth is alone at its scale
    rows = figures.shown_rows(tally.summarise(runs), trainings.setups(runs))
    assert [r["model"] for r in rows] == ["mamba2 s0.5", "mamba2-s1-seed0"]
