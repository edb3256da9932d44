"""What a model is asked: the question, its pool as OpenAI tools, and the prompt drawn of both.

Tool names pass through one `NameMap` per pool: what the prompt shows is what the parser's
names are translated back from, so prompt, checker and hallucination count agree.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from eval_bfcl.pools import Cell, Row
from gatewright import bfcl
from gatewright.bfcl import Question
from gatewright.chat import Call
from gatewright.errors import UserError

if TYPE_CHECKING:
    from gatewright.chat import Renderer

Dots = Literal["keep", "underscore"]
PromptKind = Literal["template", "system", "system_one_shot"]


class NameMap:
    """Translates tool names between the data and what a model is shown.

    Args:
        names: all names of one pool.
        dots: `keep` shows names as they are; `underscore` shows `_` for every character that
            OpenAI's API refuses.  Names that would be shown alike are numbered in alphabetical
            order, after one that needs no change: `car_rental`, then `car.rental` as
            `car_rental_2`.
    """

    def __init__(self, names: Sequence[str], dots: Dots = "keep") -> None:
        self._shown: dict[str, str] = {}
        self._real: dict[str, str] = {}
        plain = {n: n if dots == "keep" else re.sub(r"[^a-zA-Z0-9_-]", "_", n) for n in names}
        for name in sorted(plain, key=lambda n: (plain[n] != n, n)):
            numbered = (f"{plain[name]}_{i}" for i in itertools.count(2))
            shown = next(s for s in itertools.chain([plain[name]], numbered) if s not in self._real)
            self._shown[name] = shown
            self._real[shown] = name

    def renamed(self) -> dict[str, str]:
        """Return shown name -> the data's name, where they differ."""
        return {shown: name for shown, name in self._real.items() if shown != name}

    def shown(self, name: str) -> str:
        return self._shown[name]

    def shows(self, written: str) -> bool:
        """Return whether the prompt showed a tool by this name."""
        return written in self._real

    def real(self, written: str) -> str:
        """Return the data's name for what a model wrote; unknown names stay as written."""
        return self._real.get(written, written)

    def real_calls(self, calls: Sequence[Call]) -> list[Call]:
        return [Call(self.real(c.name), c.arguments) for c in calls]


@dataclasses.dataclass
class Request:
    """One question to one model.

    Attributes:
        id: BFCL's question id.
        cell: name of the pool cell.
        messages, tools: in OpenAI form.
        prompt: the drawn prompt (empty for servers that draw it themselves).
        prompt_ids: its tokens.
    """

    id: str
    cell: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    prompt: str = ""
    prompt_ids: list[int] = dataclasses.field(default_factory=list)


def request(question: Question, cell: Cell, row: Row, dots: Dots) -> Request:
    """Return a question with its pool, tool names as they are shown."""
    names = NameMap(row.names, dots)
    tools = []
    for schema in cell.tools(row):
        tool = bfcl.to_openai_tool(schema, question.language)
        tool["function"]["name"] = names.shown(schema["name"])
        tools.append(tool)
    return Request(question.id, cell.name, question.messages, tools)


def draw(item: Request, renderer: Renderer, kind: PromptKind) -> None:
    """Fill in a request's prompt and tokens."""
    if kind == "template":
        item.prompt = renderer.prompt(item.messages, item.tools)
    else:
        drawn = renderer.prompt(with_tools_in_system(item, kind == "system_one_shot"))
        item.prompt = drawn.replace(_OPEN, "<tool_call>").replace(_CLOSE, "</tool_call>")
    item.prompt_ids = list(
        renderer.tokenizer(item.prompt, add_special_tokens=False, verbose=False)["input_ids"]
    )


def check_kind(renderer: Renderer, kind: str) -> None:
    """Refuse a prompt kind that would hide the tools from the model.

    Raises:
        UserError: no such kind, or the tokenizer's own template draws no tools.
    """
    if kind not in get_args(PromptKind):
        raise UserError(f"--prompt {kind}: choose one of {', '.join(get_args(PromptKind))}")
    if kind == "template":
        probe = {"name": "probe_tool", "description": "Probe.", "parameters": {}}
        text = renderer.prompt(
            [{"role": "user", "content": "Probe?"}], [{"type": "function", "function": probe}]
        )
        if "probe_tool" not in text:
            raise UserError(
                f"{renderer.source}: its chat template draws no tools; --prompt system or "
                "--prompt system_one_shot puts them into a system message"
            )


# The renderer takes tags apart in what users write; these are ours and are put in afterwards.
_OPEN, _CLOSE = "\u2039call\u203a", "\u2039/call\u203a"
_INSTRUCTIONS = """You answer by calling one of these functions:
<tools>
{tools}
</tools>
Answer with nothing but a JSON object with the function's name and its arguments inside tags:
{open}
{{"name": <function name>, "arguments": <object of arguments>}}
{close}"""
_SHOT_TOOL = {
    "type": "function",
    "function": {
        "name": "unit_convert",
        "description": "Convert a value between two units.",
        "parameters": {
            "type": "object",
            "properties": {
                "value": {"type": "number", "description": "The value to convert."},
                "to": {"type": "string", "description": "The unit to convert to."},
            },
            "required": ["value", "to"],
        },
    },
}
_SHOT_QUESTION = "How many kilometers are 5 miles?"
_SHOT_CALL = {"name": "unit_convert", "arguments": {"value": 5, "to": "kilometers"}}


def with_tools_in_system(item: Request, one_shot: bool) -> list[dict[str, Any]]:
    """Return the messages with tools and instructions in a system message.

    For models whose chat template knows no tools.  With `one_shot` an answered example, with a
    tool of its own, comes first.
    """
    example: list[dict[str, Any]] = []
    if one_shot:
        answer = f"{_OPEN}\n{json.dumps(_SHOT_CALL)}\n{_CLOSE}"
        example = [
            {"role": "user", "content": f"{_as_lines([_SHOT_TOOL])}\n{_SHOT_QUESTION}"},
            {"role": "assistant", "content": answer},
        ]
    system = _INSTRUCTIONS.format(tools=_as_lines(item.tools), open=_OPEN, close=_CLOSE)
    own = [m["content"] for m in item.messages if m["role"] == "system"]
    rest = [m for m in item.messages if m["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join([*own, system])}, *example, *rest]


def _as_lines(tools: Sequence[dict[str, Any]]) -> str:
    return "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
