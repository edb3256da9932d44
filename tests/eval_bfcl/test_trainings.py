import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval_bfcl import figures, plots, pools, report, score, scored, tally, trainings
from gatewright import bfcl
from gatewright.statistics import (
    holm,
    mcnemar_exact,
    student_interval,
    student_test,
    wilson_interval,
)
from tests.eval_bfcl.browser import CHROMIUM, chromium
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
    made, notes = trainings.setups([scored.load(folder) for folder in scores])
    assert notes == []
    return made


def test_a_setups_rates_are_means_over_its_seeds(found: list[trainings.Setup]) -> None:
    assert [s.name for s in found] == [f"mamba2 s{s}" for s in ("0.5", "1", "2")]
    row = trainings.summarise(found)[0]
    assert row["accuracy_each"] == [0.75, 0.65, 0.7]
    assert row["accuracy"] == pytest.approx(0.7)
    over_seeds, questions = student_interval([0.75, 0.65, 0.7]), wilson_interval(28, 40)
    assert questions.low < over_seeds.low
    assert questions.high < over_seeds.high
    assert row["accuracy_low"] == pytest.approx(questions.low)
    assert row["accuracy_high"] == over_seeds.high
    assert row["right_tool"] == pytest.approx((35 + 33 + 34) / 120)
    assert row["n_correct"] == 84
    assert row["training_seeds"] == [0, 1, 2]


def test_agreeing_seeds_do_not_hide_that_questions_are_few(found: list[trainings.Setup]) -> None:
    (facts, rows) = found[0].runs[0]
    same = trainings.Setup("x", "x", None, "s", dict.fromkeys(range(3), (facts, rows)), (4,))
    row = trainings.summarise([same])[0]
    assert row["accuracy_each"] == [0.75] * 3
    assert row["accuracy_low"] == wilson_interval(30, 40).low  # 40 questions, not 120 answers


def test_setups_are_compared_with_unscaled_gates_question_by_question(
    found: list[trainings.Setup],
) -> None:
    tests, notes = trainings.differences(found)
    assert notes == []
    assert {d.b for d in tests} == {"mamba2 s1"}
    (d,) = (d for d in tests if d.a == "mamba2 s0.5" and d.rate == "accuracy")
    assert (d.points, d.low, d.high) == (50, 50, 50)
    assert (d.only_a, d.only_b, d.seeds) == (60, 0, 3)
    assert d.p_mcnemar == mcnemar_exact(60, 0)
    assert d.p_questions == pytest.approx(1 / 20_001)  # 24 questions, always in one direction
    (equal,) = (d for d in tests if d.a == "mamba2 s2" and d.rate == "accuracy")
    assert (equal.points, equal.p_questions, equal.p_holm) == (0, 1, 1)
    assert d.p_seeds == 0  # the three seeds agree: the interval is a point too
    assert d.p_holm == holm([d.p_questions, 1.0])[0]


def test_a_difference_must_hold_for_other_trainings_too(found: list[trainings.Setup]) -> None:
    # Many questions tell the setups apart, in seeds that do not agree: p Holm follows the interval.
    a, b = found[0], found[1]
    runs = {0: a.runs[0], 1: b.runs[1], 2: b.runs[2]}
    lucky = dataclasses.replace(a, runs=runs)
    tests, _ = trainings.differences([lucky, b])
    (d,) = (d for d in tests if d.rate == "accuracy")
    assert d.low < 0 < d.high
    assert d.p_questions < 0.001
    assert d.p_seeds == pytest.approx(student_test([50, 0, 0]))
    assert d.p_holm == d.p_seeds == pytest.approx(0.423, abs=0.001)
    for phrase in ("another training", "other questions", "the larger of the two"):
        assert phrase in trainings.EXPLAINED


def test_one_matched_seed_says_nothing_of_other_trainings(
    scores: list[Path], tmp_path: Path
) -> None:
    chosen = [scores[i] for i in (0, 1, 4, 5)]  # seeds 0, 1 and 1, 2
    report.main(report.Args(scores=tuple(chosen), out=tmp_path / "r", explorer_questions=1))
    d = json.loads((tmp_path / "r/summary.json").read_text())["differences"][0]
    assert (d["seeds"], d["p_seeds"], d["p_holm"]) == (1, None, None)
    assert d["p_questions"] < 0.001
    (line,) = (
        line
        for line in (tmp_path / "r/leaderboard.md").read_text().splitlines()
        if line.startswith("| mamba2 s0.5 | mamba2 s1 ") and "| Accuracy |" in line
    )
    p_seeds, p_questions, p_holm = line.strip("| ").split(" | ")[-3:]
    assert (p_seeds, p_holm) == ("n/a", "n/a")
    assert p_questions != "n/a"


def test_the_page_sorts_differences_and_shows_missing_p_values(
    scores: list[Path], tmp_path: Path
) -> None:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    chosen = [scores[i] for i in (0, 1, 4, 5)]  # seeds 0, 1 and 1, 2: one in common
    report.main(report.Args(scores=tuple(chosen), out=tmp_path / "r", explorer_questions=1))
    cells = (
        "[...document.querySelectorAll('#differences tbody tr')].map(r => r.cells["
        "document.querySelector('#differences th[data-column={}]').cellIndex].firstChild.data)"
    )
    with chromium() as tab:
        tab.open(tmp_path / "r/index.html")
        for column in ("p_seeds", "p_holm"):
            assert tab.run(cells.format(column)) == ["n/a"] * len(trainings.RATES)
        d = json.loads((tmp_path / "r/summary.json").read_text())["differences"][0]
        assert 0 < d["p_mcnemar"] < 1e-4
        assert float(tab.run(cells.format("p_mcnemar"))[0]) == float(f"{d['p_mcnemar']:.3g}")
        points = list(map(float, tab.run(cells.format("points"))))
        tab.run("document.querySelector('#differences th[data-column=points] button').click()")
        assert list(map(float, tab.run(cells.format("points")))) == sorted(points, reverse=True)
        assert tab.run("document.getElementById('setups').tBodies[0].rows.length") == 2


def test_setups_without_a_common_seed_are_said_not_to_be_compared(scores: list[Path]) -> None:
    runs = [scored.load(folder) for folder in (*scores[:2], *scores[3:5])]
    moved = [({**facts, "sft_seed": facts["sft_seed"] + 5}, rows) for facts, rows in runs[2:]]
    made, _ = trainings.setups([*runs[:2], *moved])
    where = "simple_python, bm25: they share no training seed."
    assert trainings.differences(made) == (
        [],
        [f"mamba2 s0.5 and mamba2 s1 are not compared on {where}"],
    )


def test_setups_are_compared_within_their_base_and_bases_by_their_references(
    scores: list[Path],
) -> None:
    runs = [scored.load(folder) for folder in scores]
    other = [
        ({**facts, "base": "big", "model": "big-" + facts["model"]}, rows)
        for facts, rows in runs
        if facts["gate_scale"] != 0.5
    ]
    made, _ = trainings.setups([*runs, *other])
    tests, _ = trainings.differences(made)
    assert [(d.a, d.b) for d in tests if d.rate == "accuracy"] == [
        ("mamba2 s0.5", "mamba2 s1"),
        ("mamba2 s2", "mamba2 s1"),
        ("big s2", "big s1"),
        ("big s1", "mamba2 s1"),
    ]


def test_models_outside_compared_setups_keep_their_paired_tests(
    scores: list[Path], tmp_path: Path
) -> None:
    # Seeds 0 and 1 of one scale, seed 2 of another alone: a setup without anything to compare.
    chosen = [scores[0], scores[1], scores[5]]
    report.main(report.Args(scores=tuple(chosen), out=tmp_path / "r", explorer_questions=1))
    summary = json.loads((tmp_path / "r/summary.json").read_text())
    assert len(summary["setups"]) == 1
    assert summary["differences"] == []
    assert {(t["a"], t["b"]) for t in summary["mcnemar"]} == {
        ("mamba2-s0.5-seed0", "mamba2-s0.5-seed1"),
        ("mamba2-s0.5-seed0", "mamba2-s1-seed2"),
        ("mamba2-s0.5-seed1", "mamba2-s1-seed2"),
    }


def test_models_keep_their_paired_tests_at_sizes_their_setups_are_not_compared_at(
    scores: list[Path],
) -> None:
    runs = [scored.load(scores[i]) for i in (0, 1, 3, 4)]
    # Seeds 0 and 1 of two scales; k = 24 was asked of all but one.
    more = [(facts, rows + [{**row, "k": 24} for row in rows]) for facts, rows in runs[:3]]
    runs = [*more, runs[3]]
    made, _ = trainings.setups(runs)
    compared, _ = trainings.differences(made)
    assert {d.k for d in compared} == {4}
    tests, _ = report.paired_tests(runs, made, compared)
    assert {(t.a, t.b, t.k) for t in tests} == {
        ("mamba2-s0.5-seed0", "mamba2-s0.5-seed1", 24),
        ("mamba2-s0.5-seed0", "mamba2-s1-seed0", 24),
        ("mamba2-s0.5-seed1", "mamba2-s1-seed0", 24),
    }


def test_seeds_that_tell_nothing_apart_are_no_setup(scores: list[Path]) -> None:
    runs = [scored.load(folder) for folder in scores[:3]]
    alone = [({**facts, "sft_seed": None}, rows) for facts, rows in runs]
    assert trainings.setups(alone) == ([], [])
    twins = [({**facts, "sft_seed": 7}, rows) for facts, rows in runs]
    made, (note,) = trainings.setups(twins)
    assert made == []
    assert "mamba2-s0.5-seed0 and mamba2-s0.5-seed1" in note
    assert "share training seed 7" in note
    assert trainings.setups(runs[:1]) == ([], [])


def test_pool_sizes_in_folders_of_their_own_are_one_run(scores: list[Path]) -> None:
    runs = [scored.load(folder) for folder in scores[:3]]
    more = [(facts, [{**row, "k": 24} for row in rows]) for facts, rows in runs]
    made, notes = trainings.setups([*runs, *more])
    assert [(s.name, list(s.runs), s.sizes) for s in made] == [("mamba2 s0.5", [0, 1, 2], (4, 24))]
    assert notes == []
    assert [r["k"] for r in trainings.summarise(made)] == [4, 24]

    made, notes = trainings.setups([*runs, *more[:2]])
    where = "of mamba2 s0.5 on simple_python, bm25"
    assert made[0].sizes == (4,)
    assert notes == [f"k = 24 {where} is not averaged: training seeds 2 lack it."]
    rows = figures.shown_rows(tally.summarise([*runs, *more[:2]]), trainings.summarise(made))
    assert [(r["model"], r["k"]) for r in rows] == [
        ("mamba2 s0.5", 4),
        ("mamba2-s0.5-seed0", 24),
        ("mamba2-s0.5-seed1", 24),
    ]

    facts, answers = more[2]
    others = (facts, [{**row, "names": row["names"][::-1]} for row in answers])
    made, notes = trainings.setups([*runs, *more[:2], others])
    assert made[0].sizes == (4,)
    assert notes == [f"k = 24 {where} is not averaged: seeds were asked different pools."]


def test_a_model_without_a_seed_beside_a_setup_is_left_out_by_name(
    scores: list[Path], tmp_path: Path
) -> None:
    runs = [scored.load(folder) for folder in scores]
    facts, rows = runs[3]
    before = ({**facts, "model": "mamba2", "sft_seed": None}, rows)
    made, notes = trainings.setups([*runs, before])
    assert [list(s.runs) for s in made] == [[0, 1, 2]] * 3
    where = "of mamba2 s1 on simple_python, bm25"
    assert notes == [f"mamba2 has no training seed and is in no mean {where}."]
    drawn = figures.draw(tally.summarise([*runs, before]), trainings.summarise(made))
    line = drawn["accuracy_against_scale.svg"].split("<polyline points=")[1].split('"')[1]
    assert len(line.split()) == 3  # one point per scale


def test_setups_of_other_pools_are_not_compared(found: list[trainings.Setup]) -> None:
    moved: dict[int, tally.Run] = {
        seed: (facts, [{**row, "names": row["names"][::-1]} for row in rows])
        for seed, (facts, rows) in found[0].runs.items()
    }
    other = trainings.Setup("x s0.5", "mamba2", 0.5, found[0].setting, moved, (4,))
    tests, (note,) = trainings.differences([other, found[1]])
    assert tests == []
    assert note.startswith(
        "x s0.5 and mamba2 s1 are not compared on simple_python, bm25, k = 4: 40"
    )


def test_the_report_shows_setups_instead_of_their_models(
    scores: list[Path], tmp_path: Path
) -> None:
    report.main(report.Args(scores=tuple(scores), out=tmp_path / "r", explorer_questions=1))
    summary = json.loads((tmp_path / "r/summary.json").read_text())
    assert len(summary["setups"]) == 3
    assert summary["mcnemar"] == []  # setups are compared, not each of their models
    assert len(summary["differences"]) == 2 * len(trainings.RATES)
    text = (tmp_path / "r/accuracy.svg").read_text()
    assert text.count("<title>mamba2 s0.5 (mean of 3 seeds), 4: 70.0 %") == 1
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


def points_of_lines(svg: str) -> list[int]:
    """Return how many points each line of a figure joins."""
    return [len(part.split('"')[0].split()) for part in svg.split('<polyline points="')[1:]]


def test_a_setup_and_a_model_of_its_name_are_two_lines(scores: list[Path]) -> None:
    runs = [scored.load(folder) for folder in scores[:3]]
    noisy = [
        ({**facts, "retriever": "plackett_luce", "beta": 1.0, "utility": "rank"}, rows)
        for facts, rows in runs
    ]
    runs = [*runs, *noisy]
    before = [
        ({**facts, "model": "mamba2 s0.5", "sft_seed": None}, rows)
        for facts, rows in (runs[0], runs[3])
    ]
    made, _ = trainings.setups([*runs, *before])
    drawn = figures.draw(tally.summarise([*runs, *before]), trainings.summarise(made))
    for file, joined in (
        ("accuracy_simple-python-bm25.svg", 1),
        ("accuracy_against_beta_simple-python_rank_k4.svg", 2),
    ):
        lines = points_of_lines(drawn[file])
        assert lines[:2] == [joined, joined], file
        for name in ("mamba2 s0.5", "mamba2 s0.5 (mean of 3 seeds)"):
            assert drawn[file].count(f">{name}</text>") == 1, file
    assert "mamba2 s0.5 (mean of 3 seeds), k=4" in drawn["outcomes_simple-python-bm25.svg"]


@pytest.mark.parametrize("seed", [0, None])
def test_before_and_after_fine_tuning_are_two_lines_against_scale(
    scores: list[Path], seed: int | None
) -> None:
    after = [scored.load(folder) for folder in scores[::3]]
    runs: list[tally.Run] = []
    for facts, rows in after:
        name = f"mamba2-s{facts['gate_scale']:g}"
        runs.append(({**facts, "model": name, "sft_seed": None}, rows))
        runs.append(({**facts, "model": f"{name}-sft", "sft_seed": seed}, rows))
    drawn = figures.draw(tally.summarise(runs), ())["accuracy_against_scale.svg"]
    assert points_of_lines(drawn) == [3, 3]
    for name in ("before fine-tuning, k = 4", "fine-tuned, k = 4"):
        assert drawn.count(f">{name}</text>") == 1


def test_several_models_at_one_place_are_points_without_a_line(scores: list[Path]) -> None:
    runs = [scored.load(folder) for folder in scores]  # seeds, but of nothing that is averaged
    drawn = figures.draw(tally.summarise(runs), ())["accuracy_against_scale.svg"]
    assert points_of_lines(drawn) == []
    assert drawn.count("<title>k = 4, 0.5: ") == 3
    twice = [plots.Point(0, 0.5, 0.4, 0.6)] * 2
    with pytest.raises(AssertionError, match="a line"):
        plots.lines("t", "x", "y", ["1"], [plots.Series("a line", twice)])


def test_models_outside_a_setup_keep_their_own_line(scores: list[Path]) -> None:
    runs = [scored.load(folder) for folder in scores[:4]]  # the fourth is alone at its scale
    made, _ = trainings.setups(runs)
    rows = figures.shown_rows(tally.summarise(runs), trainings.summarise(made))
    assert [r["model"] for r in rows] == ["mamba2 s0.5", "mamba2-s1-seed0"]
