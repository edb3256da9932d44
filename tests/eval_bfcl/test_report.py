import csv
import dataclasses
import json
import math
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eval_bfcl import ceiling, page, plots, pools, report, score, tally
from eval_bfcl.outcomes import OUTCOMES
from gatewright import artifact, bfcl, recall_law
from gatewright.errors import UserError
from gatewright.statistics import mcnemar_exact, wilson_interval
from tests.eval_bfcl.browser import CHROMIUM, Page, chromium
from tests.eval_bfcl.gold import call_text, gold_text, write_results

EVIL = (
    "</script><script>document.title='PWNED'</script><img src=x onerror=\"document.title='PWNED'\">"
)

STATE = dataclasses.asdict(recall_law.State(d=16, n=4, layers=1, vocab=512))


def model(level: int) -> Callable[[bfcl.Question, pools.Row], str]:
    """A model that is right on `level` of every 10 questions, fewer in larger pools."""

    def answer(q: bfcl.Question, row: pools.Row) -> str:
        n = int(q.id.rsplit("_", 1)[1])
        if n % 10 < level - (row.k > 1):
            return gold_text(q)
        return call_text(("made_up", {})) if n % 2 else EVIL

    return answer


@pytest.fixture(scope="module")
def scores(make_pools: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Scores of two gated models and a Llama with BM25, and of one with two weak retrievers."""
    root = tmp_path_factory.mktemp("scores")
    flags: dict[str, Any] = {"split": "simple_python", "pool_sizes": "1,4"}
    bm25 = make_pools(retriever="bm25", **flags)
    weak = [make_pools(retriever="plackett_luce", beta=b, **flags) for b in (0.05, 10.0)]
    runs: list[tuple[str, float | None, int, Path]] = [
        ("mamba2-s2", 2.0, 3, bm25),
        ("mamba2-s0.5", 0.5, 7, bm25),
        ("llama", None, 5, bm25),
        ("mamba2-s0.5", 0.5, 4, weak[0]),
        ("mamba2-s0.5", 0.5, 6, weak[1]),
    ]
    out = []
    for n, (label, scale, level, folder) in enumerate(runs):
        state = None if label == "llama" else STATE
        results = write_results(
            root / f"r{n}",
            folder,
            model(level),
            label=label,
            limit=40,
            gate_scale=scale,
            state=state,
        )
        prompts = {f"simple_python_{i}": f"tools\nshared line\nquestion {i}\n" for i in range(40)}
        from eval_bfcl.results import Results

        for cell in ("pool_size=1/seed=0", "pool_size=4/seed=0"):
            Results(results, label, "simple_python").write_prompts(cell, prompts)
        score.main(score.Args(results=results, pools=folder, out=root / f"s{n}"))
        out.append(root / f"s{n}")
    return out


@pytest.fixture(scope="module")
def made(scores: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report") / "report"
    report.main(report.Args(scores=tuple(scores), out=out, note="A test <b>note</b>."))
    return out


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


def test_the_leaderboard_is_in_the_official_style(made: Path) -> None:
    rows = list(csv.DictReader((made / "leaderboard.csv").read_text().splitlines()))
    assert list(rows[0])[:2] == ["Rank", "Model"]
    assert rows[0]["Overall Acc"] == "70.00%"
    accuracies = [float(r["Overall Acc"].rstrip("%")) for r in rows]
    assert accuracies == sorted(accuracies, reverse=True)
    text = (made / "leaderboard.md").read_text()
    assert text.startswith("40 of 400 questions")
    assert "| mamba2-s0.5 | 0.5 |" in text


def test_mcnemar_compares_models_on_the_same_pools_only(made: Path) -> None:
    tests = json.loads((made / "summary.json").read_text())["mcnemar"]
    assert {t["setting"] for t in tests} == {"simple_python, bm25"}
    tests, others = ([t for t in tests if (t["rate"] == "accuracy") is x] for x in (True, False))
    assert len(tests) == 3 * 2
    assert {t["rate"] for t in others} == {"right_tool", "hallucination"}
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
    assert summary[-1]["accuracy_low"] == wilson_interval(6, 20).low


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
    assert (
        "a prediction of an upper bound, not a measurement" in (made / "leaderboard.md").read_text()
    )
    assert "A prediction, not a measurement" in (made / "index.html").read_text()


def test_a_state_is_read_where_the_law_describes_one(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 512}
    for config, want in (
        ({"model_type": "mamba2", "state_size": 16, **sizes}, (64, 16, 2)),
        ({"model_type": "llama", "state_size": 16, **sizes}, None),
        ({"model_type": "mamba2", **sizes}, None),  # a size is left to transformers' default
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        state = ceiling.read_state(tmp_path)
        assert (state and (state["d"], state["n"], state["layers"])) == want
    assert set(ceiling.predict(None, 8).values()) == {None}


def test_model_names_cannot_break_a_figure() -> None:
    name = '<script>&"</script>'
    svg = plots.lines("t", "x", "y", ["1"], [plots.Series(name, [plots.Point(0, 0.5, 0.4, 0.6)])])
    assert "<script>" not in svg
    ET.fromstring(svg)
    ET.fromstring(plots.outcome_bars(name, [(name, {"correct": 1, "no_call": 3})]))


def test_prompts_are_stored_once_per_line() -> None:
    table = page.LineTable()
    assert [table.add(t) for t in ("a\nb\n", "a\nc", "a\nb\n")] == [0, 1, 0]
    assert table.lines == ["a", "b", "", "c"]
    assert ["\n".join(table.lines[i] for i in t) for t in table.texts] == ["a\nb\n", "a\nc"]


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


@pytest.fixture(scope="module")
def tab(made: Path) -> Iterator[Page]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    with chromium() as opened:
        opened.open(made / "index.html")
        yield opened


ROWS = "[...document.querySelectorAll('#board tbody tr')]"


def test_the_page_says_what_its_outcomes_mean(tab: Page) -> None:
    meaning = tab.run("document.querySelector('details dl').textContent").replace("\n", " ")
    for outcome in set(OUTCOMES) - {"error", "wrong_arguments", "missing_calls", "several_calls"}:
        assert outcome.replace("_", " ") in meaning, outcome
    for phrase in ("wrong arguments", "several or missing calls"):
        assert phrase in meaning


def test_the_page_opens_at_its_first_line(tab: Page) -> None:
    assert tab.run("document.body.scrollHeight > innerHeight")
    assert tab.run("scrollY") == 0


def test_the_list_of_questions_follows_the_selection(tab: Page) -> None:
    tab.run("document.getElementById('list').style.height = '60px'")
    try:
        tab.run("(select(visible.length - 1), 0)")
        assert tab.run("visible.length") > 2
        inside = (
            "((f, b) => b.top >= f.top - 2 && b.bottom <= f.bottom + 2)"
            "(list.getBoundingClientRect(),"
            " list.querySelector('[aria-selected=true]').getBoundingClientRect())"
        )
        assert tab.run(inside)
        assert tab.run("list.scrollTop") > 0
        tab.run("(select(0), 0)")
        assert tab.run(inside)
    finally:
        tab.run("(document.getElementById('list').style.height = '', select(0), 0)")


def test_the_leaderboard_sorts_and_filters_in_a_browser(tab: Page) -> None:
    at = "document.querySelector('th[data-column=accuracy]').cellIndex"
    first = f"{ROWS}.map(r => r.cells[{at}].firstChild.data).map(Number)"
    accuracies = tab.run(first)
    assert len(accuracies) == 10
    assert accuracies == sorted(accuracies, reverse=True)
    tab.run("document.querySelector('th[data-column=accuracy] button').click()")
    assert tab.run(first) == sorted(accuracies)
    assert tab.run("document.querySelector('th[aria-sort]').ariaSort") == "ascending"
    tab.run(
        "(s => { s.value = '0.05'; s.dispatchEvent(new Event('change')); })"
        "(document.querySelector('select[data-filter=beta]'))"
    )
    assert tab.run(f"{ROWS}.length") == 2
    assert tab.run("document.getElementById('count').textContent") == "2 of 10 rows"
    tab.run(
        "(s => { s.value = '*'; s.dispatchEvent(new Event('change')); })"
        "(document.querySelector('select[data-filter=beta]'))"
    )
    assert tab.run(f"{ROWS}.length") == 10


def test_the_explorer_answers_to_the_keyboard(tab: Page) -> None:
    choose = "(s => {{ s.value = '{}'; s.dispatchEvent(new Event('change')); }})({})"
    tab.run(choose.format("1", "document.querySelector('select[data-qfilter=k]')"))
    tab.run("document.getElementById('list').focus()")
    shown = "document.querySelector('#detail h3').textContent"
    assert tab.run(shown) == "simple_python_0"
    tab.press("ArrowDown")
    tab.press("ArrowDown")
    assert tab.run(shown) == "simple_python_2"
    tab.press("ArrowUp")
    assert tab.run(shown) == "simple_python_1"
    tab.press("End")
    assert tab.run(shown) == "simple_python_39"
    assert tab.run("document.querySelector('li[aria-selected=true] span').textContent") == (
        "simple_python_39"
    )
    tab.press("Home")
    assert tab.run("document.getElementById('prompt').textContent") == (
        "tools\nshared line\nquestion 0\n"
    )
    tab.run("document.activeElement.blur()")
    tab.press("/", "/")
    assert tab.run("document.activeElement.type") == "search"
    for letter in "area":
        tab.press(letter, letter)
    assert 0 < tab.run("document.querySelectorAll('#list li').length") < 40
    tab.run("(i => { i.value = ''; i.dispatchEvent(new Event('input')); })(document.activeElement)")
    # Every control is reached by Tab alone.
    tab.run("document.activeElement.blur(); window.scrollTo(0, 0)")
    reached = set()
    for _ in range(60):
        tab.press("Tab")
        reached.add(
            tab.run(
                "(e => e.dataset.filter || e.dataset.qfilter || e.id || e.type || e.tagName)"
                "(document.activeElement)"
            )
        )
    assert {"beta", "retriever", "button", "run", "outcome", "search", "list"} <= reached
    tab.run("document.querySelector('th[data-column=k] button').focus()")
    tab.press("Enter", "\r")
    assert tab.run("document.querySelector('th[aria-sort]').dataset.column") == "k"


def test_hostile_outputs_stay_text_in_a_browser(tab: Page) -> None:
    tab.run(
        "(s => { s.value = 'no_call'; s.dispatchEvent(new Event('change')); })"
        "(document.querySelector('select[data-qfilter=outcome]'))"
    )
    assert tab.run("document.getElementById('raw').textContent") == EVIL
    assert tab.run("document.title") == "Tool pools on BFCL"
    assert tab.run("document.images.length") == 0


@pytest.mark.parametrize("width", [1400, 1280])
def test_the_leaderboard_fits_a_laptops_window(tab: Page, width: int) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    tab.send("Emulation.setDeviceMetricsOverride", size)
    box = "document.getElementById('board').parentElement"
    assert tab.run(f"{box}.scrollWidth - {box}.clientWidth") <= 0
    assert tab.run("document.documentElement.scrollWidth") <= width
    said = tab.run("document.getElementById('same').textContent")
    assert said == "Every row: split simple_python, pool seeds 1, n 40, errors 0."
    assert tab.run("document.querySelector('th[data-column=split]')") is None


def test_light_and_dark_have_contrast_and_nothing_is_fetched(tab: Page) -> None:
    contrast = """(() => {
      const light = c => c.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
        .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((s, v, i) => s + v * [0.2126, 0.7152, 0.0722][i], 0);
      const paper = light(getComputedStyle(document.body).backgroundColor);
      const worst = ['h1', '.note', 'td', 'td .interval', 'th button', '.outcome', '#detail h3',
        'svg text'].map(s => document.querySelector(s)).map(e => getComputedStyle(e))
        .map(s => light(s.fill && s.fill !== 'rgb(0, 0, 0)' ? s.fill : s.color))
        .map(v => (Math.max(v, paper) + 0.05) / (Math.min(v, paper) + 0.05));
      return [paper, Math.min(...worst)];
    })()"""
    papers = {}
    for scheme in ("light", "dark"):
        tab.scheme(scheme)
        papers[scheme], worst = tab.run(contrast)
        assert worst >= 4.5, scheme
    assert papers["light"] > 0.9
    assert papers["dark"] < 0.1
    fetched = [
        e["params"]["request"]["url"]
        for e in tab.events
        if e.get("method") == "Network.requestWillBeSent"
    ]
    assert all(url.startswith("file:") and url.endswith("index.html") for url in fetched)
    errors = [e for e in tab.events if e.get("method") == "Runtime.exceptionThrown"]
    assert not errors
    narrow = {"width": 380, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    tab.send("Emulation.setDeviceMetricsOverride", narrow)
    assert tab.run("document.documentElement.scrollWidth") <= 380
