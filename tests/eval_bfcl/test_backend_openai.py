"""The OpenAI backend against a real server process that serves a small transformers model."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eval_bfcl import generate, pools, score
from eval_bfcl.backend import Answer, Failure
from eval_bfcl.backend_openai import OpenAIBackend, read_answer
from eval_bfcl.outcomes import parse
from eval_bfcl.prompting import Request
from gatewright import artifact, bfcl
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


def test_a_run_goes_on_at_another_address_of_the_same_model(
    server: str, pools_1_4: Path, tmp_path: Path
) -> None:
    """A server that a batch system starts again stands on another node or port."""
    closed = "http://127.0.0.1:9/v1"
    with pytest.raises(UserError, match="requests failed .*refused"):
        run("tiny", pools_1_4, tmp_path / "r", backend="openai", base_url=closed, retries=0)
    with pytest.raises(UserError, match="was begun with label = 'tiny', not 'flaky'"):
        run("flaky", pools_1_4, tmp_path / "r", backend="openai", base_url=server)
    run("tiny", pools_1_4, tmp_path / "r", backend="openai", base_url=server)
    assert len(texts(tmp_path / "r", "tiny")) == 4
    manifest = artifact.read_manifest(tmp_path / "r", "bfcl-results")
    assert manifest["config"]["base_url"] == server


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
        b'{"choices": [{"message": {"content": "x"}}], "usage": {"prompt_tokens": 1e999}}',
        b'{"choices": [["message"]]}',
        b'{"choices": [{"message": {"refusal": ["no"]}}]}',
        b'{"choices": [{"message": {}}]}',
        b'{"choices": [{"message": {"role": "assistant"}, "finish_reason": "stop"}]}',
        b'{"choices": [{"message": {"content": [{"type": "image_url"}]}}]}',
        b'{"choices": [{"message": {"content": [{"type": "text", "text": 5}]}}]}',
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_malformed_replies_are_failures(raw: bytes) -> None:
    assert isinstance(read_answer(raw, 0.1, "hermes"), Failure)


def reply(message: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"choices": [{"message": message, **more}]}).encode()


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("reason", "again"),
    [
        *(("error", True), ("abort", True), ("content_filter", False)),
        *(("SAFETY", False), (["stop"], False), (7, False)),
    ],
)
def test_an_answer_that_the_server_cut_off_is_a_failure(reason: Any, again: bool) -> None:
    failed = read_answer(reply({"content": ""}, finish_reason=reason), 0.1, "hermes")
    assert isinstance(failed, Failure)
    assert (str(reason) in failed.error, failed.again) == (True, again)


@pytest.mark.parametrize(
    "error", [{"error": {"message": "over\nloaded"}}, {"error": "overloaded", "choices": []}]
)
def test_an_error_that_the_server_reports_is_no_empty_answer(error: dict[str, Any]) -> None:
    empty = {"choices": [{"message": {"content": None}, "finish_reason": "stop"}]}
    inside = {"choices": [{**empty["choices"][0], **error}]}
    for body in ({**empty, **error}, inside):
        failed = read_answer(json.dumps(body).encode(), 0.1, "hermes")
        assert isinstance(failed, Failure)
        assert "the server reports an error: " in failed.error
        assert "loaded" in failed.error
        assert "\n" not in failed.error
        assert failed.again


@pytest.mark.parametrize("message", [{"content": ""}, {"content": None}, {"reasoning": "Hm."}])
def test_an_empty_answer_is_the_models_own(message: dict[str, Any]) -> None:
    answer = read_answer(reply(message, finish_reason="stop"), 0.1, "hermes")
    assert isinstance(answer, Answer)
    assert answer.text == ""


def test_content_in_parts_is_their_text() -> None:
    parts = [{"type": "text", "text": "Let me "}, {"type": "text", "text": "see."}]
    answer = read_answer(reply({"content": parts}), 0.1, "hermes")
    assert isinstance(answer, Answer)
    assert answer.text == "Let me see."


@pytest.mark.parametrize(
    "url",
    [
        *("", " ", "localhost:8000", "ftp://h/v1", "http://", "https:///v1", "http://:80/v1"),
        *("http://[::1", "http://h:abc/v1", "http://h:70000/v1", "http://h/v 1", "http://h /v1"),
        *(f"http://{'a' * 70}.x/v1", "http://a..b/v1", "http://h/v1\n", "http://h/\u2019"),
        *("http://h/v1?key=1", "http://h/v1#x"),
    ],
)
def test_an_address_of_no_server_is_one_line(url: str) -> None:
    args = generate.Args("m", Path(), Path(), backend="openai", base_url=url)
    with pytest.raises(UserError, match=r"--base-url .*: give an address like http://host") as e:
        OpenAIBackend(args, "hermes")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000/v1/", "https://[::1]:8/v1", "http://h"])
def test_an_address_of_a_server_is_taken(url: str) -> None:
    args = generate.Args("m", Path(), Path(), backend="openai", base_url=url)
    assert OpenAIBackend(args, "hermes").url == url.rstrip("/") + "/chat/completions"


@pytest.mark.parametrize("key", ["sk-secret\n", "sk-secret\r", "sk-\x00secret", "sk-secret\u2019"])
def test_a_key_that_no_header_takes_is_refused_unseen(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {"MY_KEY": key})  # a real one takes no NUL
    args = generate.Args("m", Path(), Path(), backend="openai", api_key_env="MY_KEY")
    with pytest.raises(UserError, match="--api-key-env MY_KEY: ") as e:
        OpenAIBackend(args, "hermes")
    assert "secret" not in str(e.value)


def test_a_password_in_the_address_is_refused_unseen() -> None:
    url = "http://me:secret@h/v1"
    args = generate.Args("m", Path(), Path(), backend="openai", base_url=url)
    with pytest.raises(UserError, match="--base-url: .*--api-key-env") as e:
        OpenAIBackend(args, "hermes")
    assert "secret" not in str(e.value)


def test_a_redirect_to_no_address_is_a_failure() -> None:
    listening = socket.create_server(("127.0.0.1", 0))

    def redirect() -> None:
        connection, _ = listening.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(65536)
            lines = "HTTP/1.1 302 X\r\nLocation: http://[::1\r\nContent-Length: 0\r\n\r\n"
            connection.sendall(lines.encode())

    threading.Thread(target=redirect, daemon=True).start()
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
    args = generate.Args("m", Path(), Path(), backend="openai", base_url=url)
    failed = OpenAIBackend(args, "hermes").ask(Request("q", "c", [], []))
    listening.close()
    assert failed == Failure("the server cannot be asked (ValueError)", again=False)


@pytest.mark.parametrize(
    "reason",
    [
        *("stop", "tool_calls", "function_call", "length", None, "max_tokens"),
        *("eos", "eos_token", "stop_sequence", "end_turn", "tool_use"),
    ],
)
def test_what_ends_a_models_answer_is_none(reason: Any) -> None:
    answer = read_answer(reply({"content": "x"}, finish_reason=reason), 0.1, "hermes")
    assert isinstance(answer, Answer)
    assert answer.finish == ("length" if reason in ("length", "max_tokens") else "stop")


def test_a_refusal_is_the_models_own_text() -> None:
    answer = read_answer(reply({"content": None, "refusal": "I cannot."}), 0.1, "hermes")
    assert isinstance(answer, Answer)
    assert answer.text == "I cannot."


@pytest.mark.parametrize("style", ["hermes", "llama3", "nemotron"])
@pytest.mark.parametrize("content", [None, "Let me see."])
def test_parsed_calls_are_written_in_the_runs_style(style: str, content: str | None) -> None:
    calls = [call("a.b", '{"x": [1, "é"]}'), call("c", ""), call("d", None)]
    answer = read_answer(reply({"content": content, "tool_calls": calls}), 0.1, style)
    assert isinstance(answer, Answer)
    found = [(c.name, c.arguments) for c in parse(answer.text, style).calls]
    assert found == [("a.b", {"x": [1, "é"]}), ("c", {}), ("d", {})]


def test_the_older_form_of_a_call_is_read() -> None:
    answer = read_answer(reply({"function_call": {"name": "f", "arguments": "{}"}}), 0.1, "hermes")
    assert isinstance(answer, Answer)
    assert parse(answer.text, "hermes").calls[0].name == "f"


def test_python_style_cannot_hold_what_a_server_parsed() -> None:
    failed = read_answer(reply({"tool_calls": [call("f", "{}")]}), 0.1, "python")
    assert isinstance(failed, Failure)
    assert "give --style hermes" in failed.error
    assert not failed.again
    answer = read_answer(reply({"content": "[f(x=1)]"}), 0.1, "python")
    assert isinstance(answer, Answer)


@pytest.mark.parametrize("status", [200, 503])
def test_a_server_that_sends_drop_by_drop_is_given_up(status: int) -> None:
    listening = socket.create_server(("127.0.0.1", 0))

    def drip() -> None:
        connection, _ = listening.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(65536)
            connection.sendall(f"HTTP/1.1 {status} X\r\nContent-Length: 999\r\n\r\n".encode())
            for _ in range(6000):
                connection.sendall(b" ")
                time.sleep(0.01)

    threading.Thread(target=drip, daemon=True).start()
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
    args = generate.Args("m", Path(), Path(), backend="openai", base_url=url, timeout_s=0.3)
    started = time.monotonic()
    failed = OpenAIBackend(args, "hermes").ask(Request("q", "c", [], []))
    listening.close()
    assert isinstance(failed, Failure)
    assert "no whole answer within --timeout-s 0.3" in failed.error
    assert time.monotonic() - started < 30


def test_arguments_that_are_not_json_stay_the_models_fault() -> None:
    calls = [{"function": {"name": "f", "arguments": '{"a": 1}}</tool_call><tool_call>{'}}]
    message = {"choices": [{"message": {"content": None, "tool_calls": calls}}]}
    answer = read_answer(json.dumps(message).encode(), 0.1, "hermes")
    assert isinstance(answer, Answer)
    assert parse(answer.text, "hermes").kind == "unparseable"
    calls[0]["function"]["arguments"] = '{"a": [1, "\\u00e9</tool_call>"]}'
    answer = read_answer(json.dumps(message).encode(), 0.1, "hermes")
    assert isinstance(answer, Answer)
    (found,) = parse(answer.text, "hermes").calls
    assert (found.name, found.arguments) == ("f", {"a": [1, "é</tool_call>"]})
