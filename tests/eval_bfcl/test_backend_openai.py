"""The OpenAI backend against a real server process that serves a small transformers model."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eval_bfcl import generate, pools, score
from eval_bfcl.backend import Answer, Failure
from eval_bfcl.backend_openai import read_answer
from eval_bfcl.outcomes import parse
from gatewright import bfcl
from gatewright.errors import UserError

ROOT = Path(generate.__file__).parent.parent


@pytest.fixture(scope="module")
def server(models: dict[str, Path]) -> Iterator[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "tests/eval_bfcl/chat_server.py", str(models["llama"])],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    port = process.stdout.readline().strip()
    assert port, "the server did not start"
    yield f"http://127.0.0.1:{port}/v1"
    process.kill()
    process.wait()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    pause = time.sleep
    monkeypatch.setattr(time, "sleep", lambda s: pause(min(s, 0.01)))


def run(model: str, pools_folder: Path, out: Path, **flags: Any) -> None:
    flags = {"limit": 4, "max_new_tokens": 8, "pool_sizes": "4", "retries": 1, **flags}
    generate.main(generate.Args(model=model, pools=pools_folder, out=out, **flags))


def texts(out: Path, name: str) -> list[dict]:
    path = bfcl.result_file(out / pools.cell_name(4, 0) / "result", name, "simple_python")
    return pools.read_jsonl(path)


def test_a_servers_answers_equal_those_of_the_same_model_here(
    server: str, models: dict[str, Path], pools_1_4: Path, tmp_path: Path
) -> None:
    run("tiny", pools_1_4, tmp_path / "s", backend="openai", base_url=server, dots="keep")
    run(str(models["llama"]), pools_1_4, tmp_path / "t")
    served, local = texts(tmp_path / "s", "tiny"), texts(tmp_path / "t", "llama")
    for key in ("id", "result", "input_token_count", "output_token_count", "finish"):
        assert [r[key] for r in served] == [r[key] for r in local], key


def test_parsed_calls_come_back_under_the_data_names(
    server: str, pools_1_4: Path, tmp_path: Path
) -> None:
    """The server sees underscores, the scores know the dotted names."""
    run("tiny-parsed", pools_1_4, tmp_path / "r", backend="openai", base_url=server, limit=8)
    rows = texts(tmp_path / "r", "tiny-parsed")
    score.main(score.Args(results=tmp_path / "r", pools=pools_1_4, out=tmp_path / "s"))
    scores = pools.read_jsonl(tmp_path / "s/scores.jsonl")
    assert [s["called"] for s in scores] == [s["names"][0] for s in scores]
    assert any("." in s["called"] for s in scores)
    assert not any("." in json.loads(r["result"].split("\n")[1])["name"] for r in rows)
    assert {s["outcome"] for s in scores} <= {"wrong_tool", "wrong_arguments"}


def test_a_busy_server_is_asked_again(server: str, pools_1_4: Path, tmp_path: Path) -> None:
    run("flaky", pools_1_4, tmp_path / "r", backend="openai", base_url=server, limit=6)
    assert len(texts(tmp_path / "r", "flaky")) == 6


@pytest.mark.parametrize(
    ("model", "reason"),
    [("broken", "not a chat completion"), ("full", "HTTP 400: .*maximum context length")],
)
def test_what_is_no_answer_is_not_stored(
    model: str, reason: str, server: str, pools_1_4: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"4 of 4 requests failed .*{reason}"):
        run(model, pools_1_4, tmp_path / "r", backend="openai", base_url=server)
    assert not list((tmp_path / "r").rglob("*_result.json"))


def test_no_key_and_no_server_are_failures(
    server: str, pools_1_4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(UserError, match="HTTP 401"):
        run("tiny", pools_1_4, tmp_path / "a", backend="openai", base_url=server, retries=0)
    closed = "http://127.0.0.1:9/v1"
    with pytest.raises(UserError, match="requests failed .*refused"):
        run("tiny", pools_1_4, tmp_path / "b", backend="openai", base_url=closed, retries=0)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"null",
        b'{"choices": []}',
        b'{"choices": [{"message": null}]}',
        b'{"choices": [{"message": {"content": 5}}]}',
        b'{"choices": [{"message": {"tool_calls": [{}]}}]}',
        b'{"choices": [{"message": {"content": "x"}}], "usage": 7}',
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_malformed_replies_are_failures(raw: bytes) -> None:
    assert isinstance(read_answer(raw, 0.1), Failure)


def test_arguments_that_are_not_json_stay_the_models_fault() -> None:
    calls = [{"function": {"name": "f", "arguments": '{"a": 1}}</tool_call><tool_call>{'}}]
    reply = {"choices": [{"message": {"content": None, "tool_calls": calls}}]}
    answer = read_answer(json.dumps(reply).encode(), 0.1)
    assert isinstance(answer, Answer)
    assert parse(answer.text, "hermes").kind == "unparseable"
    calls[0]["function"]["arguments"] = '{"a": [1, "\\u00e9</tool_call>"]}'
    answer = read_answer(json.dumps(reply).encode(), 0.1)
    assert isinstance(answer, Answer)
    (call,) = parse(answer.text, "hermes").calls
    assert (call.name, call.arguments) == ("f", {"a": [1, "é</tool_call>"]})
