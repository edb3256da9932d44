from typing import Any

import pytest

from eval_bfcl import paired, tally
from gatewright.statistics import mcnemar_exact, sign_flip_test

FACTS = {"split": "s", "retriever": "bm25", "beta": None, "utility": None}
OTHER = ["the tool", "another"]


def run(model: str, right: int, seeds: int = 1, **fields: Any) -> tally.Run:
    """A model that is right on the first questions of 20, in every pool seed."""
    rows = [
        {
            "id": f"q{n:02}",
            "seed": seed,
            "k": 4,
            "outcome": "correct" if n < right else "no_call",
            "gold": "g",
            "valid_call": n < right,
            "names": ["g", "another"],
            **fields,
        }
        for seed in range(seeds)
        for n in range(20)
    ]
    return {**FACTS, "model": model}, rows


def test_pool_seeds_that_repeat_a_question_are_no_new_evidence() -> None:
    (alone, *_), _ = paired.paired_tests([run("a", 15), run("b", 10)])
    (several, *_), _ = paired.paired_tests([run("a", 15, seeds=3), run("b", 10, seeds=3)])
    assert (alone.only_a, alone.only_b, alone.n, alone.seeds) == (5, 0, 20, 1)
    assert (several.only_a, several.only_b, several.n, several.seeds) == (5, 0, 20, 3)
    assert alone.p == mcnemar_exact(5, 0) == 0.0625
    assert several.p == sign_flip_test([3] * 5) == 0.0625


def test_every_rate_is_a_family_of_its_own() -> None:
    tests, notes = paired.paired_tests([run("a", 15), run("b", 10), run("c", 10)])
    assert notes == []
    assert [t.rate for t in tests] == list(paired.TESTED) * 3
    accuracy = [t for t in tests if t.rate == "accuracy"]
    assert [t.p for t in accuracy] == [0.0625, 0.0625, 1]
    assert [t.p_holm for t in accuracy] == [0.1875, 0.1875, 1]


def test_pools_of_one_name_and_other_tools_are_not_compared() -> None:
    a, b = run("a", 15), run("b", 10)
    b[1][3]["names"] = OTHER  # type: ignore[index]
    assert paired.paired_tests([a, b]) == (
        [],
        ["a and b are not compared on s, bm25, k = 4: 1 of their pools differ."],
    )


@pytest.mark.parametrize("fields", [{"seed": 1}, {"outcome": "error"}, {"k": 8}])
def test_runs_that_share_no_judged_pool_have_no_test(fields: dict[str, Any]) -> None:
    assert paired.paired_tests([run("a", 15), run("b", 10, **fields)]) == ([], [])


def test_where_no_tool_is_right_none_is_the_right_one() -> None:
    fields: dict[str, Any] = {
        "gold": None,
        "retrieved": True,
        "official_valid": True,
        "defaults_valid": True,
    }
    fields |= {"new_tokens": 1, "prompt_tokens": 1, "over_context": False}
    fields |= {"raw": "", "calls": []}
    a, b = run("a", 15, **fields), run("b", 10, **fields)
    assert {t.rate for t in paired.paired_tests([a, b])[0]} == {"accuracy", "hallucination"}
    row = tally.summarise([a])[-1]
    assert row["accuracy"] == 0.75
    assert row["right_tool"] is row["accuracy_given_retrieved"] is row["recall"] is None
