"""The demo's chats: real answers, and nothing of the evaluated split."""

import collections
import json

import pytest

from gatewright import bfcl
from tools import demo_chats


@pytest.fixture(scope="module")
def made() -> tuple[list[dict], collections.Counter[str]]:
    counts: collections.Counter[str] = collections.Counter()
    evaluated = demo_chats.Evaluated.of(bfcl.load_split("simple_python"))
    splits = {name: bfcl.load_split(name) for name in demo_chats.CATEGORIES}
    return list(demo_chats.rows(splits, evaluated, counts)), counts


def test_nothing_of_simple_python_is_left(made) -> None:
    rows, _ = made
    questions = bfcl.load_split("simple_python")
    names = {tool["name"] for q in questions for tool in q.tools}
    asked = {m["content"] for q in questions for m in q.messages}
    assert len(names) == 370
    for row in rows:
        assert not names & {tool["function"]["name"] for tool in row["tools"]}
        for message in row["messages"]:
            assert message["content"] not in asked
            assert not names & {c["function"]["name"] for c in message.get("tool_calls", ())}


def test_every_row_is_counted(made) -> None:
    rows, counts = made
    dropped = sum(n for reason, n in counts.items() if reason.startswith("dropped"))
    assert counts["read"] == sum(len(bfcl.load_split(n)) for n in demo_chats.CATEGORIES)
    assert counts["read"] == counts["kept"] + dropped
    assert len(rows) == counts["kept"] > 1500
    assert counts["dropped: question of simple_python"] == 100
    assert counts["tools removed: name of simple_python"] > 0


def test_every_chat_calls_tools_it_offers_and_passes_the_official_checker(made) -> None:
    rows, _ = made
    by_id = {q.id: q for name in demo_chats.CATEGORIES for q in bfcl.load_split(name)}
    for row in rows:
        calls = row["messages"][-1]["tool_calls"]
        offered = {tool["function"]["name"] for tool in row["tools"]}
        answer = []
        for call in calls:
            function = call["function"]
            assert function["name"] in offered
            arguments = function["arguments"]
            if isinstance(arguments, str):
                arguments = json.loads(arguments)
            answer.append(bfcl.GoldCall(function["name"], arguments))
        question = by_id[row["used_in"][0].removeprefix("bfcl:")]
        assert bfcl.check(question, answer).valid, row["used_in"]


def test_arguments_come_as_objects_and_as_strings(made) -> None:
    rows, _ = made
    kinds = collections.Counter(
        type(call["function"]["arguments"])
        for row in rows
        for call in row["messages"][-1]["tool_calls"]
    )
    assert kinds[dict] > 100
    assert kinds[str] > 100


def test_what_may_be_left_out_is_left_out() -> None:
    question = bfcl.Question(
        id="q",
        split="live_simple",
        messages=[{"role": "user", "content": "?"}],
        tools=[
            {
                "name": "f",
                "parameters": {
                    "type": "dict",
                    "required": ["a", "empty"],
                    "properties": {k: {"type": "string"} for k in ("a", "b", "c", "empty")},
                },
            }
        ],
        gold=[{"f": {"a": ["x", "y"], "b": ["", "z"], "c": ["stated"], "empty": [""]}}],
    )
    assert demo_chats.answer(question) == [("f", {"a": "x", "c": "stated", "empty": ""})]


def test_the_same_rows_every_time(made) -> None:
    rows, _ = made
    evaluated = demo_chats.Evaluated.of(bfcl.load_split("simple_python"))
    splits = {name: bfcl.load_split(name) for name in demo_chats.CATEGORIES}
    again = list(demo_chats.rows(splits, evaluated, collections.Counter()))
    assert json.dumps(rows) == json.dumps(again)
