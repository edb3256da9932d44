import time
import tracemalloc
from pathlib import Path

import pytest

from gatewright.chat import Call
from gatewright.python_calls import MAX_CHARS, parse_python_calls


def test_calls_are_read_with_all_kinds_of_values() -> None:
    text = "[geo.area(base=-3, unit='m', ok=True, none=None, xs=[1, 2.5], t=(1, 2), d={'a': [1]})]"
    parsed = parse_python_calls(text)
    assert parsed.kind == "calls"
    assert parsed.calls == (
        Call(
            "geo.area",
            {
                "base": -3,
                "unit": "m",
                "ok": True,
                "none": None,
                "xs": [1, 2.5],
                "t": (1, 2),
                "d": {"a": [1]},
            },
        ),
    )


@pytest.mark.parametrize(
    "text",
    ["f(a=1)", "[f(a=1)]", "```\n[f(a=1)]\n```", "```python\nf(a=1)\n```", "f(a=1)<|im_end|>\n"],
)
def test_brackets_fences_and_end_tokens_may_be_there_or_not(text: str) -> None:
    assert parse_python_calls(text).calls == (Call("f", {"a": 1}),)


def test_several_calls_and_bare_names() -> None:
    parsed = parse_python_calls("f(a=x), g(b=Color.RED)")
    assert parsed.calls == (Call("f", {"a": "x"}), Call("g", {"b": "Color.RED"}))


@pytest.mark.parametrize("text", ["", "I cannot help (sorry).", "The answer is 4.", "[]"])
def test_prose_is_no_call(text: str) -> None:
    assert parse_python_calls(text).kind == "no_call"


HOSTILE = [
    "f(a=__import__('os').system('touch PWNED'))",
    "f(a=(lambda: open('PWNED', 'w').close())())",
    "f(a=[open('PWNED', 'w') for _ in (1,)])",
    "f(a=2**2**2**2**2**99)",
    "f(a=9**9**9)",
    "f(a='x'*10**10)",
    "f(a=" + "9" * 50_000 + ")",
    "f(a=" + "9" * 129 + ")",
    "f(a=0x" + "f" * 4_000 + ")",
    "f(a=0o" + "7" * 5_000 + ")",
    "f(a=[{'b': -0b" + "1" * 15_000 + "}])",
    "f(a={0x" + "f" * 4_000 + ": 1})",
    "f(a=1" + "\n" * 60_000 + "x",
    "f(a=1" + "` " * 30_000 + "x",
    "f(a=1e999)",
    "f(a=1j)",
    "f(a=b'x')",
    "f(a=f'{1}')",
    "f(a=" + "(" * 30_000,
    "f(a=" + "[" * 2_000 + "]" * 2_000 + ")",
    "f(a=" + "-" * 60_000 + "1)",
    "f(a=" + "- " * 30_000 + "1)",
    "f(a=x" + ".y" * 30_000 + ")",
    "f(a=" + "not " * 15_000 + "1)",
    "f(a=1" + "+1" * 30_000 + ")",
    "f" + "()" * 30_000,
    "[" * 1_000_000,
    "f(a=1, a=2)",
    "f(1)",
    "f(**{'a': 1})",
    "f(a={**{}})",
    "f(a={g(): 1})",
    "f(a='\x00')",
    "f(a='\ud800')",
    "f(a='\\ud800')",
    "f(a=[{'\\udfff': 1}])",
    "f(a=1)\nimport os",
    "[f(a=1)",
    "[x for x in f()]",
    "f(a=(yield))",
    "f(a:=1)",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_costs_little_and_runs_nothing(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tracemalloc.start()
    before = time.process_time()
    parsed = parse_python_calls(text)
    spent, peak = time.process_time() - before, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert parsed.kind == "unparseable"
    assert parsed.error
    assert not parsed.calls
    assert not list(tmp_path.iterdir())
    assert spent < 1
    assert peak < 200e6


def test_space_without_a_call_is_read_in_linear_time() -> None:
    before = time.process_time()
    assert parse_python_calls(" " * 60_000 + "x").kind == "no_call"
    assert time.process_time() - before < 1


@pytest.mark.parametrize("literal", ["9" * 128, "-" + "9" * 128, hex(10**128 - 1)])
def test_whole_numbers_may_be_as_long_as_in_json(literal: str) -> None:
    assert parse_python_calls(f"f(a={literal})").calls == (Call("f", {"a": int(literal, 0)}),)


def test_a_control_character_inside_a_string_is_only_text() -> None:
    assert parse_python_calls("f(a='\\x07é')").calls == (Call("f", {"a": "\x07é"}),)


def test_the_bound_on_length_is_exact() -> None:
    head, tail = "f(a='", "')"
    fits = head + "x" * (MAX_CHARS - len(head) - len(tail)) + tail
    assert parse_python_calls(fits).kind == "calls"
    assert parse_python_calls(fits + " ").kind == "unparseable"
