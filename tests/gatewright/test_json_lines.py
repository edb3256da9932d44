import io
from pathlib import Path

import pytest

from gatewright.errors import UserError
from gatewright.json_lines import rows, strict_json


def test_rows_carry_the_numbers_of_their_lines() -> None:
    file = io.BytesIO(b'{"a": 1.5}\n{"a": {"1": 2, "1": 3}}\r\n{"a": "\xc3\xa9"}')
    assert list(rows(file, Path("x"), "")) == [
        (1, {"a": 1.5}),
        (2, {"a": {"1": 3}}),
        (3, {"a": "é"}),
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"", r"is not JSON \(Expecting value\)"),
        (b'{"a": ', r"is not JSON \(Expecting value\)"),
        (b'{"a": NaN}', r"is not JSON \(NaN is not JSON\)"),
        (b'{"a": -Infinity}', r"is not JSON \(-Infinity is not JSON\)"),
        (b'{"a": 1e999}', r"is not JSON \(1e999 is not a finite number\)"),
        (b'{"a": "\xff"}', r"is not JSON \('utf-8' codec"),
        (b"[" * 100_000, r"is not JSON \("),
        (b"[1]", "is not a JSON object"),
        (b"null", "is not a JSON object"),
    ],
)
def test_a_line_that_is_no_row_is_named(line: bytes, said: str) -> None:
    with pytest.raises(UserError, match=f"^x.jsonl:2: {said}.*; make it again$"):
        list(rows([b'{"a": 1}', line], Path("x.jsonl"), "make it again"))


def test_strangers_rows_have_each_key_once() -> None:
    assert strict_json('{"a": 1}') == {"a": 1}
    with pytest.raises(ValueError, match="a key occurs twice"):
        strict_json('{"a": 1, "a": 2}')
