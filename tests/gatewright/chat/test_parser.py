"""The parser reads what models write, and nothing a model writes can break it."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gatewright.chat import MAX_CHARS, STYLES, Call, parse_calls
from gatewright.chat.bounded_json import MAX_DEPTH, JSONError, read_value

ONE = '{"name": "add", "arguments": {"a": 2, "b": [3.5, null, true]}}'
ADD = Call("add", {"a": 2, "b": [3.5, None, True]})


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>\n{ONE}\n</tool_call>",
        f"<tool_call>{ONE}</tool_call>",
        f"<tool_call>\n{ONE}\n</tool_call><|im_end|>\n",
        f"<tool_call>\n{ONE}\n",
        f"I will add them.\n<tool_call>\n{ONE}\n</tool_call> done",
        f"<think>\n<tool_call> maybe\n</think>\n<tool_call>\n{ONE}\n</tool_call>",
        "<tool_call>" + json.dumps({"name": "add", "arguments": json.dumps(ADD.arguments)}),
    ],
)
def test_hermes(text):
    parsed = parse_calls(text)
    assert (parsed.kind, parsed.calls, parsed.error) == ("calls", (ADD,), None)


def test_hermes_several():
    parsed = parse_calls(f"<tool_call>\n{ONE}\n</tool_call>\n<tool_call>{ONE}</tool_call>")
    assert parsed.calls == (ADD, ADD)


def test_a_closing_tag_inside_a_string_closes_nothing():
    text = '<tool_call>{"name": "say", "arguments": {"x": "</tool_call>"}}</tool_call>'
    assert parse_calls(text).calls == (Call("say", {"x": "</tool_call>"}),)


LLAMA_ONE = '{"name": "add", "parameters": {"a": 2, "b": [3.5, null, true]}}'


@pytest.mark.parametrize("text", [LLAMA_ONE, f"<|python_tag|>{LLAMA_ONE}<|eom_id|>", f" {ONE} "])
def test_llama3(text):
    assert parse_calls(text, "llama3").calls == (ADD,)


@pytest.mark.parametrize("between", ["; ", "\n", "<|python_tag|>"])
def test_llama3_several(between):
    assert parse_calls(f"{LLAMA_ONE}{between}{LLAMA_ONE}", "llama3").calls == (ADD, ADD)


@pytest.mark.parametrize("closing", ["</TOOLCALL>", "</TOOLCALL><SPECIAL_12>", ""])
def test_nemotron(closing):
    assert parse_calls(f"<TOOLCALL>[{ONE}, {ONE}]{closing}", "nemotron").calls == (ADD, ADD)


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("hermes", ""),
        ("hermes", "The answer is 5.<|im_end|>"),
        ("hermes", ONE),
        ("hermes", "<think> endless"),
        ("llama3", "The answer is {5}."),
        ("nemotron", "The answer is 5."),
        ("nemotron", "<TOOLCALL>[]</TOOLCALL>"),
    ],
)
def test_no_call(style, text):
    parsed = parse_calls(text, style)
    assert (parsed.kind, parsed.calls, parsed.error) == ("no_call", (), None)


def hermes(body: str) -> str:
    return f'<tool_call>\n{{"name": "f", "arguments": {{"x": {body}}}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("style", "text", "why"),
    [
        ("hermes", "<tool_call>", "expected a value"),
        ("hermes", "<tool_call>\n{'name': 'f'}\n</tool_call>", "double quotes"),
        ("hermes", '<tool_call>\n{"name": "f", "argum', "unterminated"),
        ("hermes", f"<tool_call>{ONE} and</tool_call>", "expected </tool_call>"),
        ("hermes", f"{ONE}</tool_call>", "without <tool_call>"),
        ("hermes", "<tool_call>[1]</tool_call>", "must be a JSON object"),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', 'needs "arguments"'),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', "non-empty string"),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>', "non-empty string"),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "not a list"),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{} x"}</tool_call>', "text after"),
        ("hermes", hermes("NaN"), "expected a value"),
        ("hermes", hermes("Infinity"), "expected a value"),
        ("hermes", hermes("-Infinity"), "expected a value"),
        ("hermes", hermes("1e999"), "out of range"),
        ("hermes", hermes("9" * 5000), "number longer"),
        ("hermes", hermes("01"), "expected ','"),
        ("hermes", hermes("1."), "expected ','"),
        ("hermes", hermes("٣"), "expected a value"),
        ("hermes", hermes("[" * 5000), "nested deeper"),
        ("hermes", hermes('{"k": ' * 5000), "nested deeper"),
        ("hermes", hermes('"a\nb"'), "control character"),
        ("hermes", hermes('"\\x41"'), "bad escape"),
        ("hermes", hermes('"\\u12"'), "bad \\u escape"),
        ("hermes", hermes('"\\ud800"'), "surrogate"),
        ("hermes", hermes('"\\udc00\\ud800"'), "surrogate"),
        ("hermes", hermes('"\ud800"'), "surrogate"),
        ("hermes", hermes('1, "x": 2'), "occurs twice"),
        ("hermes", hermes("[1,]"), "expected a value"),
        ("hermes", hermes("__import__('os')"), "expected a value"),
        ("hermes", "<tool_call>" + " " * MAX_CHARS, "longer than"),
        ("hermes", f"<tool_call>{ONE}</tool_call><tool_call>{{", "double quotes"),
        ("hermes", f"<tool_call>{ONE}</tool_call>" * 300, "more than"),
        ("llama3", f"{LLAMA_ONE} so", "expected a value"),
        ("llama3", "<|python_tag|>", "nothing after"),
        ("llama3", "<|python_tag|>brave_search.call(query='x')", "expected a value"),
        ("llama3", '{"answer": 5}', "non-empty string"),
        ("nemotron", f"<TOOLCALL>{ONE}</TOOLCALL>", "must hold a JSON list"),
        ("nemotron", f"<TOOLCALL>[{ONE}", "expected ',' or ']'"),
        ("nemotron", "<TOOLCALL>[" + f"{ONE}," * 300 + f"{ONE}]</TOOLCALL>", "more than"),
    ],
)
def test_unparseable(style, text, why):
    parsed = parse_calls(text, style)
    assert parsed.kind == "unparseable"
    assert parsed.calls == ()
    assert why in (parsed.error or "")


def test_an_unknown_style_is_the_callers_mistake():
    with pytest.raises(ValueError, match="unknown tool-call style 'xml'"):
        parse_calls("", "xml")


LONG = MAX_CHARS - 20
HOSTILE = {
    "brackets": "<tool_call>" + "[" * LONG,
    "opening tags": "<tool_call>" * (LONG // 11),
    "escaped quotes": '<tool_call>"' + '\\"' * (LONG // 2),
    "ends": "</s>" * (LONG // 4),
    "spaces": "<tool_call>" + " " * LONG,
    "digits": "<tool_call>" + "9" * LONG,
    "flat list": "<tool_call>[" + "1," * (LONG // 2),
    "keys": "<tool_call>{" + ",".join(f'"{i}":0' for i in range(LONG // 10)),
    "thoughts": "<think>" * (LONG // 7),
    "backslashes": '<tool_call>"' + "\\" * LONG,
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("style", STYLES)
def test_time_is_linear_in_hostile_text(name, style):
    """Quadratic work on a quarter of a million characters would take minutes."""
    text = HOSTILE[name]
    for body in (text, text.replace("<tool_call>", "<TOOLCALL>"), text.replace("<tool_call>", "{")):
        start = time.process_time()
        assert parse_calls(body, style).kind != "calls"
        assert time.process_time() - start < 5


whole_text = st.text(st.characters(exclude_categories=["Cs"]))
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | whole_text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(whole_text, inner, max_size=4),
    max_leaves=20,
)
FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<TOOLCALL>", "</TOOLCALL>", "<|python_tag|>", "<think>"),
    *("{", "}", "[", "]", '"', "\\", "\\u", "d800", ":", ",", "-", "0", "1e9", "null", "\n"),
    *('"name"', '"arguments"', '"parameters"', '{"name": "f", "arguments": {}}', "\x00"),
]


@settings(max_examples=150, deadline=None)
@given(value=json_values, ascii_only=st.booleans(), indent=st.sampled_from([None, 2]))
def test_reads_all_that_json_writes(value, ascii_only, indent):
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert read_value(f"  {text} tail") == (value, len(text) + 2)


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=5), max_size=40),
    style=st.sampled_from(STYLES),
)
def test_never_raises(pieces, style):
    parsed = parse_calls("".join(pieces), style)
    assert (parsed.kind == "calls") == bool(parsed.calls)
    assert (parsed.kind == "unparseable") == (parsed.error is not None)
    json.dumps([c.arguments for c in parsed.calls], allow_nan=False).encode()


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.sampled_from('{}[]",:\\ue0-19.tfn a\n'), max_size=60))
def test_accepts_nothing_that_json_refuses(text):
    try:
        value, end = read_value(text)
    except JSONError:
        return
    assert json.loads(text[:end].strip()) == value


def test_depth_limit_is_exact():
    assert read_value("[" * MAX_DEPTH + "]" * MAX_DEPTH)[1] == 2 * MAX_DEPTH
    with pytest.raises(JSONError, match="nested deeper"):
        read_value("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1))


def test_surrogate_pairs_join():
    assert read_value('"\\ud83d\\ude00"')[0] == "😀"
