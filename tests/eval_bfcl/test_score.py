import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval_bfcl import pools, score
from eval_bfcl.outcomes import OUTCOMES
from gatewright import artifact, bfcl
from gatewright.errors import UserError
from tests.eval_bfcl.gold import call_text, gold_text, write_results


def scored(results: Path, pools_folder: Path, out: Path, **flags: object) -> list[dict]:
    score.main(score.Args(results=results, pools=pools_folder, out=out, **flags))  # type: ignore[arg-type]
    return pools.read_jsonl(out / "scores.jsonl")


def test_gold_answers_score_400_of_400_at_every_pool_size(
    pools_1_4: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = write_results(tmp_path / "r", pools_1_4, lambda q, row: gold_text(q))
    rows = scored(results, pools_1_4, tmp_path / "s")
    assert len(rows) == 800
    assert Counter((r["k"], r["outcome"]) for r in rows) == {
        (1, "correct"): 400,
        (4, "correct"): 400,
    }
    assert all(r["called"] == r["gold"] and r["official_valid"] for r in rows)
    assert "100.0 [99.0, 100.0]" in capsys.readouterr().out
    for k in (1, 4):
        path = tmp_path / f"s/pool_size={k}/seed=0/score/gold/non_live"
        lines = (path / "BFCL_v4_simple_python_score.json").read_text().splitlines()
        assert [json.loads(line) for line in lines] == [
            {"accuracy": 1.0, "correct_count": 400, "total_count": 400}
        ]
    artifact.verify(tmp_path / "s")


def mixed_answer(q: bfcl.Question, row: pools.Row) -> str | None:
    """One of every outcome in turn."""
    (call,) = bfcl.gold_calls(q)
    other = next(n for n in (*row.names, "made_up") if n != call.name)
    texts = [
        gold_text(q),
        call_text((call.name, {})),
        call_text((other, call.arguments)),
        call_text(("made_up", {})),
        gold_text(q) + "\n" + gold_text(q),
        "I do not know.",
        "<tool_call>{",
        None,
    ]
    return texts[int(q.id.rsplit("_", 1)[1]) % 8]


def test_outcomes_are_exclusive_and_sum_to_all(pools_1_4: Path, tmp_path: Path) -> None:
    lost = {f"simple_python_{n}": "HTTP 500: out of memory" for n in range(7, 400, 8)}
    results = write_results(tmp_path / "r", pools_1_4, mixed_answer, failures=lost)
    rows = scored(results, pools_1_4, tmp_path / "s")
    at_4 = Counter(r["outcome"] for r in rows if r["k"] == 4)
    assert at_4 == {
        "correct": 50,
        "wrong_arguments": 50,
        "wrong_tool": 50,
        "hallucinated": 50,
        "several_calls": 50,
        "no_call": 50,
        "unparseable": 50,
        "error": 50,
    }
    assert set(at_4) <= set(OUTCOMES)
    failed = next(r for r in rows if r["outcome"] == "error")
    assert (failed["official_valid"], failed["raw"]) == (None, None)
    assert failed["error"] == "HTTP 500: out of memory"
    (summary,) = (
        s for s in artifact.read_manifest(tmp_path / "s")["extra"]["summary"] if s["k"] == 4
    )
    assert (summary["n"], summary["judged"], summary["n_error"]) == (400, 350, 50)
    assert summary["accuracy"] == 50 / 350
    assert summary["hallucination"] == 50 / 350
    assert summary["hallucination_of_valid_calls"] == 50 / 250
    assert summary["recall"] == 0.945


def test_long_outputs_are_cut_and_say_so(pools_1_4: Path, tmp_path: Path) -> None:
    results = write_results(tmp_path / "r", pools_1_4, lambda q, row: "x" * 20_001, limit=1)
    row = scored(results, pools_1_4, tmp_path / "s")[0]
    assert (len(row["raw"]), row["raw_chars"]) == (20_000, 20_001)


def test_one_hostile_answer_does_not_cost_the_others_their_scores(
    pools_1_4: Path, tmp_path: Path
) -> None:
    def answer(q: bfcl.Question, row: pools.Row) -> str:
        return "[f(a=0x" + "f" * 4_000 + ")]" if q.id.endswith("_0") else "[g(a=1)]"

    results = write_results(tmp_path / "r", pools_1_4, answer, limit=2, style="python")
    rows = scored(results, pools_1_4, tmp_path / "s")
    assert [r["outcome"] for r in rows] == ["unparseable", "hallucinated"] * 2


def test_cells_that_the_pools_no_longer_hold_are_missed(pools_1_4: Path, tmp_path: Path) -> None:
    results = write_results(tmp_path / "r", pools_1_4, lambda q, row: "", limit=3)
    folder = shutil.copytree(pools_1_4, tmp_path / "p")
    shutil.rmtree(folder / "pool_size=4")
    with pytest.raises(UserError, match="--pools .*pool_size=4/.* has 0 bytes"):
        scored(results, folder, tmp_path / "s")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] = {n: f for n, f in manifest["files"].items() if "=4" not in n}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="--pools .*: lacks pool_size=4/seed=0, which .*/r answer"):
        scored(results, folder, tmp_path / "s")


@pytest.mark.parametrize("name", score.FACTS)
def test_results_of_another_version_are_refused(name: str, pools_1_4: Path, tmp_path: Path) -> None:
    results = write_results(tmp_path / "r", pools_1_4, lambda q, row: "", limit=1)
    manifest = json.loads((results / "manifest.json").read_text())
    *inside, last = name.split(".")
    del (manifest["extra"][inside[0]] if inside else manifest["extra"])[last]
    (results / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=f"manifest.json: has no extra.{name} .*eval_bfcl.generate"):
        scored(results, pools_1_4, tmp_path / "s")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"cells": 4}, "extra.cells is 4, not a list"),
        ({"cells": []}, "extra.cells is no list of pool cells"),
        ({"cells": [["x"]]}, "extra.cells is no list of pool cells"),
        ({"questions": "2"}, "extra.questions is '2', not a whole number"),
        ({"questions": -1}, "extra.questions is -1, and --pools holds 400"),
        ({"questions": 401}, "extra.questions is 401, and --pools holds 400"),
        ({"label": 5}, "extra.label is 5, not text"),
        ({"pools": "x"}, "extra.pools is 'x', not an object"),
        ({"style": ["hermes"]}, r"extra.style is \['hermes'\], not text"),
        ({"split": "simple_java"}, "extra.split is 'simple_java', its pools' 'simple_python'"),
        ({"state": {"d": 4}}, "extra.state is damaged"),
        ({"failed": "0"}, "extra.failed is '0', not a whole number"),
    ],
)
def test_an_edited_manifest_is_refused(
    extra: dict[str, Any], message: str, pools_1_4: Path, tmp_path: Path
) -> None:
    results = write_results(tmp_path / "r", pools_1_4, lambda q, row: "", limit=2)
    manifest = json.loads((results / "manifest.json").read_text())
    manifest["extra"] |= extra
    (results / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=f"manifest.json: {message}.*eval_bfcl.generate"):
        scored(results, pools_1_4, tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_failures_and_missing_answers_are_as_many(pools_1_4: Path, tmp_path: Path) -> None:
    results = write_results(tmp_path / "r", pools_1_4, mixed_answer, limit=8)
    assert len(scored(results, pools_1_4, tmp_path / "s")) == 16
    manifest = json.loads((results / "manifest.json").read_text())
    assert manifest["extra"]["failed"] == 2
    manifest["extra"]["failed"] = 1
    (results / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="--results .* says 1 failed, but 2 answers are missing"):
        scored(results, pools_1_4, tmp_path / "t")


@pytest.mark.parametrize(
    ("file", "line", "message"),
    [
        ("failures.jsonl", '{"id": ["a"], "error": "x"}', r"failures.jsonl:1: id is \['a'\], not"),
        ("failures.jsonl", '{"id": "a", "error": 3}', "failures.jsonl:1: error is 3, not text"),
        (None, '{"id": "simple_python_0", "input_token_count": "7"}', ":1: input_token_count is"),
        (None, '{"id": "simple_python_0", "latency": NaN}', ":1: is not JSON .NaN is not JSON."),
    ],
)
def test_lines_of_another_type_are_named(
    file: str | None, line: str, message: str, pools_1_4: Path, tmp_path: Path
) -> None:
    results = write_results(tmp_path / "r", pools_1_4, lambda q, row: "", limit=1)
    cell = results / "pool_size=1/seed=0"
    path = cell / file if file else bfcl.result_file(cell / "result", "gold", "simple_python")
    path.write_text(line + "\n")
    with pytest.raises(UserError, match=message):
        scored(results, pools_1_4, tmp_path / "s")


@pytest.mark.parametrize(("name", "value"), [("style", "xml"), ("dots", "auto")])
def test_what_this_version_does_not_know_is_refused(
    name: str, value: str, pools_1_4: Path, tmp_path: Path
) -> None:
    more: dict[str, Any] = {name: value}
    results = write_results(tmp_path / "r", pools_1_4, lambda q, row: "", limit=1, **more)
    with pytest.raises(UserError, match=f"manifest.json: extra.{name} is '{value}', not one of"):
        scored(results, pools_1_4, tmp_path / "s")


def test_scores_belong_to_their_pools(
    pools_1_4: Path, make_pools: Callable[..., Path], tmp_path: Path
) -> None:
    results = write_results(tmp_path / "r", pools_1_4, lambda q, row: "", limit=3)
    other = make_pools(split="simple_python", retriever="oracle", pool_sizes="1,4")
    with pytest.raises(UserError, match="these are not the pools that .* was asked"):
        scored(results, other, tmp_path / "s")
    with pytest.raises(UserError, match="--results .*: is a folder of kind pools, but kind"):
        scored(pools_1_4, pools_1_4, tmp_path / "s")
    (results / "manifest.json").unlink()
    with pytest.raises(UserError, match="unfinished"):
        scored(results, pools_1_4, tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_damaged_results_are_named_by_line(pools_1_4: Path, tmp_path: Path) -> None:
    for n, (line, message) in enumerate(
        [
            ("{broken\n", ":4: is not JSON .*; remove the line"),
            ('{"id": "simple_python_0", "result": ""}\n', ":4: answers simple_python_0 a second"),
            ('{"id": "simple_python_9", "result": ""}\n', "which the pools do not ask"),
        ]
    ):
        results = write_results(tmp_path / f"r{n}", pools_1_4, lambda q, row: "", limit=3)
        file = bfcl.result_file(results / "pool_size=1/seed=0/result", "gold", "simple_python")
        with open(file, "a") as f:
            f.write(line)
        with pytest.raises(UserError, match=message):
            scored(results, pools_1_4, tmp_path / "s")


def test_lost_answers_are_no_errors_of_the_machinery(pools_1_4: Path, tmp_path: Path) -> None:
    results = write_results(tmp_path / "r", pools_1_4, lambda q, row: "", limit=3)
    file = bfcl.result_file(results / "pool_size=4/seed=0/result", "gold", "simple_python")
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:1]))
    with pytest.raises(UserError, match=f"--results .*{file.name}: has .* bytes, not the"):
        scored(results, pools_1_4, tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_java_and_javascript_are_scored_through_their_literals(
    make_pools: Callable[..., Path], tmp_path: Path
) -> None:
    for split, right in (("simple_java", 97), ("simple_javascript", 50)):
        folder = make_pools(split=split, retriever="bm25", pool_sizes="4")
        results = write_results(tmp_path / f"r-{split}", folder, lambda q, row: gold_text(q))
        rows = scored(results, folder, tmp_path / f"s-{split}")
        assert sum(r["outcome"] == "correct" for r in rows) == right
