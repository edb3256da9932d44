"""A reader of Python-style tool calls, `[area(base=3), geo.volume(r=[1, 2])]`, that runs nothing.

BFCL's prompting mode asks for calls in this form, and its own decoder evaluates parts of
them.  Here the text is only parsed, and the syntax tree is walked: constants, lists, tuples,
dictionaries, signed numbers and bare (dotted) names are values, everything else is refused.
Time and memory are bounded by `MAX_CHARS` and `MAX_DEPTH` whatever the text holds.
"""

from __future__ import annotations

import ast
import math
import re
import warnings
from typing import Any

from gatewright.chat import Call, Parsed, parse_calls
from gatewright.chat.bounded_json import MAX_NUMBER_CHARS
from gatewright.chat.parser import strip_end

MAX_CHARS = 65_536
"""Longest text that is parsed at all."""
MAX_DEPTH = 40
"""Deepest nesting of brackets, signs or attributes."""
MAX_CALLS = 256
"""Most calls in one answer."""

_END_TOKENS = ("`", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "</s>")
_TOO_LARGE = 10**MAX_NUMBER_CHARS
"""From here on a whole number is refused, as in JSON: Python prints no huge ones in decimal."""
_BEGINS_A_CALL = re.compile(r"\[|[A-Za-z_][\w.]*\(")


class _RefusedError(ValueError):
    """Why a text is not a list of calls."""


def parse_answer(text: str, style: str) -> Parsed:
    """Read the calls of an answer in a model's style: python, or one of `gatewright.chat`'s."""
    return parse_python_calls(text) if style == "python" else parse_calls(text, style)


def parse_python_calls(text: str) -> Parsed:
    """Read Python-style calls; never raises because of what a model wrote.

    The brackets around the list may be missing, and so may a code fence be there.  Positional
    arguments are refused: which parameter they mean is unknown without the schema.  A text
    that does not begin like a call is `no_call`.
    """
    if len(text) > MAX_CHARS:
        return Parsed("unparseable", error=f"longer than {MAX_CHARS} characters")
    text = strip_end(text, _END_TOKENS).lstrip("`\n ")
    text = text.removeprefix("python\n")
    if not _BEGINS_A_CALL.match(text):
        return Parsed("no_call")
    if not text.startswith("["):
        text = f"[{text}]"
    try:
        calls = _calls(text)
    except _RefusedError as e:
        return Parsed("unparseable", error=str(e))
    return Parsed("calls", calls) if calls else Parsed("no_call")


def _calls(text: str) -> tuple[Call, ...]:
    _bound_depth(text)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            body = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        raise _RefusedError(f"not Python syntax ({type(e).__name__})") from e
    if not isinstance(body, (ast.List, ast.Tuple)):
        raise _RefusedError("not a list of calls")
    if len(body.elts) > MAX_CALLS:
        raise _RefusedError(f"more than {MAX_CALLS} calls")
    return tuple(_call(node) for node in body.elts)


def _bound_depth(text: str) -> None:
    """Refuse deep nesting before Python's parser sees it; brackets in strings count too."""
    depth = run = 0
    for char in text:
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        # Signs and dots nest without brackets: - - - 1, a.b.c.
        run = run + 1 if char in "+-~.! " else 0
        if depth > MAX_DEPTH or run > 8 * MAX_DEPTH:
            raise _RefusedError(f"nested deeper than {MAX_DEPTH}")


def _call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call):
        raise _RefusedError(f"expected a call, not {type(node).__name__}")
    if node.args:
        raise _RefusedError("positional argument")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise _RefusedError("** argument")
        if keyword.arg in arguments:
            raise _RefusedError(f"parameter {keyword.arg!r} given twice")
        arguments[keyword.arg] = _value(keyword.value, 0)
    return Call(_name(node.func), arguments)


def _name(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
        if len(parts) > MAX_DEPTH:
            raise _RefusedError(f"nested deeper than {MAX_DEPTH}")
    if not isinstance(node, ast.Name):
        raise _RefusedError(f"{type(node).__name__} where a name should stand")
    return ".".join([node.id, *reversed(parts)])


def _value(node: ast.expr, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise _RefusedError(f"nested deeper than {MAX_DEPTH}")
    if isinstance(node, ast.Constant):
        return _constant(node.value)
    if isinstance(node, (ast.List, ast.Tuple)):
        items = [_value(item, depth + 1) for item in node.elts]
        return items if isinstance(node, ast.List) else tuple(items)
    if isinstance(node, ast.Dict):
        out: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if not isinstance(key, ast.Constant):
                raise _RefusedError("a dictionary key that is not a constant")
            out[_constant(key.value)] = _value(value, depth + 1)
        return out
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        inner = _value(node.operand, depth + 1)
        if isinstance(inner, bool) or not isinstance(inner, (int, float)):
            raise _RefusedError("a sign before something that is not a number")
        return -inner if isinstance(node.op, ast.USub) else inner
    if isinstance(node, (ast.Name, ast.Attribute)):
        return _name(node)  # a variable or an enumeration member, as BFCL takes it
    raise _RefusedError(f"{type(node).__name__} as a value")


def _constant(value: Any) -> Any:
    if isinstance(value, int) and abs(value) >= _TOO_LARGE:
        raise _RefusedError(f"a whole number of more than {MAX_NUMBER_CHARS} digits")
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise _RefusedError("broken UTF-16 surrogate in a string") from None
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise _RefusedError(f"a constant of type {type(value).__name__}")
