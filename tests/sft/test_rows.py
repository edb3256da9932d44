"""Every kind of broken row: kept, repaired or dropped as stated, and counted."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sft.ledger import Ledger
from sft.rows import Chat, Dropped, lines, read_row
from tests.sft.material import call, python_m, tool

USER = {"role": "user", "content": "Weather in Oslo?"}
WEATHER = tool("weather", "city")
NEWS = tool("news", "topic")
ASK = call("weather", {"city": "Oslo"})


def row(messages: list[Any], tools: Any = None, **more: Any) -> dict[str, Any]:
    return {
        "uuid": "u",
        "messages": messages,
        "tools": [WEATHER] if tools is None else tools,
        **more,
    }


def assistant(*calls: Any, content: Any = "", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls), **more}


def result(content: Any = "5 C", **more: Any) -> dict[str, Any]:
    return {"role": "tool", "content": content, **more}


SAY = {"role": "assistant", "content": "It is 5 C."}
TWO = (call("weather", {"city": "Oslo"}), call("weather", {"city": "Rome"}))
WITH_IDS = (call("weather", {"city": "Oslo"}, id="a"), call("weather", {"city": "Rome"}, id="b"))
SAME_ID = call("weather", {}, id="a")

# name -> (row or raw line, "kept" | repairs | reason of the drop)
CASES: dict[str, tuple[Any, str | list[str]]] = {
    "plain call": (row([USER, assistant(ASK)]), "kept"),
    "arguments as JSON string": (
        row([USER, assistant(call("weather", '{"city": "Oslo"}'))]),
        "kept",
    ),
    "no call, text only": (row([USER, SAY]), "kept"),
    "no tools, no call": (row([USER, SAY], []), "kept"),
    "tools null, no call": (row([USER, SAY]) | {"tools": None}, "kept"),
    "system message": (row([{"role": "system", "content": "Be kind."}, USER, SAY]), "kept"),
    "reasoning": (row([USER, SAY | {"reasoning_content": "hm"}], reasoning="on"), "kept"),
    "ids and results complete": (
        row(
            [
                USER,
                assistant(*WITH_IDS),
                result(tool_call_id="a"),
                result(tool_call_id="b"),
                SAY,
            ]
        ),
        "kept",
    ),
    "call without results at the end": (row([USER, SAY, USER, assistant(*WITH_IDS)]), "kept"),
    "arguments in a list of one": (
        row([USER, assistant(call("weather", [{"city": "Oslo"}]))]),
        ["arguments taken out of a list"],
    ),
    "arguments an empty list": (
        row([USER, assistant(call("weather", []))]),
        ["missing arguments taken as {}"],
    ),
    "arguments a longer list": (
        row([USER, assistant(call("weather", [1, 2]))]),
        "call arguments are a list",
    ),
    "arguments null": (
        row([USER, assistant(call("weather", None))]),
        ["missing arguments taken as {}"],
    ),
    "arguments an empty string": (
        row([USER, assistant(call("weather", " "))]),
        ["missing arguments taken as {}"],
    ),
    "arguments encoded twice": (
        row([USER, assistant(call("weather", json.dumps('{"city": "Oslo"}')))]),
        ["arguments encoded twice"],
    ),
    "arguments not JSON": (
        row([USER, assistant(call("weather", "{city: Oslo"))]),
        "call arguments are not valid JSON",
    ),
    "arguments NaN": (
        row([USER, assistant(call("weather", '{"city": NaN}'))]),
        "call arguments are not valid JSON",
    ),
    "arguments a number": (
        row([USER, assistant(call("weather", 5))]),
        "call arguments are not an object",
    ),
    "results without ids": (
        row([USER, assistant(*TWO), result("1"), result("2"), SAY]),
        ["call ids made up", "results without ids matched by order"],
    ),
    "results in another order": (
        row(
            [
                USER,
                assistant(*WITH_IDS),
                result("2", tool_call_id="b"),
                result("1", tool_call_id="a"),
                SAY,
            ]
        ),
        ["results put in the calls' order"],
    ),
    "results with unknown ids": (
        row([USER, assistant(*WITH_IDS), result(tool_call_id="x"), result(tool_call_id="y"), SAY]),
        ["results with unknown ids matched by order"],
    ),
    "call ids repeated": (
        row(
            [
                USER,
                assistant(call("weather", {}, id="a"), call("weather", {}, id="a")),
                result(),
                result(),
                SAY,
            ]
        ),
        ["repeated call ids renumbered", "results without ids matched by order"],
    ),
    "too few results": (
        row([USER, assistant(*TWO), result(), SAY]),
        "calls and results do not balance",
    ),
    "too many results": (
        row([USER, assistant(ASK), result(), result(), SAY]),
        "calls and results do not balance",
    ),
    "result without a call": (row([USER, result(), SAY]), "tool result without a call"),
    "result first": (row([result(), USER, SAY]), "tool result without a call"),
    "structured result": (
        row(
            [USER, assistant(call("weather", {}, id="a")), result({"t": 5}, tool_call_id="a"), SAY]
        ),
        ["structured tool result written as JSON"],
    ),
    "several system messages": (
        row([{"role": "system", "content": "A."}, {"role": "system", "content": "B."}, USER, SAY]),
        ["several system messages joined"],
    ),
    "empty system message": (
        row([{"role": "system", "content": ""}, USER, SAY]),
        ["empty system message removed"],
    ),
    "developer role": (row([{"role": "developer", "content": "A."}, USER, SAY]), "kept"),
    "text parts": (
        row([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, SAY]),
        ["text parts joined"],
    ),
    "an image": (
        row([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, SAY]),
        "content is not text",
    ),
    "function-level required": (
        row(
            [USER, assistant(ASK)],
            [
                {
                    "type": "function",
                    "function": {
                        "name": "weather",
                        "parameters": {
                            "type": "object",
                            "properties": {"city": {"type": "string"}},
                        },
                        "required": ["city"],
                    },
                }
            ],
        ),
        ["function-level required moved into parameters"],
    ),
    "same tool twice": (
        row([USER, assistant(ASK)], [WEATHER, WEATHER]),
        ["duplicate tool removed"],
    ),
    "conflicting tool names": (
        row([USER, assistant(ASK)], [tool("weather", "zip"), WEATHER]),
        ["conflicting tool names: kept the schema that fits"],
    ),
    "bare tool": (row([USER, assistant(ASK)], [WEATHER["function"]]), ["bare tool wrapped"]),
    "bare call": (
        row([USER, assistant({"name": "weather", "arguments": {}})]),
        ["bare call wrapped"],
    ),
    "tools as a string": (
        row([USER, assistant(ASK)], json.dumps([WEATHER])),
        ["tools parsed from a string"],
    ),
    "tool without a name": (
        row([USER, assistant(ASK)], [WEATHER, {"type": "function", "function": {}}]),
        ["tool without a name removed"],
    ),
    "tools a number": (row([USER, SAY], 5), "tools is not a list"),
    "call to an absent tool": (
        row([USER, assistant(call("news", {}))]),
        "call to a tool that is not offered",
    ),
    "call without a name": (row([USER, assistant(call("", {}))]), "call without a tool name"),
    "call not an object": (row([USER, assistant("weather")]), "call is not an object"),
    "turns after the last answer": (
        row([USER, SAY, USER]),
        ["turns after the last assistant turn cut"],
    ),
    "no assistant": (row([USER]), "no assistant turn"),
    "no user": (row([SAY]), "no user message"),
    "empty user": (row([{"role": "user", "content": " "}, SAY]), "empty user message"),
    "empty assistant": (row([USER, assistant()]), "empty assistant turn"),
    "unknown role": (row([{"role": "narrator", "content": "x"}, USER, SAY]), "unknown role"),
    "no messages": (row([]), "no messages"),
    "message a string": (row(["hello"]), "message is not an object"),
    "not an object": ("[1, 2]\n", "line is not a JSON object"),
    "not JSON": ('{"messages": [}\n', "line is not JSON"),
    "half a character in a message": (
        row([{"role": "user", "content": "hi \ud800"}, SAY]),
        "half a character (lone UTF-16 surrogate)",
    ),
    "half a character in a tool's name": (
        row([USER, SAY], [tool("x\ud800")]),
        "half a character (lone UTF-16 surrogate)",
    ),
    "half a character in the uuid": (
        row([USER, SAY]) | {"uuid": "\udfff"},
        "half a character (lone UTF-16 surrogate)",
    ),
    "half a character in arguments as JSON string": (
        row([USER, assistant(call("weather", '{"city": "\\ud800"}'))]),
        "half a character (lone UTF-16 surrogate)",
    ),
    "a character of two escapes": (
        row([{"role": "user", "content": "hi \U0001f326"}, SAY]),
        "kept",
    ),
    "function-level required holds lists": (
        row(
            [USER, SAY],
            [
                {
                    "function": WEATHER["function"]
                    | {"parameters": {"type": "object", "properties": {}}, "required": [["city"]]}
                }
            ],
        ),
        "required holds something other than names",
    ),
    "a key twice": (
        '{"uuid": "u", "messages": [{"role": "user", "role": "tool", "content": "x"}]}\n',
        "line is not JSON",
    ),
    "a key twice in the arguments": (
        row([USER, assistant(call("weather", '{"city": "Oslo", "city": "Rome"}'))]),
        "call arguments are not valid JSON",
    ),
    "a known id and none": (
        row([USER, assistant(*WITH_IDS), result(tool_call_id="b"), result(), SAY]),
        "ids of results fit the calls in part",
    ),
    "one id for two results": (
        row([USER, assistant(*WITH_IDS), *[result(tool_call_id="b")] * 2, SAY]),
        "ids of results fit the calls in part",
    ),
    "results of repeated call ids in another order": (
        row(
            [
                USER,
                assistant(SAME_ID, SAME_ID, WITH_IDS[1]),
                *(result(tool_call_id=i) for i in "baa"),
                SAY,
            ]
        ),
        "ids of results fit the calls in part",
    ),
    "results of repeated call ids in their order": (
        row(
            [
                USER,
                assistant(SAME_ID, SAME_ID, WITH_IDS[1]),
                *(result(tool_call_id=i) for i in "aab"),
                SAY,
            ]
        ),
        ["repeated call ids renumbered", "results without ids matched by order"],
    ),
    "conflicting tool names, no schema fits": (
        row([USER, assistant(ASK)], [tool("weather", "zip"), tool("weather", "place")]),
        "conflicting tool names, and no schema fits the call",
    ),
    "conflicting tool names, not called": (
        row([USER, SAY], [tool("weather", "zip"), tool("weather", "place")]),
        ["conflicting tool names: kept the schema that fits"],
    ),
    "cut line": ('{"uuid": "u", "messages": [{"role"\n', "line is not JSON"),
    "not UTF-8": (b'{"uuid": "\xff"}\n', "line is not JSON"),
    "nested without end": ('{"messages": ' + "[" * 100_000 + "\n", "line is not JSON"),
}


def as_line(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    return (value if isinstance(value, str) else json.dumps(value) + "\n").encode()


def read(value: Any, **kwargs: Any) -> Chat:
    return read_row(as_line(value), **kwargs)


@pytest.mark.parametrize("name", CASES)
def test_each_kind_is_kept_repaired_or_dropped_as_stated(name: str) -> None:
    value, expected = CASES[name]
    if isinstance(expected, str) and expected != "kept":
        with pytest.raises(Dropped) as caught:
            read(value)
        assert caught.value.reason == expected
    else:
        chat = read(value)
        wanted = [] if expected == "kept" else expected
        assert sorted(chat.repairs) == sorted(wanted)


def test_what_comes_out_is_uniform() -> None:
    for name, (value, expected) in CASES.items():
        if isinstance(expected, str) and expected != "kept":
            continue
        chat = read(value)
        assert chat.messages[-1]["role"] == "assistant", name
        assert all(m["role"] != "system" for m in chat.messages[1:])
        names = [t["function"]["name"] for t in chat.tools]
        assert len(set(names)) == len(names)
        assert set(chat.called) <= set(names)
        waiting: list[str] = []
        for message in chat.messages:
            assert isinstance(message["content"], str)
            for one in message.get("tool_calls", ()):
                assert isinstance(one["function"]["arguments"], dict)
                waiting.append(one["id"])
            if message["role"] == "tool":
                assert message["tool_call_id"] == waiting.pop(0)


def test_repairs_say_what_they_mean() -> None:
    assert read(CASES["arguments encoded twice"][0]).messages[1]["tool_calls"][0]["function"][
        "arguments"
    ] == {"city": "Oslo"}
    fits = read(CASES["conflicting tool names"][0]).tools
    assert fits == [WEATHER]
    moved = read(CASES["function-level required"][0]).tools[0]["function"]
    assert moved["parameters"]["required"] == ["city"]
    assert "required" not in moved
    structured = read(CASES["structured result"][0]).messages
    assert json.loads(structured[2]["content"]) == {"t": 5}
    ordered = read(CASES["results in another order"][0]).messages
    assert [m["content"] for m in ordered if m["role"] == "tool"] == ["1", "2"]
    assert read(CASES["several system messages"][0]).messages[0]["content"] == "A.\n\nB."


def test_reasoning_is_dropped_kept_or_rendered() -> None:
    value = row([USER, SAY | {"reasoning_content": "Look it up."}])
    assert "reasoning_content" not in read(value, reasoning="drop").messages[1]
    kept = read(value, reasoning="keep").messages[1]
    assert kept["reasoning_content"] == "Look it up."
    assert kept["content"] == SAY["content"]
    rendered = read(value, reasoning="render").messages[1]
    assert rendered["content"] == "<think>\nLook it up.\n</think>\nIt is 5 C."
    only = row([USER, {"role": "assistant", "reasoning_content": "Look it up."}])
    assert read(only, reasoning="render").messages[1]["content"].startswith("<think>")
    with pytest.raises(Dropped, match="empty assistant turn"):
        read(only, reasoning="drop")


def test_a_row_without_a_uuid_is_known_by_its_line() -> None:
    nameless = row([USER, SAY]) | {"uuid": None}
    other = row([USER, USER, SAY]) | {"uuid": None}
    assert read(nameless).id == read(as_line(nameless).strip()).id != read(other).id
    assert read(row([USER, SAY])).id == "u"


@pytest.mark.parametrize("long", ["x" * 1_000_000, "n\n" * 500_000])
def test_what_a_stranger_wrote_is_told_in_one_short_line(long: str) -> None:
    for bad in ([{"role": long}, SAY], [USER, assistant(call(long, {}))]):
        with pytest.raises(Dropped) as caught:
            read(row(bad))
        assert len(str(caught.value)) < 250
        assert "\n" not in str(caught.value)


def test_lines_end_at_newline_bytes_only(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    text = json.dumps({"a": "x\u2028y\x85z"}, ensure_ascii=False)
    file.write_bytes(f"{text}\n\n{text}".encode())
    assert [n for n, _ in lines(file)] == [1, 3]


def test_a_line_beyond_the_limit_is_dropped_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sft.rows.MAX_LINE_BYTES", 1000)
    file = tmp_path / "rows.jsonl"
    file.write_text("x" * 5000 + "\n" + json.dumps(row([USER, SAY])) + "\n")
    (first, long), (second, fine) = lines(file)
    assert (first, long, second) == (1, None, 2)
    with pytest.raises(Dropped, match="too long"):
        read_row(long)
    assert read_row(fine).messages


def test_the_table_counts_every_row() -> None:
    ledger = Ledger()
    for number, (value, _) in enumerate(CASES.values()):
        ledger.read += 1
        try:
            ledger.keep(read(value).repairs)
        except Dropped as e:
            ledger.drop(f"f:{number}", e)
    facts = ledger.as_dict()
    kept = sum(expected == "kept" for _, expected in CASES.values())
    repaired = sum(isinstance(expected, list) for _, expected in CASES.values())
    assert facts["read"] == len(CASES) >= 40
    assert facts["kept"] == kept + repaired
    assert facts["repaired_rows"] == repaired
    assert sum(facts["dropped"].values()) == len(CASES) - kept - repaired
    assert facts["dropped"]["line is not JSON"] == 5
    assert facts["repairs"]["missing arguments taken as {}"] == 3


def printed_table(done: subprocess.CompletedProcess[str]) -> dict[str, int]:
    table = {}
    for line in done.stdout.splitlines():
        head, _, count = line.strip().rpartition("  ")
        if head and count.strip().isdigit():
            table[head.strip()] = int(count)
    return table


def test_prepare_prints_the_table_and_no_bad_row_ends_the_run(
    tmp_path: Path, tokenizer: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"".join(as_line(value) for value, _ in CASES.values()))
    done = python_m(
        "sft.prepare", "--input", file, "--tokenizer", tokenizer, "--max-pool-size", "1",
        "--context-tokens", "2048", "--held-out", "0", "--out", tmp_path / "out",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    table = printed_table(done)
    assert table["rows read"] == len(CASES)
    assert table["rows read"] == (
        table["kept as they are"] + table["kept, repaired"] + table["dropped"]
    )
    for name, (_, expected) in CASES.items():
        for reason in [expected] if isinstance(expected, str) else expected:
            assert reason == "kept" or table[reason] >= 1, name
    assert f"{file}:{1 + list(CASES).index('arguments not JSON')}: dropped" in done.stderr
