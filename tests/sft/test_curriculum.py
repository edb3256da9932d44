"""Pool sizes over time."""

import dataclasses

import pytest

from gatewright.chat import parse_calls
from sft.curriculum import PoolCurriculum, levels
from sft.evaluate import judge
from sft.recipes import RECIPES, TrainConfig

BASE = RECIPES.get("mamba2_debug_cpu")


def config(**changes: object) -> TrainConfig:
    return dataclasses.replace(BASE, **changes)  # type: ignore[arg-type]


def test_levels_double_and_end_at_the_largest() -> None:
    assert levels(1, 24) == [1, 2, 4, 8, 16, 24]
    assert levels(4, 8) == [4, 8]
    assert levels(8, 8) == [8]
    assert levels(9, 8) == [8]


def test_fixed_is_the_largest_throughout() -> None:
    fixed = PoolCurriculum(config(curriculum="fixed"), 10, 24)
    assert [fixed.at(i) for i in range(10)] == [24] * 10
    assert not fixed.report(1.0)


def test_a_ramp_gives_each_level_its_share_of_the_steps() -> None:
    ramp = PoolCurriculum(config(curriculum="ramp", ramp_share=0.5), 100, 24)
    sizes = [ramp.at(i) for i in range(100)]
    assert [sizes.count(k) for k in (1, 2, 4, 8, 16)] == [10] * 5
    assert sizes[50:] == [24] * 50
    assert sizes == sorted(sizes)


def test_gated_waits_for_success() -> None:
    gated = PoolCurriculum(
        config(curriculum="gated", eval_every=5, eval_calls=8, gate_threshold=0.7), 100, 4
    )
    assert gated.at(0) == gated.at(99) == 1
    assert not gated.report(0.69)
    assert gated.at(50) == 1
    assert gated.report(0.7)
    assert gated.at(51) == 2
    assert gated.report(1.0)
    assert gated.at(52) == 4
    assert not gated.report(1.0)  # the largest already


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
            "parsed first_tool right_tool exact",
        ),
        (
            '<tool_call>\n{"name": "f", "arguments": {"a": 2}}\n</tool_call>',
            "parsed first_tool right_tool",
        ),
        ('<tool_call>\n{"name": "g", "arguments": {"a": 1}}\n</tool_call>', "parsed"),
        ('<tool_call>\n{"name": "h", "arguments": {}}\n</tool_call>', "parsed hallucinated"),
        (
            '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
            '\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
            "parsed first_tool",
        ),
        ("I cannot.", ""),
        ("<tool_call>\n{", ""),
    ],
)
def test_judging_an_answer(text: str, expected: str) -> None:
    gold = [{"name": "f", "arguments": {"a": 1}}]
    found = judge(parse_calls(text), gold, {"f", "g"})
    assert {name for name, hit in found.items() if hit} == set(expected.split())
