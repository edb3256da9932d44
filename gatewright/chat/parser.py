"""The one reader of tool calls in model output.

Three ways of writing a call are known:

- `hermes`: `<tool_call>` JSON object with `name` and `arguments` `</tool_call>`, any number of
  times; the newlines around the object may be missing (Qwen, Hermes and our own template);
- `llama3`: the whole answer is a JSON object with `name` and `parameters` (or `arguments`),
  optionally after `<|python_tag|>`; several objects may follow each other, apart by space
  or `;`;
- `nemotron`: `<TOOLCALL>` JSON list of objects with `name` and `arguments` `</TOOLCALL>`.

Common to all: end-of-turn tokens at the end and a leading `<think>...</think>` are passed
over; text around tagged calls is allowed; the last closing tag may be missing when its JSON is
complete, because generation may stop on that very token.  An answer without any call is
`no_call`; one that begins a call and does not finish it properly is `unparseable`, whatever
other calls it holds: nothing is repaired or guessed.

Model output is data.  Nothing is evaluated, and time and memory are linear in a text that is
refused beyond `MAX_CHARS`.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Literal

from gatewright.chat.bounded_json import JSONError, read_value, skip_space

MAX_CHARS = 262_144
"""Longest model output that is read at all."""
MAX_CALLS = 256
"""Most calls in one answer."""
MAX_NAME_CHARS = 512
"""Longest tool name."""
STYLES = ("hermes", "llama3", "nemotron")

_END_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|pad|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<SPECIAL_12>",
    "</s>",
)
_THOUGHT_START, _THOUGHT_END = "<think>", "</think>"
_PYTHON_TAG = "<|python_tag|>"
_BETWEEN = re.compile(r"[ \t\r\n;]*+")


@dataclasses.dataclass(frozen=True)
class Call:
    """One tool call: the tool's name as written, and its arguments by parameter name."""

    name: str
    arguments: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Parsed:
    """What a model's answer holds.

    `calls` is non-empty exactly when `kind` is "calls"; `error` says why when it is
    "unparseable".
    """

    kind: Literal["calls", "no_call", "unparseable"]
    calls: tuple[Call, ...] = ()
    error: str | None = None


def strip_end(text: str, tokens: tuple[str, ...]) -> str:
    """Return the text without space and any of the tokens at its end, in linear time."""
    end = len(text)
    while True:
        while end and text[end - 1].isspace():
            end -= 1
        token = next((t for t in tokens if text.endswith(t, 0, end)), None)
        if token is None:
            return text[:end]
        end -= len(token)


def _as_call(value: Any, keys: tuple[str, ...]) -> Call:
    """Return the call that a JSON value describes; `keys` name its arguments, best first."""
    if not isinstance(value, dict):
        raise JSONError(f"a call must be a JSON object, not a {type(value).__name__}")
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        raise JSONError('a call needs a non-empty string "name"')
    if len(name) > MAX_NAME_CHARS:
        raise JSONError(f'"name" is longer than {MAX_NAME_CHARS} characters')
    key = next((k for k in keys if k in value), None)
    if key is None:
        raise JSONError(f'a call needs "{keys[0]}"')
    arguments = value[key]
    if isinstance(arguments, str):  # OpenAI's way: an object written as a string
        arguments, end = read_value(arguments)
        if value[key][end:].strip():
            raise JSONError(f'text after the object in the string "{key}"')
    if not isinstance(arguments, dict):
        raise JSONError(f'"{key}" must be a JSON object, not a {type(arguments).__name__}')
    return Call(name, arguments)


def _tagged(text: str, opening: str, closing: str) -> list[Any]:
    """Return the JSON value after each opening tag; [] if there is none."""
    values: list[Any] = []
    at = 0
    while (start := text.find(opening, at)) >= 0:
        if len(values) >= MAX_CALLS:
            raise JSONError(f"more than {MAX_CALLS} calls")
        value, end = read_value(text, start + len(opening))
        values.append(value)
        at = skip_space(text, end)
        if text.startswith(closing, at):
            at += len(closing)
        elif at < len(text):
            raise JSONError(f"expected {closing} at character {at}")
    if not values and closing in text:
        raise JSONError(f"{closing} without {opening}")
    return values


def _hermes(text: str) -> list[Call]:
    return [
        _as_call(value, ("arguments",)) for value in _tagged(text, "<tool_call>", "</tool_call>")
    ]


def _nemotron(text: str) -> list[Call]:
    calls: list[Call] = []
    for value in _tagged(text, "<TOOLCALL>", "</TOOLCALL>"):
        if not isinstance(value, list):
            raise JSONError("<TOOLCALL> must hold a JSON list of calls")
        calls.extend(_as_call(item, ("arguments",)) for item in value)
        if len(calls) > MAX_CALLS:
            raise JSONError(f"more than {MAX_CALLS} calls")
    return calls


def _llama3(text: str) -> list[Call]:
    tagged = text.startswith(_PYTHON_TAG)
    if tagged:
        text = text[len(_PYTHON_TAG) :].lstrip()
    elif not text.startswith("{"):
        return []
    calls: list[Call] = []
    at = 0
    while at < len(text):
        if len(calls) >= MAX_CALLS:
            raise JSONError(f"more than {MAX_CALLS} calls")
        value, end = read_value(text, at)
        calls.append(_as_call(value, ("parameters", "arguments")))
        between = _BETWEEN.match(text, end)
        assert between is not None
        at = between.end()
        if text.startswith(_PYTHON_TAG, at):
            at += len(_PYTHON_TAG)
    if tagged and not calls:
        raise JSONError(f"nothing after {_PYTHON_TAG}")
    return calls


_READERS = {"hermes": _hermes, "llama3": _llama3, "nemotron": _nemotron}


def parse_calls(text: str, style: str = "hermes") -> Parsed:
    """Read the tool calls in a model's answer; never raises because of what a model wrote.

    Args:
        text: the generated text (the assistant's turn without its header).
        style: hermes, llama3 or nemotron.

    Raises:
        ValueError: an unknown style, which is the caller's mistake.
    """
    if style not in _READERS:
        raise ValueError(f"unknown tool-call style {style!r}: choose one of {', '.join(STYLES)}")
    if len(text) > MAX_CHARS:
        return Parsed("unparseable", error=f"longer than {MAX_CHARS} characters")
    text = strip_end(text, _END_TOKENS).lstrip()
    if text.startswith(_THOUGHT_START):
        end = text.find(_THOUGHT_END)
        if end < 0:
            return Parsed("no_call")
        text = text[end + len(_THOUGHT_END) :].lstrip()
    try:
        calls = _READERS[style](text)
    except JSONError as e:
        return Parsed("unparseable", error=str(e))
    return Parsed("calls", tuple(calls)) if calls else Parsed("no_call")
