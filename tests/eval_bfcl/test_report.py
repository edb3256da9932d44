import csv
import json
import math
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from eval_bfcl import figures, plots, report, scored, tally
from gatewright import artifact, bfcl, recall_law
from gatewright.errors import UserError
from gatewright.statistics import holm, mcnemar_exact, wilson_interval
from tests.eval_bfcl.five_models import EVIL, n


def test_summary_and_csv_hold_the_rates_with_their_intervals(made: Path) -> None:
    summary = json.loads((made / "summary.json").read_text())
    assert summary["headline"].startswith("40 of 400 questions of simple_python")
    (row,) = (
        r
        for r in summary["results"]
        if (r["model"], r["retriever"], r["k"], r["seed"]) == ("mamba2-s0.5", "bm25", 4, "all")
    )
    expected = wilson_interval(24, 40)
    assert (row["accuracy"], row["accuracy_low"], row["accuracy_high"]) == (
        round(expected.value, 6),
        round(expected.low, 6),
        round(expected.high, 6),
    )
    assert row["hallucination"] == 8 / 40
    assert row["hallucination_of_valid_calls"] == 8 / 32
    rows = list(csv.DictReader((made / "results.csv").read_text().splitlines()))
    assert len(rows) == len(summary["results"]) == 5 * 2  # one seed of pools: pooled rows only
    assert rows[0].keys() == summary["results"][0].keys()


def test_how_much_answers_vary_is_counted_per_pool_size_and_over_all(made: Path) -> None:
    summary = json.loads((made / "summary.json").read_text())
    names = ("different_answers", "different_names", "top_name_outside", "top_name_outside_answers")
    rows = {
        r["k"]: tuple(r[name] for name in names)
        for r in csv.DictReader((made / "results.csv").open())
        if (r["model"], r["retriever"]) == ("mamba2-s0.5", "bm25")
    }
    # 7 then 6 of every ten questions are answered right, all in their own words, which pool
    # sizes share; the others get a made-up call, or text without any.
    questions = bfcl.load_split("simple_python")[:40]
    golds = [{g for q in questions if n(q) % 10 < level for g in q.gold_names} for level in (7, 6)]
    expected = {
        "1": ("30", str(len(golds[0]) + 1), "made_up", "8"),
        "4": ("26", str(len(golds[1]) + 1), "made_up", "8"),
    }
    assert rows == expected
    (whole,) = (
        r
        for r in summary["variety"]
        if (r["model"], r["setting"]) == ("mamba2-s0.5", "simple_python, bm25")
    )
    assert [whole[name] for name in names] == [30, len(golds[0]) + 1, "made_up", 16]
    assert whole["judged"] == 80


def test_the_most_called_name_outside_is_counted_once_an_answer() -> None:
    def score(raw: str, *called: str) -> dict[str, Any]:
        return {"raw": raw, "names": ["in"], "calls": [{"name": c} for c in called]}

    found = tally.variety([score("a", "x", "x", "in"), score("b", "y", "in"), score("b", "y")])
    assert list(found.values()) == [2, 3, "y", 2]
    assert list(tally.variety([score("a", "y", "x")]).values())[2:] == ["x", 1]
    assert list(tally.variety([score("a")]).values()) == [1, 0, None, 0]


def test_a_called_name_that_is_no_utf8_is_told_as_its_escape() -> None:
    score = {"raw": "", "names": [], "calls": [{"name": "a\ud800"}]}
    assert tally.variety([score])["top_name_outside"] == "a\\ud800"


def test_the_leaderboard_is_in_the_official_style(made: Path) -> None:
    rows = list(csv.DictReader((made / "leaderboard.csv").read_text().splitlines()))
    assert list(rows[0])[:2] == ["Rank", "Model"]
    assert rows[0]["Overall Acc"] == "70.00%"
    accuracies = [float(r["Overall Acc"].rstrip("%")) for r in rows]
    assert accuracies == sorted(accuracies, reverse=True)
    text = (made / "leaderboard.md").read_text()
    assert text.startswith("40 of 400 questions")
    assert "| mamba2-s0.5 | 0.5 |" in text


@pytest.mark.parametrize(
    ("said", "word", "note"),
    [
        ({}, "N/A", None),
        ({"official": [{"cell": "a", "left_out": []}]}, "same", None),
        (
            {"official": [{"left_out": ["x"]}, {"left_out": ["x", "y"]}]},
            "same, 3 left out",
            "The official run cannot judge 3 answers of llama on simple_python, bm25; on all "
            "others its verdicts are ours.",
        ),
        (
            {"official_failed": "they differ on simple_python_2"},
            "failed",
            "The official run did not confirm the accuracy of llama on simple_python, bm25: they "
            "differ on simple_python_2.",
        ),
    ],
)
def test_what_the_official_run_said_stands_beside_the_accuracy(
    scores: list[Path], tmp_path: Path, said: dict[str, Any], word: str, note: str | None
) -> None:
    shutil.copytree(scores[2], tmp_path / "s")
    manifest = json.loads((tmp_path / "s" / artifact.MANIFEST).read_text())
    manifest["extra"] |= said
    (tmp_path / "s" / artifact.MANIFEST).write_text(json.dumps(manifest))
    out = tmp_path / "r"
    report.main(report.Args(scores=(scores[0], tmp_path / "s"), out=out, explorer_questions=1))
    board = list(csv.DictReader((out / "leaderboard.csv").open()))
    assert {(r["Model"], r["Official Run"]) for r in board} == {
        ("mamba2-s2", "N/A"),
        ("llama", word),
    }
    summary = json.loads((out / "summary.json").read_text())
    assert summary["notes"] == ([] if note is None else [note])
    assert "official" not in summary["results"][0]
    for file in ("leaderboard.md", "index.html"):
        assert note is None or note in (out / file).read_text()


@pytest.mark.parametrize("damaged", [5, [5], ["x"], [{"left_out": 5}]])
def test_a_damaged_comparison_with_the_official_run_is_one_line(damaged: Any) -> None:
    with pytest.raises(UserError, match="extra.official in the manifest of llama is damaged"):
        tally.official_run({"label": "llama", "official": damaged})


def test_mcnemar_compares_models_on_the_same_pools_only(made: Path) -> None:
    tests = json.loads((made / "summary.json").read_text())["mcnemar"]
    assert {t["setting"] for t in tests} == {"simple_python, bm25"}
    assert {t["rate"] for t in tests} == {"accuracy", "right_tool", "hallucination"}
    for rate in ("accuracy", "right_tool", "hallucination"):  # every pair and k, all alike too
        family = [t for t in tests if t["rate"] == rate]
        assert len(family) == 3 * 2
        assert [t["p_holm"] for t in family] == holm([t["p"] for t in family])
    assert "| p | p Holm |" in (made / "leaderboard.md").read_text()
    tests = [t for t in tests if t["rate"] == "accuracy"]
    (test,) = (t for t in tests if {t["a"], t["b"]} == {"mamba2-s0.5", "mamba2-s2"} and t["k"] == 1)
    assert sorted((test["only_a"], test["only_b"])) == [0, 16]
    assert test["p"] == mcnemar_exact(16, 0)


def test_the_table_lists_weak_gates_first_and_llama_last(
    scores: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report.main(report.Args(scores=tuple(scores[:3]), out=tmp_path / "r"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "40 of 400 questions of simple_python (a part: see --limit)"
    assert [line.split()[0] for line in lines[2:8]] == [
        *["mamba2-s0.5"] * 2,
        *["mamba2-s2"] * 2,
        *["llama"] * 2,
    ]
    assert " 70.0 [54.6, 81.9]" in lines[2]
    assert {p.name for p in (tmp_path / "r").glob("*.svg")} == {
        "accuracy.svg",
        "right_tool.svg",
        "valid_call.svg",
        "hallucination.svg",
        "outcomes.svg",
    }


def test_seeds_are_pooled_and_their_spread_is_told() -> None:
    facts = {"model": "m", "split": "s", "retriever": "bm25", "beta": None, "utility": None}
    base = {
        "k": 4,
        "valid_call": True,
        "retrieved": True,
        "gold": "g",
        "official_valid": True,
        "defaults_valid": True,
        "new_tokens": 1,
        "prompt_tokens": 1,
        "over_context": False,
        "raw": "",
        "calls": [],
        "names": ["g"],
    }
    rows = [
        {**base, "seed": seed, "id": str(i), "outcome": "correct" if i < right else "no_call"}
        for seed, right in ((0, 2), (1, 4))
        for i in range(10)
    ]
    summary = tally.summarise([(facts, rows)])
    assert [r["seed"] for r in summary] == [0, 1, "all"]
    assert [r["accuracy"] for r in summary] == [0.2, 0.4, 0.3]
    assert summary[-1]["accuracy_sd_over_seeds"] == pytest.approx(0.2 / math.sqrt(2))
    assert (summary[-1]["judged"], summary[-1]["judged_questions"]) == (20, 10)
    assert summary[-1]["accuracy_low"] == wilson_interval(3, 10).low  # ten questions, asked twice


def test_a_line_goes_from_left_to_right_whatever_folder_came_first(scores: list[Path]) -> None:
    facts, rows = scored.load(scores[2])
    parts = [(facts, [s for s in rows if s["k"] == k]) for k in (4, 1)]
    svg = figures.draw(tally.summarise(parts), ())["accuracy.svg"]
    (line,) = (part.split('"')[0] for part in svg.split('<polyline points="')[1:])
    places = [float(spot.split(",")[0]) for spot in line.split()]
    assert len(places) == 2
    assert places == sorted(places)


def test_where_no_tool_is_right_there_is_no_figure_of_the_right_one(scores: list[Path]) -> None:
    runs = []
    for scale in (0.5, 1.0, 2.0):
        facts, rows = scored.load(scores[0])
        runs.append(({**facts, "gate_scale": scale}, [{**row, "gold": None} for row in rows]))
    drawn = figures.draw(tally.summarise(runs), ())
    assert {"accuracy.svg", "accuracy_against_scale.svg"} < drawn.keys()
    assert not any(name.startswith("right_tool") for name in drawn)


def test_the_page_names_what_it_was_made_from(made: Path, scores: list[Path]) -> None:
    foot = (made / "index.html").read_text().split('id="sources">')[1].split("</footer>")[0]
    for folder in scores:
        assert f"sha256 {artifact.content_hash(folder)}" in foot
        assert str(folder) not in foot
    manifest = artifact.read_manifest(made)
    assert f"git revision {manifest['git_revision'] or 'unknown'}" in foot
    assert foot.count("<li>mamba2-s0.5 · simple_python, bm25 · k = 1, 4: ") == 1


def test_figures_are_well_formed_and_hold_every_point(made: Path) -> None:
    names = sorted(p.name for p in made.glob("*.svg"))
    assert "accuracy_simple-python-bm25.svg" in names
    assert "accuracy_against_beta_simple-python_minmax_k4.svg" in names
    for name in names:
        root = ET.fromstring((made / name).read_text())
        assert root.tag.endswith("svg")
        assert "prefers-color-scheme: dark" in (made / name).read_text()
    text = (made / "accuracy_simple-python-bm25.svg").read_text()
    assert text.count("<title>mamba2-s0.5, ") == 2
    assert "mamba2-s0.5, 4: 60.0 % [44.6, 73.7]" in text
    beta = (made / "accuracy_against_beta_simple-python_minmax_k4.svg").read_text()
    assert "mamba2-s0.5, 0.05: 30.0 %" in beta
    assert "mamba2-s0.5, BM25: 60.0 %" in beta


def test_a_predicted_ceiling_stands_beside_the_measured_curve_by_name(made: Path) -> None:
    rows = json.loads((made / "summary.json").read_text())["results"]
    ceilings = {(r["model"], r["k"]): r["predicted_ceiling"] for r in rows}
    b = recall_law.mean_of_max(512)
    for k in (1, 4):
        want = recall_law.recall(16, 4, k, 0.5, b)
        assert (
            ceilings["mamba2-s2", k] == ceilings["mamba2-s0.5", k] == pytest.approx(want, abs=1e-6)
        )
        assert ceilings["llama", k] is None
    text = (made / "accuracy_simple-python-bm25.svg").read_text()
    shown = f"predicted ceiling: D 16, N 4, 1 layer, 4: {100 * ceilings['mamba2-s2', 4]:.1f} %"
    assert text.count(f"<title>{shown}</title>") == 1  # one curve for both gates, no interval
    assert "predicted" not in (made / "hallucination_simple-python-bm25.svg").read_text()
    board = {r["Model"]: r for r in csv.DictReader((made / "leaderboard.csv").open())}
    half = recall_law.facts_at(0.5, 16, 4, 0.5, b)
    assert board["mamba2-s2"]["Predicted Tools At 50%"] == f"{half:.0f}"
    assert board["llama"]["Predicted Ceiling"] == "N/A"
    said = (made / "leaderboard.md").read_text(), (made / "index.html").read_text()
    assert "not a measurement and no bound" in said[0]
    assert "A prediction, not a measurement and no bound" in said[1]
    assert "upper bound" not in "".join(said)  # trained cells exceed it


def test_model_names_cannot_break_a_figure() -> None:
    name = '<script>&"</script>'
    svg = plots.lines("t", "x", "y", ["1"], [plots.Series(name, [plots.Point(0, 0.5, 0.4, 0.6)])])
    assert "<script>" not in svg
    ET.fromstring(svg)
    ET.fromstring(plots.outcome_bars(name, [(name, {"correct": 1, "no_call": 3})]))


def texts(svg: str) -> dict[str, tuple[float, str | None, str]]:
    """Return every text of a figure: shown words -> x, anchor and title."""
    space = "{http://www.w3.org/2000/svg}"
    return {
        t.text or "": (
            float(t.get("x") or 0),
            t.get("text-anchor"),
            t.findtext(f"{space}title", ""),
        )
        for t in ET.fromstring(svg).iter(f"{space}text")
    }


@pytest.mark.parametrize("length", [8, 30, 31, 45, 60, 90])
def test_names_neither_leave_a_figure_nor_meet_the_next(length: int) -> None:
    names = [letter * length for letter in "abc"]
    point = [plots.Point(0, 0.5, 0.4, 0.6)]
    legend = texts(plots.lines("t", "x", "y", ["1"], [plots.Series(n, point) for n in names]))
    bars = texts(plots.outcome_bars("t", [(n, {"correct": 1}) for n in names]))
    for drawn, most in ((legend, 60), (bars, 45)):
        for name in names:
            (text,) = (t for t in drawn if t.startswith(name[:8]))
            x, anchor, title = drawn[text]
            assert (text, title) == ((name, "") if length <= most else (text, name))
            assert text == name or text.endswith("…")
            drawn_width = 6.8 * len(text)
            assert x - drawn_width >= 0 if anchor == "end" else x + drawn_width <= plots.WIDTH
    starts = sorted({x for text, (x, *_) in legend.items() if text[:8] in {n[:8] for n in names}})
    assert len(starts) == (2 if length <= 31 else 1)  # columns
    if len(starts) == 2:
        assert starts[0] + 6.8 * length < starts[1] - plots.LEGEND_MARK + 1


def test_every_point_tells_its_own_value() -> None:
    points = [plots.Point(i, v, v - 0.1, v + 0.1) for i, v in enumerate((0.25, 0.5))]
    root = ET.fromstring(plots.lines("t", "x", "y", ["1", "8"], [plots.Series("m", points)]))
    space = "{http://www.w3.org/2000/svg}"
    told = [[t.text for t in g.findall(f"{space}title")] for g in root.iter(f"{space}g")]
    # A browser shows an element's first title: several in one group would hide the others.
    assert [t for t in told if t] == [["m, 1: 25.0 % [15.0, 35.0]"], ["m, 8: 50.0 % [40.0, 60.0]"]]


def test_the_page_needs_nothing_else(made: Path) -> None:
    html = (made / "index.html").read_text()
    assert "default-src 'none'" in html
    for word in ("src=", "href=", "url(", "@import"):
        for part in html.split('id="data">')[0].split(word)[1:]:
            assert part.startswith(('"#', "'none'")), part[:60]
    assert EVIL not in html
    assert "A test &lt;b&gt;note&lt;/b&gt;." in html
    artifact.verify(made)


def test_bad_input_is_one_line(scores: list[Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="mamba2-s2 on simple_python, bm25, k = 1 is given twice"):
        report.main(report.Args(scores=(scores[0], scores[0]), out=tmp_path / "r"))
    with pytest.raises(UserError, match="--scores .*: no such folder"):
        report.main(report.Args(scores=(tmp_path / "x",), out=tmp_path / "r"))
    with pytest.raises(UserError, match="--explorer-questions -1"):
        report.Args(scores=(scores[0],), out=tmp_path / "r", explorer_questions=-1)
    assert not (tmp_path / "r").exists()
