"""A JSON reader for model output: strict, one pass, bounded in time, memory and depth.

It differs from `json.loads` where a model's text must not be trusted or guessed at:

- it reads one value from a position and says where the value ends, so that text around a
  value (closing tags, further calls) is the caller's business;
- it keeps its own stack, so nesting ends in an error at a stated depth, not in a
  RecursionError;
- numbers are at most `MAX_NUMBER_CHARS` long and finite: NaN, Infinity and 1e999 are refused;
- a repeated key in one object is refused: either value would be a guess;
- raw control characters and lone surrogates in strings are refused, as RFC 8259 demands or
  advises (section 7 and 8.2).

Every character is looked at a constant number of times, whatever the text.
"""

from __future__ import annotations

import math
import re
from typing import Any

MAX_DEPTH = 64
"""Deepest nesting of arrays and objects."""
MAX_NUMBER_CHARS = 128
"""Longest number literal."""

_SPACE = re.compile(r"[ \t\n\r]*+")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*+')
_NUMBER = re.compile(r"(-?(?:0|[1-9]\d*+))(\.\d++)?([eE][-+]?\d++)?", re.ASCII)
_HEX = re.compile(r"[0-9A-Fa-f]{4}")
_ESCAPES = {
    '"': '"',
    "\\": "\\",
    "/": "/",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
}
_LITERALS = (("true", True), ("false", False), ("null", None))


class JSONError(ValueError):
    """What is wrong, and at which character of the text."""


def skip_space(text: str, at: int) -> int:
    """Return the position of the first character at or after `at` that is not JSON space."""
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


def _surrogate_free(piece: str, at: int) -> str:
    try:
        piece.encode("utf-8")
    except UnicodeEncodeError:
        raise JSONError(f"broken UTF-16 surrogate in the string at character {at}") from None
    return piece


def _escape_u(text: str, at: int) -> tuple[str, int]:
    """Read `XXXX` of a \\uXXXX escape, joining a surrogate pair; `at` is after the `u`."""
    first = _HEX.match(text, at)
    if not first:
        raise JSONError(f"bad \\u escape at character {at}")
    code, at = int(first.group(), 16), first.end()
    if 0xD800 <= code < 0xDC00 and text.startswith("\\u", at):
        second = _HEX.match(text, at + 2)
        low = int(second.group(), 16) if second else 0
        if second and 0xDC00 <= low < 0xE000:
            return chr(0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)), second.end()
    return chr(code), at


def _string(text: str, at: int) -> tuple[str, int]:
    """Read a string; `at` is after the opening quote."""
    start, pieces = at, []
    while True:
        plain = _PLAIN.match(text, at)
        assert plain is not None
        pieces.append(plain.group())
        at = plain.end()
        if at >= len(text):
            raise JSONError(f"unterminated string that starts at character {start - 1}")
        char = text[at]
        if char == '"':
            return _surrogate_free("".join(pieces), start - 1), at + 1
        if char != "\\":
            raise JSONError(f"raw control character in a string at character {at}")
        escape = text[at + 1 : at + 2]
        if escape == "u":
            piece, at = _escape_u(text, at + 2)
            pieces.append(piece)
        elif escape in _ESCAPES:
            pieces.append(_ESCAPES[escape])
            at += 2
        else:
            raise JSONError(f"bad escape at character {at}")


def _scalar(text: str, at: int) -> tuple[Any, int]:
    if text.startswith('"', at):
        return _string(text, at + 1)
    for word, value in _LITERALS:
        if text.startswith(word, at):
            return value, at + len(word)
    # A window, so that a megabyte of digits costs no more than a short number.
    match = _NUMBER.match(text, at, at + MAX_NUMBER_CHARS + 1)
    if not match:
        found = repr(text[at]) if at < len(text) else "the end"
        raise JSONError(f"expected a value at character {at}, found {found}")
    if match.end() - at > MAX_NUMBER_CHARS:
        raise JSONError(f"number longer than {MAX_NUMBER_CHARS} characters at character {at}")
    whole, fraction, exponent = match.groups()
    if fraction is None and exponent is None:
        return int(whole), match.end()
    number = float(match.group())
    if not math.isfinite(number):
        raise JSONError(f"number out of range at character {at}")
    return number, match.end()


def _key(text: str, at: int, into: dict[str, Any]) -> tuple[str, int]:
    """Read `"key" :` and return the key and the position of its value."""
    if not text.startswith('"', at):
        raise JSONError(f"expected a key in double quotes at character {at}")
    key, after = _string(text, at + 1)
    if key in into:
        raise JSONError(f"key {key[:40]!r} occurs twice, again at character {at}")
    after = skip_space(text, after)
    if not text.startswith(":", after):
        raise JSONError(f"expected ':' at character {after}")
    return key, skip_space(text, after + 1)


def read_value(text: str, at: int = 0, max_depth: int = MAX_DEPTH) -> tuple[Any, int]:
    """Read one JSON value that starts at `at` (leading space allowed).

    Returns:
        The value and the position just after it.

    Raises:
        JSONError: the text is not one of the values this reader accepts.
    """
    # The stack holds (container, key that opened it in its parent).
    stack: list[tuple[dict[str, Any] | list[Any], str | None]] = []
    key: str | None = None
    at = skip_space(text, at)
    while True:
        # Here a value is due at `at`.
        char = text[at : at + 1]
        if char in ("{", "["):
            if len(stack) >= max_depth:
                raise JSONError(f"nested deeper than {max_depth} at character {at}")
            container: dict[str, Any] | list[Any] = {} if char == "{" else []
            at = skip_space(text, at + 1)
            if not text.startswith("}" if char == "{" else "]", at):
                stack.append((container, key))
                key = None
                if isinstance(container, dict):
                    key, at = _key(text, at, container)
                continue
            value: Any = container
            at += 1
        else:
            value, at = _scalar(text, at)
        # A value is complete: put it where it belongs, closing containers as they end.
        while stack:
            parent, parent_key = stack[-1]
            if isinstance(parent, dict):
                assert key is not None
                parent[key] = value
                closing = "}"
            else:
                parent.append(value)
                closing = "]"
            at = skip_space(text, at)
            if text.startswith(",", at):
                at = skip_space(text, at + 1)
                if isinstance(parent, dict):
                    key, at = _key(text, at, parent)
                break
            if not text.startswith(closing, at):
                raise JSONError(f"expected ',' or {closing!r} at character {at}")
            at += 1
            value, key = parent, parent_key
            stack.pop()
        else:
            return value, at
