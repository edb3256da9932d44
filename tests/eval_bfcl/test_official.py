import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from eval_bfcl import official, pools, score
from eval_bfcl.prompting import NameMap
from gatewright import artifact, bfcl
from gatewright.errors import UserError
from tests.eval_bfcl.gold import call_text, gold_text, write_results

HANGS = "[" + ",".join(["[1]"] * 40) + ","
"""A JavaScript array on which the official converter takes exponential time."""


def scored(results: Path, pools_folder: Path, out: Path, env: Path = Path("env")) -> Path:
    flags = {"results": results, "pools": pools_folder, "out": out}
    score.main(score.Args(**flags, official=True, official_env=env))
    return out


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[Mapping[str, Any]]]:
    """Replace the official evaluator by one that finds everything wrong; return what it got."""
    got: list[Sequence[Mapping[str, Any]]] = []

    def evaluate(
        env: Path, answers: Sequence[Mapping[str, Any]], *_: str
    ) -> tuple[dict[str, Any], set[str]]:
        got.append(answers)
        return {"accuracy": 0.0}, {a["id"] for a in answers}

    monkeypatch.setattr(official, "prepare", lambda env: None)
    monkeypatch.setattr(official, "evaluate", evaluate)
    return got


def test_a_single_question_of_disagreement_is_an_error_that_keeps_our_scores(
    pools_1_4: Path, asked: list[Sequence[Mapping[str, Any]]], tmp_path: Path
) -> None:
    def answer(q: bfcl.Question, row: pools.Row) -> str:
        return gold_text(q) if q.id.endswith("_2") and row.k == 4 else "no"

    results = write_results(tmp_path / "r", pools_1_4, answer, limit=3)
    said = "--official: pool_size=4/seed=0: .* differ on simple_python_2 .our scores are in .*/s.$"
    with pytest.raises(UserError, match=said):
        scored(results, pools_1_4, tmp_path / "s")
    manifest = artifact.read_manifest(tmp_path / "s")
    assert "differ on simple_python_2" in manifest["extra"]["official_failed"]
    assert "official" not in manifest["extra"]
    assert len(pools.read_jsonl(tmp_path / "s/scores.jsonl")) == 6
    artifact.verify(tmp_path / "s")


def test_answers_that_the_official_checker_fails_on_are_left_out_by_name(
    make_pools: Callable[..., Path],
    asked: list[Sequence[Mapping[str, Any]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(bfcl, "LONGEST_CHECK_S", 0.05)
    folder = make_pools(split="simple_javascript", retriever="bm25", pool_sizes="1")
    results = write_results(tmp_path / "r", folder, js_answer(hangs=True), limit=JS_QUESTIONS)
    (line,) = artifact.read_manifest(scored(results, folder, tmp_path / "s"))["extra"]["official"]
    hung = [
        r["id"]
        for r in pools.read_jsonl(tmp_path / "s/scores.jsonl")
        if r["error_type"] == "checker_raised:timeout"
    ]
    assert len(hung) == 1
    assert line["left_out"] == hung
    assert (line["questions"], line["our_accuracy"]) == (JS_QUESTIONS - 1, 0)
    assert [set(a) for a in asked[0]] == [{"id", "result"}] * (JS_QUESTIONS - 1)  # no latency
    assert hung[0] not in {a["id"] for a in asked[0]}
    assert f"left out, as the official run fails on them: {hung[0]}" in capsys.readouterr().out


def test_questions_whose_published_answer_breaks_the_checker_are_left_out(
    pools_1_4: Path,
    asked: list[Sequence[Mapping[str, Any]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def check(question: bfcl.Question, calls: Sequence[bfcl.CallLike]) -> bfcl.Verdict:
        if question.id == "simple_python_1":
            raise bfcl.GoldAnswerError("KeyError")
        return bfcl.Verdict(False, "value_error:others", "no")

    monkeypatch.setattr(bfcl, "check", check)
    results = write_results(tmp_path / "r", pools_1_4, lambda q, row: gold_text(q), limit=3)
    lines = artifact.read_manifest(scored(results, pools_1_4, tmp_path / "s"))["extra"]["official"]
    assert [(x["questions"], x["left_out"]) for x in lines] == [(2, ["simple_python_1"])] * 2
    assert [[a["id"] for a in answers] for answers in asked] == [
        ["simple_python_0", "simple_python_2"]
    ] * 2


JS_QUESTIONS = 12


def js_answer(hangs: bool) -> Callable[[bfcl.Question, pools.Row], str]:
    """Answer wrong throughout, once with an array that is never converted."""
    arrays = [
        (q.id, c, name)
        for q in bfcl.load_split("simple_javascript")[:JS_QUESTIONS]
        for c in bfcl.gold_calls(q)
        for name in c.arguments
        if q.tools[0]["parameters"]["properties"][name]["type"] == "array"
    ]
    id, call, name = arrays[0]
    hostile = call_text((call.name, {**call.arguments, name: HANGS}))
    return lambda q, row: hostile if hangs and q.id == id else "no"


def test_an_answer_that_is_no_utf8_is_left_out(
    pools_1_4: Path, asked: list[Sequence[Mapping[str, Any]]], tmp_path: Path
) -> None:
    texts = {1: "\ud800", 4: "é"}
    results = write_results(tmp_path / "r", pools_1_4, lambda q, row: texts[row.k], limit=1)
    lines = artifact.read_manifest(scored(results, pools_1_4, tmp_path / "s"))["extra"]["official"]
    assert [(x["questions"], x["left_out"]) for x in lines] == [(0, ["simple_python_0"]), (1, [])]


def test_no_answer_at_all_is_no_disagreement(
    pools_1_4: Path, asked: list[Sequence[Mapping[str, Any]]], tmp_path: Path
) -> None:
    results = write_results(tmp_path / "r", pools_1_4, lambda q, row: None, limit=2)
    lines = artifact.read_manifest(scored(results, pools_1_4, tmp_path / "s"))["extra"]["official"]
    assert [(x["questions"], x["official_accuracy"]) for x in lines] == [(0, None)] * 2
    assert not asked


def stub(env: Path, body: str) -> None:
    """Make an environment whose interpreter is a script of ours."""
    (env / "bin").mkdir(parents=True)
    (env / ".ready").write_text("")
    python = env / "bin" / "python"
    python.write_text(f"#!{sys.executable}\n{body}")
    python.chmod(0o755)


WRITES_SCORES = """
import json, sys
from pathlib import Path
_, driver, root, results, scores, label, split, style = sys.argv[1:]
assert Path(driver).name == "official_driver.py" and Path(root, "eval_bfcl").is_dir()
name = f"{label}/non_live/BFCL_v4_{split}_"
rows = [json.loads(x) for x in Path(results, name + "result.json").read_text().splitlines()]
out = Path(scores, name + "score.json")
out.parent.mkdir(parents=True)
lines = [{"accuracy": 0.5}, {"id": rows[0]["id"]}]
out.write_text("".join(json.dumps(x) + "\\n" for x in lines))
"""


def test_a_relative_environment_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(tmp_path / "env", WRITES_SCORES)
    monkeypatch.chdir(tmp_path)
    answers = [{"id": "a", "result": "\ud800"}, {"id": "b", "result": ""}]
    said = official.evaluate(Path("env"), answers, "m", "simple_python", "hermes")
    assert said == ({"accuracy": 0.5}, {"a"})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise SystemExit('stdev of one value')", "--official-env .*env failed: stdev of one val"),
        ("", "BFCL_v4_simple_python_score.json: no such file"),
        (None, "--official-env .*env: cannot be run .*Permission denied"),
    ],
)
def test_an_environment_that_does_not_work_is_one_line(
    body: str | None, message: str, tmp_path: Path
) -> None:
    stub(tmp_path / "env", body or "")
    if body is None:
        (tmp_path / "env/bin/python").chmod(0o644)
    with pytest.raises(UserError, match=message) as said:
        official.evaluate(tmp_path / "env", [], "m", "simple_python", "hermes")
    assert "\n" not in str(said.value)


def test_the_official_driver_says_who_runs_it() -> None:
    for flags, code in ((["--help"], 0), (["one"], 2)):
        done = subprocess.run(
            [sys.executable, official.DRIVER, *flags], capture_output=True, text=True, check=False
        )
        assert done.returncode == code
        assert "eval_bfcl.score --official runs this" in done.stdout + done.stderr
        assert "Traceback" not in done.stderr


OFFICIAL_ENV = Path(official.ROOT / "runs/bfcl_official_env")


with_official_env = pytest.mark.skipif(
    not official.ready(OFFICIAL_ENV),
    reason=f"{OFFICIAL_ENV} is absent; eval_bfcl.score --official makes it",
)


@with_official_env
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
    scored(results, folder, tmp_path / "s", OFFICIAL_ENV)
    (line,) = artifact.read_manifest(tmp_path / "s")["extra"]["official"]
    assert 0 < line["official_accuracy"] == line["our_accuracy"] < 1
    assert not line["left_out"]


@with_official_env
@pytest.mark.parametrize("dots", ["keep", "underscore"])
def test_the_official_evaluator_agrees_on_one_question_and_on_twins(
    dots: str, make_pools: Callable[..., Path], tmp_path: Path
) -> None:
    """With underscores, two tools of some pools differ in a number alone."""
    folder = make_pools(split="multiple", retriever="bm25", pool_sizes="24")

    def answer(q: bfcl.Question, row: pools.Row) -> str:
        names = NameMap(row.names, dots)  # type: ignore[arg-type]
        return call_text(*((names.shown(c.name), c.arguments) for c in bfcl.gold_calls(q)))

    for limit in (1, 200):
        results = write_results(tmp_path / f"r{limit}", folder, answer, limit=limit, dots=dots)
        out = scored(results, folder, tmp_path / f"s{limit}", OFFICIAL_ENV)
        (line,) = artifact.read_manifest(out)["extra"]["official"]
        assert line["official_accuracy"] == line["our_accuracy"] == 1


@with_official_env
def test_the_official_evaluator_is_spared_what_it_hangs_on(
    make_pools: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_pools(split="simple_javascript", retriever="bm25", pool_sizes="1")
    results = write_results(tmp_path / "r", folder, js_answer(hangs=True), limit=JS_QUESTIONS)
    (line,) = artifact.read_manifest(scored(results, folder, tmp_path / "s", OFFICIAL_ENV))[
        "extra"
    ]["official"]
    assert len(line["left_out"]) == 1
    assert line["official_accuracy"] == 0
