"""JSON as the standard has it, a row per line: what Python would let pass, and why.

`json.loads` reads NaN and Infinity, takes the last of two equal keys, and ends in a
RecursionError; each would be a guess or the end of a run.  `strict_json` is for rows that
strangers wrote, `rows` for the files of this project.  (Model output is read by the
slower `gatewright.chat.bounded_json`, which also says where a value ends.)
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from gatewright.errors import UserError


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice in one object")
    return found


def strict_json(text: str) -> Any:
    """Parse JSON as the standard has it: no NaN, no Infinity, no repeated key, bounded depth.

    Raises:
        ValueError: anything that is not JSON.
    """
    try:
        return json.loads(
            text,
            parse_constant=_no_constant,
            parse_float=_finite,
            object_pairs_hook=_distinct,
        )
    except RecursionError as e:
        raise ValueError("nested too deeply") from e


def rows(lines: Iterable[bytes], path: Path, again: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the JSON objects of a file's lines with their numbers, counted from 1.

    A line that is blank, or holds NaN or Infinity, is none.  Equal keys pass, unlike in
    `strict_json`: a model may write them (`{1: 2, "1": 3}` in Python), and scores keep its calls.

    Args:
        lines: the file, opened in binary mode, or its lines.
        path: its name, for the error message.
        again: the way out, for the error message.

    Raises:
        UserError: a line is not UTF-8, not JSON or not an object (the line is named).
    """
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line.decode("utf-8"), parse_constant=_no_constant, parse_float=_finite)
        except (ValueError, RecursionError) as e:  # UnicodeDecodeError is a ValueError too
            said = e.msg if isinstance(e, json.JSONDecodeError) else str(e)
            raise UserError(f"{path}:{number}: is not JSON ({said}); {again}") from e
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}: is not a JSON object; {again}")
        yield number, row
