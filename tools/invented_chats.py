"""Chats about invented tools: only the prompt says what a tool is called.

    python -m tools.invented_chats --text runs/text --rows 6000 --out runs/invented

Names, parameters and values are put together at random from the words of a text corpus, so a
model that answers right has read the prompt: it chose the tool whose description the question
repeats, copied its name letter by letter, and copied the values from the question.  A small
model that is fine-tuned on a few hundred real tools remembers their names instead.

Rows have Nemotron-Agentic-v1's format; `sft.prepare` adds the distractors.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import math
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gatewright import artifact, cli
from gatewright.errors import UserError

if TYPE_CHECKING:
    from numpy.random import Generator

Kind = Literal["varied", "recall"]
WORD = re.compile(r"(?<![\w.])[a-z]{3,9}(?![\w])")
TOO_COMMON = 150
"""So many of the most frequent words are left out: `the` tells no tools apart."""
TRIES = 10_000
"""So many rows one after another, each with a name that another tool has: no name is left."""
ASKING = (
    "{what}.", "Please {what}.", "Can you {what}?", "I need to {what}.", "I want to {what}.",
    "Could you {what} for me?", "Help me to {what}.", "{what}, please.",
)  # fmt: skip
STATING = (" with {name} {value}", " where the {name} is {value}", ", {name} {value}",
           " using {value} as the {name}")  # fmt: skip


@dataclass
class Args:
    """Flags of `python -m tools.invented_chats`."""

    text: tuple[str, ...]
    """Corpus that words come from: files, globs or folders (.jsonl, .gz, .zst, .parquet)."""
    rows: int
    """Chats to make."""
    out: Path
    """Folder to create; it will hold chats.jsonl."""
    kind: Kind = "varied"
    """varied: names of many forms, parameters, questions in many words. recall: no parameters; the
    question holds the first half of the name, the second half stands in the pool alone."""
    most_parameters: int = 3
    """Parameters of a varied tool: 1 to this many."""
    tools: int = 0
    """Different tools, each asked for in many ways; 0 makes a new one for every row."""
    words: int = 2000
    """Different words to build from: the text's most frequent, after the very commonest."""
    text_mb: float = 4.0
    """Megabytes of text to count words in."""
    seed: int = 0
    """Fixes everything."""

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise UserError(f"--rows {self.rows}: give at least 1")
        if not 1 <= self.most_parameters <= 8:
            raise UserError(f"--most-parameters {self.most_parameters}: give 1 to 8")
        if self.tools < 0:
            raise UserError(f"--tools {self.tools}: give 0 or more")
        if self.words < 50:
            raise UserError(f"--words {self.words}: give at least 50")
        if not 0 < self.text_mb < math.inf:
            raise UserError(f"--text-mb {self.text_mb}: give a positive number")


@dataclasses.dataclass(frozen=True)
class Words:
    """Words to build from; `pick` draws different ones."""

    all: tuple[str, ...]

    def pick(self, random: Generator, count: int) -> list[str]:
        return [self.all[i] for i in random.choice(len(self.all), count, replace=False)]


def count_words(patterns: Sequence[str], text_mb: float, wanted: int) -> Words:
    """Return the frequent words of a corpus, the most frequent ones left out.

    Raises:
        UserError: the corpus has too few words.
    """
    from gatewright.documents import BadLines, documents, find_shards

    counts: collections.Counter[str] = collections.Counter()
    left = int(text_mb * 1e6)
    for shard in find_shards(patterns, "--text"):
        for text in documents(shard, bad=BadLines(limit=10**9)):
            counts.update(WORD.findall(text))
            left -= len(text)
            if left < 0:
                break
        if left < 0:
            break
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    words = tuple(ranked[TOO_COMMON : TOO_COMMON + wanted])
    if len(words) < wanted:
        raise UserError(
            f"--words {wanted}: the text holds {len(words)} usable ones; lower it or give more text"
        )
    return Words(words)


def tool_name(random: Generator, words: Sequence[str]) -> str:
    """Return words as a name, in one of the ways in which people spell them."""
    way = random.integers(5)
    if way == 0:
        return words[0] + "".join(word.title() for word in words[1:])
    if way == 1:
        return ".".join(words)
    if way == 2 and len(words) > 2:
        return f"{words[0]}.{'_'.join(words[1:])}"
    return "_".join(words)


KINDS = ("integer", "number", "string", "string", "string")


def value(random: Generator, words: Words, kind: str) -> Any:
    """Return a value of a JSON schema type."""
    if kind == "integer":
        return int(random.integers(1, 10 ** int(random.integers(1, 5))))
    if kind == "number":
        return float(random.integers(1, 1000)) / 10
    return " ".join(words.pick(random, int(random.integers(1, 3))))


@dataclasses.dataclass(frozen=True)
class Invented:
    """A question, the one tool that answers it, and the arguments of the call."""

    question: str
    name: str
    description: str
    parameters: dict[str, Any]
    arguments: dict[str, Any]


def varied(tool: Generator, random: Generator, words: Words, most_parameters: int) -> Invented:
    """Return a tool that is found by what it does, with values to copy from the question."""
    # Half of the names repeat the description's words, as most real ones do; the others share
    # none with it or with the question, and can only be found through the description.
    doing = words.pick(tool, int(tool.integers(2, 4)))
    named = doing if tool.random() < 0.5 else words.pick(tool, int(tool.integers(2, 4)))
    parameters: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    stated = ""
    for name in words.pick(tool, int(tool.integers(1, most_parameters + 1))):
        kind = KINDS[tool.integers(len(KINDS))]
        wanted = value(random, words, kind)
        parameters[name] = {"type": kind, "description": f"The {name} to {doing[0]}."}
        arguments[name] = wanted
        shown = f'"{wanted}"' if kind == "string" and random.random() < 0.3 else str(wanted)
        stated += STATING[random.integers(len(STATING))].format(name=name, value=shown)
    what = f"{doing[0]} the {' '.join(doing[1:])}"
    asked = ASKING[random.integers(len(ASKING))].format(what=what + stated)
    return Invented(asked, tool_name(tool, named), f"{what}.", parameters, arguments)


def recall(tool: Generator, random: Generator, words: Words) -> Invented:
    """Return a tool whose name is a key of the question and a value that only the pool holds.

    Associative recall, drawn as a tool call.  BM25 does not see the key (a name is one word to
    it): it ranks by the words after it, so the pool's other tools have other keys.
    """
    own = words.pick(tool, 4)
    key, held, thing, other = own
    further = next(word for word in words.pick(random, 5) if word not in own)
    asked = ASKING[random.integers(len(ASKING))].format(what=f"{key} the {thing} {further}")
    return Invented(asked, key + held.title(), f"{thing} {other}.", {}, {})


def row(number: int, words: Words, args: Args) -> dict[str, Any]:
    """Return one chat: a question, one invented tool, and the call that answers it."""
    from gatewright.plackett_luce import generator

    which = number % args.tools if args.tools else number
    tool = generator("invented-tool", args.kind, args.seed, which)
    random = generator("invented-chat", args.kind, args.seed, number)
    if args.kind == "recall":
        made = recall(tool, random, words)
    else:
        made = varied(tool, random, words, args.most_parameters)
    function = {
        "name": made.name,
        "description": made.description[0].upper() + made.description[1:],
        "parameters": {
            "type": "object", "properties": made.parameters, "required": list(made.parameters),
        },
    }  # fmt: skip
    called = {"name": made.name, "arguments": made.arguments}
    call = {"id": "call_0", "type": "function", "function": called}
    return {
        "uuid": str(uuid.uuid5(uuid.NAMESPACE_URL, f"invented:{args.kind}:{args.seed}:{number}")),
        "messages": [
            {"role": "user", "content": made.question[0].upper() + made.question[1:]},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ],
        "license": "apache-2.0",
        "used_in": [],
        "tools": [{"type": "function", "function": function}],
    }


def unambiguous_rows(words: Words, args: Args) -> Iterator[dict[str, Any]]:
    """Yield chats in which a name always stands for the same tool.

    Raises:
        UserError: the words make no further name.
    """
    known: dict[str, Any] = {}
    refused = 0
    for number in itertools.count():
        made = row(number, words, args)
        (tool,) = made["tools"]
        name = tool["function"]["name"]
        if name not in known or (args.tools and known[name] == tool):
            known[name] = tool
            refused = 0
            yield made
            continue
        refused += 1
        if refused > max(TRIES, args.tools):
            raise UserError(
                f"--rows {args.rows}: {len(words.all)} words make {len(known)} different tool "
                "names only; lower it, or raise --words"
            )


def main(args: Args) -> None:
    """Make chats about invented tools out of a corpus's words."""
    from gatewright.documents import input_parents

    words = count_words(args.text, args.text_mb, args.words)
    extra = {"words": len(words.all)}
    with artifact.create(
        args.out,
        kind="chats",
        config=args,
        parents=input_parents(args.text),
        seed=args.seed,
        extra=extra,
    ) as folder, open(folder / "chats.jsonl", "w", encoding="utf-8") as f:  # fmt: skip
        for made in itertools.islice(unambiguous_rows(words, args), args.rows):
            f.write(json.dumps(made, ensure_ascii=False) + "\n")
    print(f"{args.out / 'chats.jsonl'}: {args.rows} chats of {len(words.all)} words")


if __name__ == "__main__":
    cli.run(main, Args, prog="python -m tools.invented_chats")
