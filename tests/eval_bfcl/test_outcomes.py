import json
import random
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from eval_bfcl import pools
from eval_bfcl.outcomes import OUTCOMES, Judged, judge
from eval_bfcl.prompting import NameMap
from gatewright import bfcl
from gatewright.errors import UserError
from tests.eval_bfcl.gold import call_text, gold_text


@pytest.fixture(scope="module")
def ask(make_pools: Callable[..., Path]) -> Callable[..., Judged]:
    """Return a function that judges a text as the answer to a question of a split."""
    sizes = {"parallel_multiple": "4", "parallel": "4"}
    cells: dict[str, pools.Cell] = {}

    def judged(split: str, n: int, text: str, style: str = "hermes", dots: str = "keep") -> Judged:
        if split not in cells:
            folder = make_pools(split=split, retriever="bm25", pool_sizes=sizes.get(split, "1,4"))
            cells[split] = pools.load(folder)[1][-1]
        question = bfcl.load_split(split)[n]
        return judge(question, cells[split].rows[n], text, style, dots)  # type: ignore[arg-type]

    return judged


GOOD = ("calculate_triangle_area", {"base": 10, "height": 5})


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        (call_text(GOOD), "correct"),
        (call_text(GOOD) + "<|im_end|>", "correct"),
        ("Let me see.\n" + call_text(GOOD), "correct"),
        (call_text((GOOD[0], {"base": 10, "height": 6})), "wrong_arguments"),
        (call_text((GOOD[0], {})), "wrong_arguments"),
        (call_text(("calculate_area", GOOD[1])), "wrong_tool"),
        (call_text(("calculate_area_of_triangles", GOOD[1])), "hallucinated"),
        (call_text(("calculate_triangle_area ", GOOD[1])), "hallucinated"),
        (call_text(GOOD, GOOD), "several_calls"),
        (call_text(GOOD, ("made_up", {})), "hallucinated"),
        ("The area is 25.", "no_call"),
        ("", "no_call"),
        ('<tool_call>\n{"name": "calculate_triangle_area"', "unparseable"),
        ("<tool_call>\ncalculate_triangle_area(base=10, height=5)\n</tool_call>", "unparseable"),
    ],
)
def test_outcomes_of_simple_python(ask: Callable[..., Judged], text: str, outcome: str) -> None:
    judged = ask("simple_python", 0, text)
    assert judged.outcome == outcome
    assert judged.official_valid == (outcome == "correct")
    assert judged.valid_call == (outcome not in ("no_call", "unparseable"))
    assert outcome in OUTCOMES


def test_python_style_calls_are_judged_alike(ask: Callable[..., Judged]) -> None:
    text = "[calculate_triangle_area(base=10, height=5)]"
    assert ask("simple_python", 0, text, style="python").outcome == "correct"
    assert ask("simple_python", 0, "I cannot.", style="python").outcome == "no_call"
    assert ask("simple_python", 0, "f(", style="python").outcome == "unparseable"


def test_parallel_calls(ask: Callable[..., Judged]) -> None:
    q = bfcl.load_split("parallel")[0]
    first, second = ((c.name, c.arguments) for c in bfcl.gold_calls(q))
    assert ask("parallel", 0, call_text(first, second)).outcome == "correct"
    assert ask("parallel", 0, call_text(second, first)).outcome == "correct"
    assert ask("parallel", 0, call_text(first)).outcome == "missing_calls"
    assert ask("parallel", 0, call_text(first, second, first)).outcome == "several_calls"
    assert ask("parallel", 0, call_text(first, first)).outcome == "wrong_arguments"
    assert ask("parallel", 0, call_text(first, ("made_up", {}))).outcome == "hallucinated"


def test_several_tools_in_one_answer(ask: Callable[..., Judged]) -> None:
    q = bfcl.load_split("parallel_multiple")[0]
    assert ask("parallel_multiple", 0, gold_text(q)).outcome == "correct"
    first = bfcl.gold_calls(q)[0]
    twice = call_text((first.name, first.arguments), (first.name, first.arguments))
    assert ask("parallel_multiple", 0, twice).outcome == "wrong_tool"


def test_irrelevance_wants_no_call(ask: Callable[..., Judged]) -> None:
    q = bfcl.load_split("irrelevance")[0]
    assert ask("irrelevance", 0, "I have no tool for this.").outcome == "correct"
    assert ask("irrelevance", 0, "<tool_call>{").outcome == "correct"  # the official rule
    assert ask("irrelevance", 0, call_text(("made_up", {}))).outcome == "hallucinated"
    in_pool = call_text((q.tools[0]["name"], {}))
    assert ask("irrelevance", 0, in_pool).outcome in ("wrong_tool", "hallucinated")


def test_dotted_names_go_through_one_map(ask: Callable[..., Judged]) -> None:
    q = bfcl.load_split("simple_python")[1]
    assert q.gold_names == ["math.factorial"]
    dotted, underscored = gold_text(q), gold_text(q).replace("math.factorial", "math_factorial")
    assert ask("simple_python", 1, dotted).outcome == "correct"
    assert ask("simple_python", 1, underscored).outcome == "hallucinated"
    assert ask("simple_python", 1, underscored, dots="underscore").outcome == "correct"
    assert ask("simple_python", 1, underscored, dots="underscore").calls[0].name == "math.factorial"


def test_all_370_names_survive_underscores_and_twins_are_refused() -> None:
    names = {q.tools[0]["name"] for q in bfcl.load_split("simple_python")}
    table = NameMap(sorted(names), "underscore")
    assert {table.real(table.shown(n)) for n in names} == names
    assert all("." not in table.shown(n) for n in names)
    with pytest.raises(UserError, match="become 'a_b'"):
        NameMap(["a.b", "a_b"], "underscore")


def test_schema_defaults_are_a_score_of_their_own(ask: Callable[..., Judged]) -> None:
    """A parameter that must be given although the schema has a default for it."""
    found = 0
    for n, q in enumerate(bfcl.load_split("simple_python")):
        (call,) = bfcl.gold_calls(q)
        properties = q.tools[0]["parameters"]["properties"]
        for name in call.arguments:
            acceptable = q.gold[0][call.name][name]
            default = properties[name].get("default")
            if default is None or "" in acceptable or default not in acceptable:
                continue
            rest = {k: v for k, v in call.arguments.items() if k != name}
            judged = ask("simple_python", n, call_text((call.name, rest)))
            assert (judged.outcome, judged.official_valid) == ("wrong_arguments", False)
            assert judged.defaults_valid
            found += 1
    assert found >= 1


HOSTILE = [
    "<tool_call>\n" + "[" * 3_000_000,
    "<tool_call>\n" + '{"a":' * 200_000,
    "<tool_call>" * 20_000,
    '<tool_call>{"name": "f", "arguments": {"x": ' + "9" * 200_000 + "}}</tool_call>",
    '<tool_call>{"name": "f", "arguments": {"x": 1e999999}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": __import__("os").system("touch PWNED")}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"x": "\x00\x1b[2J"}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"x": "\ud800"}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>',
    '<tool_call>{"name": ["f"], "arguments": {}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    b'<tool_call>{"name": "\xff\xfe\xc3\x28"'.decode("utf-8", "replace"),
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_outputs_are_unparseable_at_bounded_cost(
    ask: Callable[..., Judged], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask("simple_python", 0, "")  # pools and data are there before the clock starts
    monkeypatch.chdir(tmp_path)
    tracemalloc.start()
    before = time.process_time()
    judged = ask("simple_python", 0, text)
    spent, peak = time.process_time() - before, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert judged.outcome == "unparseable"
    assert not list(tmp_path.iterdir())
    assert spent < 10
    assert peak < 200e6


def test_arguments_of_any_shape_never_break_the_judgement(ask: Callable[..., Judged]) -> None:
    deep: object = 1
    for _ in range(50):
        deep = [deep]
    for value in (None, True, [], {}, [[]], [{}], {"a": {"b": []}}, "x" * 10_000, 10**100, deep):
        for n, q in enumerate(bfcl.load_split("simple_python")[:60]):
            (call,) = bfcl.gold_calls(q)
            text = call_text((call.name, dict.fromkeys(call.arguments, value)))
            judged = ask("simple_python", n, text)
            assert judged.outcome in ("wrong_arguments", "correct")


PIECES = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<|im_end|>",
        "<think>",
        "</think>",
        "\n",
        " ",
        "[",
        "]",
        "{",
        "}",
    ),
    *(
        '{"name": ',
        '"arguments": ',
        '"calculate_triangle_area"',
        '"made_up"',
        ", ",
        ": ",
        '"base"',
        "10",
    ),
    *("<|python_tag|>", "<TOOLCALL>", "</TOOLCALL>", "f(", "x=", ")", "\\u0000", "null", "1e9"),
]
WHOLE = {
    "hermes": [call_text(GOOD), call_text(("made_up", {}))],
    "llama3": [json.dumps({"name": n, "parameters": GOOD[1]}) for n in (GOOD[0], "made_up")],
    "nemotron": [
        f"<TOOLCALL>[{json.dumps({'name': n, 'arguments': GOOD[1]})}]</TOOLCALL>"
        for n in (GOOD[0], "made_up")
    ],
    "python": ["[calculate_triangle_area(base=10, height=5)]", "made_up(x=1)"],
}


@pytest.mark.parametrize("style", ["hermes", "llama3", "nemotron", "python"])
def test_whatever_is_written_has_exactly_one_outcome(
    ask: Callable[..., Judged], style: str
) -> None:
    """Random texts of telling pieces: outcomes, verdicts and calls never contradict each other."""
    rng = random.Random(style)
    seen: set[str] = set()
    for _ in range(400):
        pieces = [rng.choice(PIECES) for _ in range(rng.randrange(6))]
        pieces.insert(rng.randrange(len(pieces) + 1), rng.choice([*WHOLE[style], ""]))
        text = "".join(pieces)
        for split in ("simple_python", "irrelevance"):
            judged = ask(split, 0, text, style=style)
            assert judged.outcome in OUTCOMES
            assert judged.outcome != "error"
            assert judged.valid_call == bool(judged.calls)
            if split == "irrelevance":
                assert (judged.outcome == "correct") == (not judged.calls)
                continue
            seen.add(judged.outcome)
            assert (judged.outcome == "correct") == judged.official_valid
            assert (judged.outcome in ("no_call", "unparseable")) == (not judged.calls)
            assert (judged.outcome == "unparseable") <= (judged.error_type == "unparseable")
            known = {"calculate_triangle_area"}
            if judged.outcome in ("correct", "wrong_arguments"):
                assert {c.name for c in judged.calls} == known
            if judged.outcome == "hallucinated":
                assert {c.name for c in judged.calls} - known
    assert {"correct", "hallucinated", "no_call", "unparseable"} <= seen
