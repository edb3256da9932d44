import csv
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from eval_bfcl import page, pools, report, score, scored
from gatewright import artifact, bfcl, recall_law
from tests.eval_bfcl.browser import CHROMIUM, chromium
from tests.eval_bfcl.gold import gold_text, write_results

TOKENS = {"a": 8, "b": 256, "c": 256}


def answer(question: bfcl.Question, row: pools.Row) -> str:
    return gold_text(question) if int(question.id[-1]) < 5 else "no"


def flag_over_context(results: Path) -> None:
    """Say of every answer at k = 4 that its prompt was longer than the model's positions."""
    (path,) = results.glob("pool_size=4/seed=0/result/**/*.json")
    answers = [json.loads(line) | {"over_context": True} for line in path.open()]
    path.write_text("".join(json.dumps(row) + "\n" for row in answers))
    manifest = json.loads((results / artifact.MANIFEST).read_text())
    manifest["files"][str(path.relative_to(results))]["bytes"] = path.stat().st_size
    (results / artifact.MANIFEST).write_text(json.dumps(manifest))


@pytest.fixture(scope="module")
def made(pools_1_4: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of three models that were not asked alike."""
    root = tmp_path_factory.mktemp("page")
    run: dict[str, Any] = {"backend": "transformers", "prompt": "system", "dtype": "float32"}
    run["state"] = dataclasses.asdict(recall_law.State(d=16, n=4, layers=1, vocab=512))
    folders = []
    for label, tokens in TOKENS.items():
        run |= {"label": label, "limit": 10, "max_new_tokens": tokens}
        results = write_results(root / label, pools_1_4, answer, **run)
        if label == "a":
            flag_over_context(results)
        folders.append(root / f"s{label}")
        score.main(score.Args(results=results, pools=pools_1_4, out=folders[-1]))
    report.main(report.Args(scores=tuple(folders), out=root / "r", explorer_questions=1))
    return root / "r"


def test_what_models_were_asked_differently_is_said(made: Path) -> None:
    note = "Models were not all asked alike, max_new_tokens differs (8: a; 256: b, c)."
    assert json.loads((made / "summary.json").read_text())["notes"] == [note]
    assert f"- {note}" in (made / "leaderboard.md").read_text()
    assert f'<p class="note">{note}</p>' in (made / "index.html").read_text()
    rows = list(csv.DictReader((made / "results.csv").open()))
    assert {r["model"]: int(r["max_new_tokens"]) for r in rows} == TOKENS
    for name, value in (
        ("prompt", "system"),
        ("style", "hermes"),
        ("dots", "keep"),
        ("backend", "transformers"),
        ("dtype", "float32"),
    ):
        assert {r[name] for r in rows} == {value}, name


def test_answers_over_the_context_are_counted_in_the_leaderboard(made: Path) -> None:
    board = list(csv.DictReader((made / "leaderboard.csv").open()))
    over = {(r["Model"], r["Pool Size"]): r["Over Context"] for r in board}
    assert over == {(m, k): "10" if (m, k) == ("a", "4") else "0" for m in "abc" for k in "14"}
    assert "| Over Context |" in (made / "leaderboard.md").read_text()


def test_the_page_shows_shares_in_per_cent_and_calls_as_text(made: Path, tmp_path: Path) -> None:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    html, n = re.subn(
        r'"predicted_ceiling":[0-9.]+',
        '"predicted_ceiling":0.934',
        (made / "index.html").read_text(),
    )
    assert n == 6
    (tmp_path / "index.html").write_text(html)
    with chromium() as opened:
        opened.open(tmp_path / "index.html")
        said = opened.run("document.getElementById('same').textContent")
        calls = opened.run("document.getElementById('calls').textContent")
        over = opened.run(
            "[...document.querySelectorAll('#board tbody tr')].map(r => Number(r.cells["
            "document.querySelector('th[data-column=over_context]').cellIndex].textContent))"
        )
    assert "predicted ceiling 93.4 %" in said
    assert calls.startswith('{"name": "calculate_triangle_area", "arguments": {')
    assert sorted(over) == [0] * 5 + [10]


def test_the_explorer_shows_calls_as_they_were_written() -> None:
    facts = {"model": "m", "split": "simple_python", "retriever": "bm25", "beta": None}
    arguments = {"a": 5.0, "b": 12345678901234567890, "c": float("nan")}
    item: dict[str, Any] = dict.fromkeys(scored.FIELDS)
    item |= {"id": "simple_python_0", "k": 1, "seed": 0, "names": ["f"]}
    item |= {"calls": [{"name": "f", "arguments": arguments}], "raw": "x" * score.KEPT_CHARS}
    brief = {**item, "seed": 1, "raw": "x"}
    whole = {**item, "seed": 2, "raw_chars": score.KEPT_CHARS}
    longer = {**item, "seed": 3, "raw_chars": score.KEPT_CHARS + 1}
    shown = page.explorer([(facts, [item, brief, whole, longer])], [Path("nowhere")], 1)
    text = '{"name": "f", "arguments": {"a": 5.0, "b": 12345678901234567890, "c": NaN}}'
    assert [i["calls"] for i in shown["items"]] == [[text]] * 4
    assert [i["cut"] for i in shown["items"]] == [score.KEPT_CHARS, None, None, score.KEPT_CHARS]
    assert isinstance(shown["gold"]["simple_python_0"], str)
    page.script_json(shown)


def test_prompts_are_stored_once_per_line() -> None:
    table = page.LineTable()
    assert [table.add(t) for t in ("a\nb\n", "a\nc", "a\nb\n")] == [0, 1, 0]
    assert table.lines == ["a", "b", "", "c"]
    assert ["\n".join(table.lines[i] for i in t) for t in table.texts] == ["a\nb\n", "a\nc"]
