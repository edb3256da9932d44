"""Tool-calling chats for the demo, made of BFCL's published questions and answers.

The demo needs supervised chats that a machine without a network has.  bfcl_eval brings
thousands of real questions with tool schemas and accepted answers besides the split the
pipeline is evaluated on.  This command turns the live_* and the multi-tool categories into
rows of Nemotron-Agentic-v1's format (`uuid, messages, license, used_in, tools`), so that
`sft.prepare` reads them by the path that reads the real data set.

Nothing of the evaluation split may leak into training: a question of `simple_python` is
removed with its row, a tool name of `simple_python` is removed with its schema, and with the
whole row if the answer calls it.
"""

from __future__ import annotations

import collections
import json
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gatewright import artifact, cli

if TYPE_CHECKING:
    from gatewright.bfcl import Question

CATEGORIES = (
    "live_simple",
    "live_multiple",
    "live_parallel",
    "live_parallel_multiple",
    "multiple",
    "parallel",
    "parallel_multiple",
)
EVALUATED = "simple_python"


@dataclass
class Args:
    """Flags of `python -m tools.demo_chats`."""

    out: Path
    """Folder to create; it will hold chats.jsonl."""


def answer(question: Question) -> list[tuple[str, dict[str, Any]]]:
    """Return one published answer as (tool name, arguments) pairs, always the same one.

    Each parameter takes its first accepted value.  An optional parameter for which BFCL also
    accepts "" (its sign for "may be left out") is left out: the question does not state it.
    """
    from gatewright import bfcl

    may_omit = []
    for item in question.gold:
        for name, parameters in item.items():
            schema = next(tool for tool in question.tools if tool["name"] == name)
            required = schema["parameters"].get("required", ())
            may_omit.append(
                {key for key, ok in parameters.items() if "" in ok and key not in required}
            )
    return [
        (call.name, {key: v for key, v in call.arguments.items() if key not in omit})
        for call, omit in zip(bfcl.gold_calls(question), may_omit, strict=True)
    ]


@dataclass(frozen=True)
class Evaluated:
    """What must not occur in a training chat."""

    names: frozenset[str]
    questions: frozenset[str]

    @classmethod
    def of(cls, questions: Iterable[Question]) -> Evaluated:
        """Collect the tool names and the user messages of a split."""
        names: set[str] = set()
        texts: set[str] = set()
        for question in questions:
            names.update(tool["name"] for tool in question.tools)
            texts.update(m["content"] for m in question.messages if m["role"] == "user")
        return cls(frozenset(names), frozenset(texts))


def chat_row(
    question: Question,
    tools: list[dict[str, Any]],
    calls: list[tuple[str, dict[str, Any]]],
    *,
    as_string: bool,
) -> dict[str, Any]:
    """Return one Nemotron-Agentic-v1 row: the question and one assistant turn of calls.

    Args:
        as_string: write arguments as a JSON string with call ids, as the interactive_agent
            split does; else as objects, as tool_calling does.
    """
    from gatewright import bfcl

    tool_calls = []
    for i, (name, arguments) in enumerate(calls):
        written = json.dumps(arguments, ensure_ascii=False) if as_string else arguments
        tool_calls.append(
            {
                "id": f"call_{i}",
                "type": "function",
                "function": {"name": name, "arguments": written},
            }
        )
    return {
        "uuid": str(uuid.uuid5(uuid.NAMESPACE_URL, f"bfcl:{question.id}")),
        "messages": [
            *({"role": m["role"], "content": m["content"]} for m in question.messages),
            {"role": "assistant", "content": "", "tool_calls": tool_calls},
        ],
        "license": "apache-2.0",
        "used_in": [f"bfcl:{question.id}"],
        "tools": [bfcl.to_openai_tool(tool) for tool in tools],
    }


def passes(question: Question, calls: list[tuple[str, dict[str, Any]]]) -> bool:
    """Say whether the official checker accepts an answer."""
    from gatewright import bfcl

    try:
        return bfcl.check(question, [bfcl.GoldCall(*call) for call in calls]).valid
    except bfcl.GoldAnswerError:
        return False


def rows(
    splits: Mapping[str, Iterable[Question]],
    evaluated: Evaluated,
    counts: collections.Counter[str],
) -> Iterator[dict[str, Any]]:
    """Yield the chats of all categories, counting what was removed and why.

    Every answer is put to the official checker first: a published answer that no single pick
    satisfies is dropped and counted, not taught.
    """
    for category, questions in splits.items():
        for question in questions:
            counts["read"] += 1
            if any(m["content"] in evaluated.questions for m in question.messages):
                counts[f"dropped: question of {EVALUATED}"] += 1
                continue
            calls = answer(question)
            if any(name in evaluated.names for name, _ in calls):
                counts[f"dropped: calls a tool of {EVALUATED}"] += 1
                continue
            tools = [tool for tool in question.tools if tool["name"] not in evaluated.names]
            counts[f"tools removed: name of {EVALUATED}"] += len(question.tools) - len(tools)
            if not passes(question, calls):
                counts["dropped: no single answer passes the official checker"] += 1
                continue
            counts["kept"] += 1
            counts[f"kept from {category}"] += 1
            yield chat_row(question, tools, calls, as_string=counts["kept"] % 2 == 0)


def main(args: Args) -> None:
    """Turn BFCL's live and multi-tool categories into chats for fine-tuning."""
    from gatewright import bfcl

    evaluated = Evaluated.of(bfcl.load_split(EVALUATED))
    counts: collections.Counter[str] = collections.Counter()
    extra: dict[str, Any] = {}
    with artifact.create(args.out, kind="chats", config=args, extra=extra) as folder:
        with open(folder / "chats.jsonl", "w", encoding="utf-8") as f:
            splits = {category: bfcl.load_split(category) for category in CATEGORIES}
            for row in rows(splits, evaluated, counts):
                f.write(json.dumps(row, ensure_ascii=False) + "\n")
        extra["counts"] = dict(counts)
    width = max(map(len, counts))
    for reason, count in counts.items():
        print(f"{reason:<{width}}  {count:>6}")
    print(f"{args.out / 'chats.jsonl'}: {counts['kept']} chats")


if __name__ == "__main__":
    cli.run(main, Args, prog="python -m tools.demo_chats")
