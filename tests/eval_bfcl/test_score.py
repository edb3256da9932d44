import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from eval_bfcl import official, pools, score
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
            ("{broken\n", ":4: is not a result row"),
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


def test_a_single_question_of_disagreement_with_the_official_evaluator_is_an_error(
    pools_1_4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = write_results(tmp_path / "r", pools_1_4, mixed_answer, limit=6)
    said: dict[str, tuple[dict, set[str]]] = {}
    monkeypatch.setattr(official, "prepare", lambda env: None)
    monkeypatch.setattr(official, "evaluate", lambda env, folder, *a: said[folder.parts[-3]])
    wrong = {f"simple_python_{n}" for n in range(1, 6)}
    said["pool_size=1"] = ({"accuracy": 1 / 6}, wrong)
    said["pool_size=4"] = ({"accuracy": 1 / 6}, wrong)
    scored(results, pools_1_4, tmp_path / "s", official=True)
    said["pool_size=4"] = ({"accuracy": 1 / 6}, wrong - {"simple_python_1"} | {"simple_python_0"})
    with pytest.raises(UserError, match="pool_size=4/seed=0: .* differ on simple_python_0"):
        scored(results, pools_1_4, tmp_path / "s2", official=True)
    assert not (tmp_path / "s2").exists()


def test_the_official_driver_says_who_runs_it() -> None:
    for flags, code in ((["--help"], 0), (["one"], 2)):
        done = subprocess.run(
            [sys.executable, official.DRIVER, *flags], capture_output=True, text=True, check=False
        )
        assert done.returncode == code
        assert "eval_bfcl.score --official runs this" in done.stdout + done.stderr
        assert "Traceback" not in done.stderr


OFFICIAL_ENV = Path(official.ROOT / "runs/bfcl_official_env")


@pytest.mark.skipif(
    not official.ready(OFFICIAL_ENV),
    reason=f"{OFFICIAL_ENV} is absent; eval_bfcl.score --official makes it",
)
@pytest.mark.parametrize("split", ["simple_python", "irrelevance", "parallel", "simple_java"])
def test_the_official_evaluator_agrees_to_the_digit(
    split: str, make_pools: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_pools(split=split, retriever="bm25", pool_sizes="4")

    def answer(q: bfcl.Question, row: pools.Row) -> str:
        n = int(q.id.rsplit("_", 1)[1])
        if n % 3 == 0 or not q.gold:
            return "No." if n % 2 else call_text((q.tools[0]["name"], {}))
        return gold_text(q) if n % 3 == 1 else gold_text(q).replace("1", "2")

    results = write_results(tmp_path / "r", folder, answer)
    scored(results, folder, tmp_path / "s", official=True, official_env=OFFICIAL_ENV)
    (line,) = artifact.read_manifest(tmp_path / "s")["extra"]["official"]
    assert 0 < line["official_accuracy"] == line["our_accuracy"] < 1
