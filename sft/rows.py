"""Chats as they are published, made uniform: what is kept, repaired or dropped, and why.

The rows follow `nvidia/Nemotron-Agentic-v1` (`uuid, messages, license, used_in, tools`, some
with `reasoning`).  Its two splits disagree with each other and with themselves: arguments are
objects, lists or JSON strings; tool results carry ids or not; content may be structured; tool
names repeat with different schemas.  `read_row` turns one row into OpenAI's form or raises
`Dropped` with the reason.  Repairs are counted by name; nothing is guessed: a row whose meaning
is in doubt is dropped.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from gatewright.json_lines import strict_json

Reasoning = Literal["drop", "keep", "render"]

MAX_LINE_BYTES = 64 * 2**20
"""A longer line is dropped unread, so that one bad line cannot take the memory."""
MAX_DETAIL_CHARS = 80
"""A stranger's megabyte is not printed whole."""

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
    "ipython": "tool",
}


class Dropped(Exception):
    """A row that cannot be used; the message is the reason it is counted under.

    Attributes:
        reason: a short constant phrase, the line of the table.
        detail: what exactly was found, in one short line, for the warning that names file
            and line.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        if len(detail) > MAX_DETAIL_CHARS:
            detail = f"{detail[:MAX_DETAIL_CHARS]}..."
        if not detail.isprintable():
            detail = repr(detail)
        super().__init__(f"{reason}{f' ({detail})' if detail else ''}")
        self.reason = reason
        self.detail = detail


@dataclasses.dataclass
class Chat:
    """One usable conversation in OpenAI's form.

    Attributes:
        id: the row's uuid, or a hash of its line without one.
        messages: at most one system message (first), then the turns; the last is an
            assistant's.  `tool_calls[*].function.arguments` are objects; every tool message
            has a `tool_call_id`.
        tools: OpenAI tools with distinct names.
        repairs: names of the repairs that were made.
    """

    id: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    repairs: list[str]

    @property
    def called(self) -> list[str]:
        """Names of the tools that are called, each once, in order."""
        return list(
            dict.fromkeys(
                call["function"]["name"]
                for message in self.messages
                for call in message.get("tool_calls", ())
            )
        )

    @property
    def query(self) -> str:
        """The text that tools are ranked by: the first user turn."""
        return next((m["content"] for m in self.messages if m["role"] == "user"), "")


def lines(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """Yield (line number from 1, line) of a JSONL file; None for a line beyond the limit.

    Lines end at a newline byte only: other Unicode separators occur inside JSON strings.
    """
    with open(path, "rb") as f:
        number = 0
        while line := f.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                while line and not line.endswith(b"\n"):
                    line = f.readline(MAX_LINE_BYTES)
                yield number, None
            elif line.strip():
                yield number, line


def read_row(line: bytes | None, reasoning: Reasoning = "drop") -> Chat:
    """Return the chat that one JSONL line holds.

    Args:
        reasoning: what becomes of `reasoning_content`: dropped, kept as a field for
            the template to draw, or rendered into the content as `<think>` text.

    Raises:
        Dropped: the row cannot be used; says why.
    """
    if line is None:
        raise Dropped("line too long", f"more than {MAX_LINE_BYTES} bytes")
    try:
        row = strict_json(line.decode("utf-8"))
    except ValueError as e:  # UnicodeDecodeError is one too
        raise Dropped("line is not JSON", str(e)) from e
    if not isinstance(row, dict):
        raise Dropped("line is not a JSON object", type(row).__name__)
    repairs: Counter[str] = Counter()
    messages = _messages(row.get("messages"), reasoning, repairs)
    tools = _tools(row.get("tools"), messages, repairs)
    # Not its place: pools and held-out rows must not change with a file's name.
    own_id = str(row.get("uuid") or hashlib.blake2b(line.strip(), digest_size=16).hexdigest())
    chat = Chat(own_id, messages, tools, list(repairs))
    if b"\\u" in line:  # the only way in: UTF-8 cannot say half a character
        _require_whole_characters(chat)
    return chat


def _require_whole_characters(chat: Chat) -> None:
    try:
        json.dumps([chat.id, chat.messages, chat.tools], ensure_ascii=False).encode()
    except UnicodeEncodeError as e:
        raise Dropped("half a character (lone UTF-16 surrogate)", e.reason) from e
    except RecursionError as e:
        raise Dropped("nested too deeply") from e


def _messages(raw: Any, reasoning: Reasoning, repairs: Counter[str]) -> list[dict[str, Any]]:
    raw = _parsed(raw, "messages", repairs)
    if not isinstance(raw, list) or not raw:
        raise Dropped("no messages")
    system: list[str] = []
    turns: list[dict[str, Any]] = []
    systems = 0
    for item in raw:
        if not isinstance(item, dict):
            raise Dropped("message is not an object", type(item).__name__)
        role = _ROLES.get(str(item.get("role")))
        if role is None:
            raise Dropped("unknown role", repr(item.get("role")))
        if role == "system":
            systems += 1
            text = _text(item.get("content"), repairs)
            if text.strip():
                system.append(text)
            else:
                repairs["empty system message removed"] += 1
        elif role == "assistant":
            turns.append(_assistant(item, reasoning, repairs))
        elif role == "tool":
            turns.append(_tool_result(item, repairs))
        else:
            text = _text(item.get("content"), repairs)
            if not text.strip():
                raise Dropped("empty user message")
            turns.append({"role": "user", "content": text})
    if len(system) > 1:
        repairs["several system messages joined"] += 1
    end = max((i for i, m in enumerate(turns) if m["role"] == "assistant"), default=-1)
    if end < 0:
        raise Dropped("no assistant turn")
    if end + 1 < len(turns):
        repairs["turns after the last assistant turn cut"] += 1
        turns = turns[: end + 1]
    if all(m["role"] != "user" for m in turns):
        raise Dropped("no user message")
    _pair_results(turns, repairs)
    head = [{"role": "system", "content": "\n\n".join(system)}] if system else []
    return head + turns


def _parsed(value: Any, field: str, repairs: Counter[str]) -> Any:
    """Return `value`, parsed if a JSON document was stored in a string."""
    if isinstance(value, str):
        try:
            value = strict_json(value)
        except ValueError as e:
            raise Dropped(f"{field} is not JSON", str(e)) from e
        repairs[f"{field} parsed from a string"] += 1
    return value


def _text(content: Any, repairs: Counter[str]) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(p, str) or (isinstance(p, dict) and isinstance(p.get("text"), str))
        for p in content
    ):
        repairs["text parts joined"] += 1
        return "".join(p if isinstance(p, str) else p["text"] for p in content)
    raise Dropped("content is not text", type(content).__name__)


def _assistant(item: dict[str, Any], reasoning: Reasoning, repairs: Counter[str]) -> dict[str, Any]:
    text = _text(item.get("content"), repairs)
    thought = item.get("reasoning_content")
    thought = thought if isinstance(thought, str) and thought.strip() else None
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thought and reasoning == "render":
        message["content"] = f"<think>\n{thought.strip()}\n</think>\n{text}"
    elif thought and reasoning == "keep":
        message["reasoning_content"] = thought
    raw_calls = _parsed(item.get("tool_calls"), "tool_calls", repairs)
    if raw_calls is None:
        raw_calls = []
    if isinstance(raw_calls, dict):
        repairs["single call wrapped in a list"] += 1
        raw_calls = [raw_calls]
    if not isinstance(raw_calls, list):
        raise Dropped("tool_calls is not a list", type(raw_calls).__name__)
    if raw_calls:
        message["tool_calls"] = [_call(call, repairs) for call in raw_calls]
    elif not message["content"].strip():
        raise Dropped("empty assistant turn")
    return message


def _call(raw: Any, repairs: Counter[str]) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise Dropped("call is not an object", type(raw).__name__)
    function = raw.get("function", raw)
    if function is raw:
        repairs["bare call wrapped"] += 1
    if not isinstance(function, dict):
        raise Dropped("call is not an object", type(function).__name__)
    name = function.get("name")
    if not isinstance(name, str) or not name.strip():
        raise Dropped("call without a tool name")
    call: dict[str, Any] = {
        "type": "function",
        "function": {"name": name, "arguments": _arguments(function.get("arguments"), repairs)},
    }
    if raw.get("id") is not None:
        call["id"] = str(raw["id"])
    return call


def _arguments(raw: Any, repairs: Counter[str]) -> dict[str, Any]:
    if isinstance(raw, str):
        if not raw.strip():
            repairs["missing arguments taken as {}"] += 1
            return {}
        try:
            raw = strict_json(raw)
            if isinstance(raw, str):
                repairs["arguments encoded twice"] += 1
                raw = strict_json(raw)
        except ValueError as e:
            raise Dropped("call arguments are not valid JSON", str(e)) from e
    if raw is None:
        repairs["missing arguments taken as {}"] += 1
        return {}
    if isinstance(raw, list):
        if len(raw) == 1 and isinstance(raw[0], dict):
            repairs["arguments taken out of a list"] += 1
            return raw[0]
        if not raw:
            repairs["missing arguments taken as {}"] += 1
            return {}
        raise Dropped("call arguments are a list", f"of {len(raw)}")
    if not isinstance(raw, dict):
        raise Dropped("call arguments are not an object", type(raw).__name__)
    return raw


def _tool_result(item: dict[str, Any], repairs: Counter[str]) -> dict[str, Any]:
    content = item.get("content")
    if content is None:
        content = ""
    elif not isinstance(content, str):
        repairs["structured tool result written as JSON"] += 1
        content = json.dumps(content, ensure_ascii=False)
    message: dict[str, Any] = {"role": "tool", "content": content}
    if item.get("tool_call_id") is not None:
        message["tool_call_id"] = str(item["tool_call_id"])
    return message


def _pair_results(turns: list[dict[str, Any]], repairs: Counter[str]) -> None:
    """Give every call an id and every tool result the id of its call, in the calls' order."""
    made = 0
    i = 0
    while i < len(turns):
        message = turns[i]
        if message["role"] == "tool":
            raise Dropped("tool result without a call")
        calls = message.get("tool_calls", [])
        end = i + 1
        while end < len(turns) and turns[end]["role"] == "tool":
            end += 1
        results = turns[i + 1 : end]
        if results and not calls:
            raise Dropped("tool result without a call")
        if calls and end < len(turns) and len(results) != len(calls):
            raise Dropped("calls and results do not balance", f"{len(calls)} vs {len(results)}")
        stated = [call.get("id") for call in calls]
        given = [result.get("tool_call_id") for result in results]
        distinct = None not in stated and len(set(stated)) == len(stated)
        paired = bool(results) and distinct and set(given) == set(stated)
        if not paired and given != stated and (set(given) & set(stated)) - {None}:
            raise Dropped("ids of results fit the calls in part", f"{given} for {stated}")
        for call in calls:
            if "id" not in call:
                call["id"] = f"call_{made}"
                if results:
                    repairs["call ids made up"] += 1
            made += 1
        ids = [call["id"] for call in calls]
        if len(set(ids)) < len(ids):
            repairs["repeated call ids renumbered"] += 1
            for n, call in enumerate(calls):
                call["id"] = f"call_{made - len(calls) + n}"
            ids = [call["id"] for call in calls]
            given = [None] * len(results)
        if paired:
            if given != ids:
                repairs["results put in the calls' order"] += 1
                results.sort(key=lambda r: ids.index(r["tool_call_id"]))
                turns[i + 1 : end] = results
        elif results:
            if any(g is not None for g in given):
                repairs["results with unknown ids matched by order"] += 1
            else:
                repairs["results without ids matched by order"] += 1
            for result, call_id in zip(results, ids, strict=True):
                result["tool_call_id"] = call_id
        i = end


def _tools(raw: Any, messages: list[dict[str, Any]], repairs: Counter[str]) -> list[dict[str, Any]]:
    raw = _parsed(raw, "tools", repairs)
    if raw is None:
        raw = []
    if isinstance(raw, dict):
        repairs["single tool wrapped in a list"] += 1
        raw = [raw]
    if not isinstance(raw, list):
        raise Dropped("tools is not a list", type(raw).__name__)
    calls: dict[str, set[str]] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            function = call["function"]
            calls.setdefault(function["name"], set()).update(function["arguments"])
    schemas: dict[str, list[dict[str, Any]]] = {}
    for item in raw:
        tool = _tool(item, repairs)
        if tool is None:
            continue
        same_name = schemas.setdefault(tool["function"]["name"], [])
        if tool in same_name:
            repairs["duplicate tool removed"] += 1
        else:
            same_name.append(tool)
    missing = [name for name in calls if name not in schemas]
    if missing:
        raise Dropped("call to a tool that is not offered", missing[0])
    return [_fitting(name, found, calls.get(name), repairs) for name, found in schemas.items()]


def _fitting(
    name: str, schemas: list[dict[str, Any]], used: set[str] | None, repairs: Counter[str]
) -> dict[str, Any]:
    """Return the first of a name's schemas that knows every argument given; None calls it."""
    if len(schemas) == 1:
        return schemas[0]
    fitting = [tool for tool in schemas if (used or set()) <= _parameters(tool)]
    if not fitting and used is not None:
        raise Dropped("conflicting tool names, and no schema fits the call", name)
    repairs["conflicting tool names: kept the schema that fits"] += 1
    return (fitting or schemas)[0]


def _parameters(tool: dict[str, Any]) -> set[str]:
    properties = tool["function"]["parameters"].get("properties")
    return set(properties) if isinstance(properties, dict) else set()


def _tool(raw: Any, repairs: Counter[str]) -> dict[str, Any] | None:
    if not isinstance(raw, dict):
        raise Dropped("tool is not an object", type(raw).__name__)
    function = raw.get("function", raw)
    if function is raw:
        repairs["bare tool wrapped"] += 1
    if not isinstance(function, dict):
        raise Dropped("tool is not an object", type(function).__name__)
    name = function.get("name")
    if not isinstance(name, str) or not name.strip():
        repairs["tool without a name removed"] += 1
        return None
    out: dict[str, Any] = {"name": name}
    if isinstance(function.get("description"), str):
        out["description"] = function["description"]
    parameters = _parsed(function.get("parameters"), "tool parameters", repairs)
    if not isinstance(parameters, dict) or not parameters:
        if parameters:
            raise Dropped("tool parameters are not an object", type(parameters).__name__)
        parameters = {"type": "object", "properties": {}}
    required = function.get("required")
    if isinstance(required, list) and "required" not in parameters:
        if not all(isinstance(r, str) for r in required):
            raise Dropped("required holds something other than names", name)
        repairs["function-level required moved into parameters"] += 1
        known = parameters.get("properties")
        known = known if isinstance(known, dict) else {}
        parameters = parameters | {"required": [r for r in required if r in known]}
    out["parameters"] = parameters
    return {"type": "function", "function": out}
