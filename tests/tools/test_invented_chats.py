"""Chats about invented tools: answers stand in the prompt, and nowhere else."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gatewright import artifact
from gatewright.bm25 import tokenize
from gatewright.errors import UserError
from sft.rows import read_row
from tools import invented_chats


def made(tmp_path: Path, **changes: Any) -> list[dict[str, Any]]:
    words = [f"{a}{b}{c}o" for a in "bcdfghjk" for b in "aeiou" for c in "lmnr"]
    text = tmp_path / "text.jsonl"
    common = " ".join(f"the{a}{b}" for a in "abcdefghijklmno" for b in "abcdefghij")
    text.write_text(json.dumps({"text": f"{common} {common} {' '.join(words)}"}) + "\n")
    settings: dict[str, Any] = {"text": (str(text),), "rows": 200, "words": 150}
    out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
    invented_chats.main(invented_chats.Args(out=out, **(settings | changes)))
    assert artifact.read_manifest(out, "chats")
    return [json.loads(line) for line in (out / "chats.jsonl").read_text().splitlines()]


def parts(row: dict[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    (tool,) = row["tools"]
    (call,) = row["messages"][1]["tool_calls"]
    return row["messages"][0]["content"], tool["function"], call["function"]


def test_every_answer_can_be_copied_from_the_prompt(tmp_path: Path) -> None:
    rows = made(tmp_path)
    assert len({parts(row)[1]["name"] for row in rows}) == 200
    kinds = {"integer": int, "number": float, "string": str}
    for row in rows:
        question, function, call = parts(row)
        assert call["name"] == function["name"]
        properties = function["parameters"]["properties"]
        assert set(call["arguments"]) == set(properties) == set(function["parameters"]["required"])
        for name, value in call["arguments"].items():
            assert type(value) is kinds[properties[name]["type"]]
            assert str(value) in question or str(value) in question[0].lower() + question[1:]
        # The question repeats what the tool does, so the tool can be found.
        assert set(tokenize(function["description"])) <= set(tokenize(question))
    named_otherwise = [
        row for row in rows
        if not set(re.findall("[a-z]+", parts(row)[1]["name"].lower()))
        & set(tokenize(parts(row)[0]))
    ]  # fmt: skip
    assert 50 < len(named_otherwise) < 150  # about half


def test_recall_keys_stand_in_the_question_and_values_in_the_pool_alone(tmp_path: Path) -> None:
    for row in made(tmp_path, kind="recall"):
        question, function, call = parts(row)
        key, held = re.findall("[A-Z]?[a-z]+", function["name"])
        assert key in tokenize(question)
        assert held.lower() not in tokenize(question)
        assert call["arguments"] == {}
        # BM25 cannot see the key: it would rank the tools that share it first.
        assert key not in tokenize(json.dumps(function))
        assert len(set(tokenize(function["description"])) & set(tokenize(question))) == 1


def test_a_few_tools_are_asked_for_in_many_ways(tmp_path: Path) -> None:
    rows = made(tmp_path, tools=10, kind="recall")
    assert len({json.dumps(row["tools"]) for row in rows}) == 10
    assert len({parts(row)[0] for row in rows}) > 150


def test_rows_are_usable_and_repeatable(tmp_path: Path) -> None:
    rows = made(tmp_path)
    for row in rows[:20]:
        chat = read_row(json.dumps(row).encode())
        assert chat.repairs == []
        assert chat.called == [parts(row)[1]["name"]]
    assert made(tmp_path) == rows
    assert made(tmp_path, seed=1) != rows
    assert not {r["uuid"] for r in rows} & {r["uuid"] for r in made(tmp_path, seed=1)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 0}, "--rows 0"),
        ({"most_parameters": 9}, "--most-parameters 9"),
        ({"tools": -1}, "--tools -1"),
        ({"words": 10}, "--words 10"),
        ({"words": 500}, "the text holds 160 usable ones"),
        ({"text_mb": 0.0}, "--text-mb 0.0"),
        ({"text_mb": -1.0}, "--text-mb -1.0"),
        ({"text_mb": float("nan")}, "--text-mb nan"),
        ({"text_mb": float("inf")}, "--text-mb inf"),
    ],
)
def test_what_cannot_be_made_is_refused(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        made(tmp_path, **changes)


def test_names_that_run_out_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invented_chats, "TRIES", 5)
    with pytest.raises(
        UserError, match=r"--rows 3000: 50 words make \d+ different tool names only"
    ):
        made(tmp_path, kind="recall", words=50, rows=3000)
