import json
import random
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval_bfcl import pools
from eval_bfcl.outcomes import OUTCOMES, Judged, judge
from eval_bfcl.prompting import NameMap, request
from gatewright import bfcl
from gatewright.chat import Call
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


def test_a_name_that_the_prompt_never_showed_is_hallucinated(ask: Callable[..., Judged]) -> None:
    """The checker's own verdict is kept beside it."""
    dotted = gold_text(bfcl.load_split("simple_python")[1])
    judged = ask("simple_python", 1, dotted, dots="underscore")
    assert (judged.outcome, judged.official_valid) == ("hallucinated", True)
    both = dotted + "\n" + dotted.replace("math.factorial", "math_factorial")
    assert ask("simple_python", 1, both, dots="underscore").outcome == "hallucinated"


def test_all_370_names_survive_underscores() -> None:
    names = {q.tools[0]["name"] for q in bfcl.load_split("simple_python")}
    table = NameMap(sorted(names), "underscore")
    assert {table.real(table.shown(n)) for n in names} == names
    assert all("." not in table.shown(n) for n in names)
    assert table.renamed() == {n.replace(".", "_"): n for n in names if "." in n}


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["a.b", "a_b"], ["a_b_2", "a_b"]),  # in any order, the one that fits keeps its name
        (["a_b", "a.b"], ["a_b", "a_b_2"]),
        (["a.b", "a b", "a_b_2"], ["a_b_3", "a_b", "a_b_2"]),
    ],
)
def test_names_that_underscores_make_alike_are_numbered(names: list[str], shown: list[str]) -> None:
    table = NameMap(names, "underscore")
    assert [table.shown(n) for n in names] == shown
    assert [table.real(n) for n in shown] == names
    assert [NameMap(names).shown(n) for n in names] == names


def test_twins_of_a_pool_are_told_apart_in_prompt_and_verdict(
    make_pools: Callable[..., Path],
) -> None:
    """Two tools of split multiple differ in a dot alone: at k = 24 they share a pool."""
    _, (cell,) = pools.load(make_pools(split="multiple", retriever="bm25", pool_sizes="24"))
    questions = {q.id: q for q in bfcl.load_split("multiple")}
    plain = "solve_quadratic_equation"
    twins = {"solve.quadratic_equation": f"{plain}_2", plain: plain}
    seen = set()
    for row in cell.rows:
        if row.gold in twins and twins.keys() <= set(row.names):
            question = questions[row.id]
            item = request(question, cell, row, "underscore")
            assert [t["function"]["name"] for t in item.tools].count(twins[row.gold]) == 1
            assert len({t["function"]["name"] for t in item.tools}) == 24
            (call,) = bfcl.gold_calls(question)
            for name, shown in twins.items():
                text = call_text((shown, call.arguments))
                judged = judge(question, row, text, "hermes", "underscore")
                assert judged.calls[0].name == name
                assert (judged.outcome == "correct") == (name == row.gold)
            seen.add(row.gold)
    assert seen == twins.keys()


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


def test_the_checker_is_asked_again_only_where_defaults_may_change_its_verdict(
    ask: Callable[..., Judged], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bfcl.Verdict] = []
    check = bfcl.check
    slow = bfcl.Verdict(False, "checker_raised:timeout", "too slow")

    def counting(question: bfcl.Question, calls: list[Call]) -> bfcl.Verdict:
        asked.append(
            slow if calls and calls[0].arguments.get("unit") == "slow" else check(question, calls)
        )
        return asked[-1]

    def times(*answer: tuple[str, dict[str, Any]]) -> int:
        asked.clear()
        ask("simple_python", 0, call_text(*answer))
        return len(asked)

    name = GOOD[0]
    ask("simple_python", 0, "")  # pools and data are there
    monkeypatch.setattr(bfcl, "check", counting)
    assert times(GOOD) == 1  # valid as it is
    assert times() == 1
    assert times(("made_up", {})) == 1  # no schema, nothing to fill in
    assert times((name, {"base": 10, "unit": "slow"})) == 1
    assert times((name, {"base": 10, "height": 6, "unit": "units"})) == 1
    schema = bfcl.load_split("simple_python")[0].tools[0]["parameters"]["properties"]
    monkeypatch.setitem(schema["unit"], "default", "units")
    assert times((name, {"base": 10, "height": 6})) == 2


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
    assert spent < 1
    assert peak < 200e6


# Values on which the official converters' regular expressions take exponential or cubic time.
ENDLESS = [
    ("simple_javascript", "array", "[" + ",".join(["[1]"] * 40) + ","),
    ("simple_java", "HashMap", "new HashMap<>() {" + " " * 4_000),
]


@pytest.mark.parametrize(("split", "kind", "value"), ENDLESS)
def test_a_literal_that_the_converters_never_finish_is_wrong_in_bounded_time(
    ask: Callable[..., Judged],
    split: str,
    kind: str,
    value: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bfcl, "LONGEST_CHECK_S", 0.2)
    n, call, name = next(
        (n, call, name)
        for n, q in enumerate(bfcl.load_split(split))
        for call in bfcl.gold_calls(q)
        for name in call.arguments
        if q.tools[0]["parameters"]["properties"][name]["type"] == kind
    )
    assert ask(split, n, call_text((call.name, call.arguments))).outcome == "correct"
    before = time.process_time()
    judged = ask(split, n, call_text((call.name, {**call.arguments, name: value})))
    assert time.process_time() - before < 1  # the official verdict and that with defaults
    assert (judged.outcome, judged.official_valid) == ("wrong_arguments", False)
    assert judged.error_type == "checker_raised:timeout"
    assert judged.error == "the official checker needs more than 0.2 s of CPU time on this answer"


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
