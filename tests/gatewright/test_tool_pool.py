import itertools

import numpy as np
import pytest

from gatewright import bfcl
from gatewright.tool_pool import ToolPool, cut

# Rank of the correct tool of simple_python_N under BM25 where it is not 1, computed with
# rank-bm25 0.2.2 on bfcl_eval 2026.3.23; and the recall that follows.
# fmt: off
RANKS_NOT_1 = {
    2: 2, 6: 3, 8: 3, 9: 2, 11: 2, 12: 2, 13: 4, 16: 2, 17: 3, 21: 2, 22: 2, 25: 2, 31: 4, 37:
    2, 39: 2, 58: 2, 63: 70, 70: 2, 84: 2, 85: 8, 91: 2, 96: 5, 102: 25, 103: 2, 104: 3, 107:
    2, 112: 15, 114: 2, 115: 3, 116: 18, 117: 5, 118: 2, 121: 5, 136: 4, 155: 2, 165: 3, 173:
    3, 177: 2, 182: 2, 183: 2, 186: 3, 196: 2, 207: 2, 208: 2, 216: 2, 222: 2, 225: 14, 230:
    2, 232: 22, 233: 3, 235: 129, 236: 191, 240: 5, 241: 2, 243: 2, 245: 2, 248: 31, 253: 2,
    268: 2, 270: 4, 272: 2, 277: 2, 286: 2, 299: 3, 303: 2, 305: 2, 311: 5, 312: 2, 317: 2,
    319: 2, 320: 3, 321: 3, 325: 3, 328: 3, 337: 3, 344: 4, 358: 2, 360: 2, 361: 4, 364: 6,
    365: 367, 366: 26, 367: 2, 374: 326, 376: 10, 380: 3, 384: 2, 387: 4, 388: 363, 393: 186,
}
RECALL_PERCENT_AT_K = {
    1: 77.5, 2: 88.75, 4: 94.5, 8: 96.25, 16: 97.0, 24: 97.5, 32: 98.25, 48: 98.25, 64: 98.25,
    96: 98.5, 128: 98.5, 256: 99.25, 370: 100.0,
}
# fmt: on


def test_bm25_ranks_of_all_400_questions() -> None:
    questions = bfcl.load_split("simple_python")
    slots: dict[str, dict] = {}
    for q in questions:
        slots.setdefault(q.tools[0]["name"], q.tools[0])
    number = {name: i for i, name in enumerate(slots)}
    pool = ToolPool(list(slots.values()))
    assert len(pool) == 370
    ranks = []
    for q in questions:
        own = number[q.tools[0]["name"]]
        ranks.append(pool.rank(q.query, {own: q.tools[0]}).index(own) + 1)
    assert {i: r for i, r in enumerate(ranks) if r != 1} == RANKS_NOT_1
    recall = {k: 100 * sum(r <= k for r in ranks) / 400 for k in RECALL_PERCENT_AT_K}
    assert recall == RECALL_PERCENT_AT_K


TOOLS = [
    {"name": "area", "description": "Area of a circle", "parameters": {"properties": {}}},
    {"name": "rain", "description": "Weather in a city", "parameters": {"properties": {}}},
    {"name": "sort", "description": "Sort numbers", "parameters": {"properties": {}}},
]


def test_openai_and_bfcl_schemas_rank_alike() -> None:
    wrapped = [{"type": "function", "function": t} for t in TOOLS]
    query = "weather of city"
    assert ToolPool(TOOLS).rank(query) == ToolPool(wrapped).rank(query)
    assert ToolPool(TOOLS).rank(query)[0] == 1


def test_another_schema_in_a_slot_changes_the_whole_index() -> None:
    pool = ToolPool(TOOLS)
    other = {"name": "sort", "description": "weather weather city", "parameters": {}}
    assert pool.rank("weather city")[0] == 1
    assert pool.rank("weather city", {2: other})[0] == 2
    direct = ToolPool([*TOOLS[:2], other])
    np.testing.assert_array_equal(pool.scores("city", {2: other}), direct.scores("city"))
    assert pool.rank("weather city")[0] == 1  # the corpus itself is as before


def test_a_retrieved_tool_leaves_the_ranking_alone() -> None:
    c = cut([3, 1, 0, 2], 3, [1], ("q", 0))
    assert (c.items, c.ranks, c.retrieved, c.injected) == ([3, 1, 0], [2], True, False)


def test_a_missing_tool_replaces_the_last_one_at_a_uniform_place() -> None:
    places = []
    for seed in range(3000):
        c = cut(list(range(10)), 4, [7], ("q", seed))
        assert (c.retrieved, c.injected, c.ranks) == (False, True, [8])
        place = c.items.index(7)
        assert [i for i in c.items if i != 7] == [0, 1, 2]  # the fourth, item 3, has gone
        places.append(place)
    counts = np.bincount(places, minlength=4)
    chi2 = float(((counts - 750) ** 2 / 750).sum())
    assert chi2 < 16.3  # p = 0.001 at 3 degrees of freedom
    assert places[0] == cut(list(range(10)), 4, [7], ("q", 0)).items.index(7)


def test_pools_of_growing_k_are_nested_while_nothing_is_injected() -> None:
    ranking = list(np.random.default_rng(0).permutation(50))
    pools = [cut(ranking, k, [ranking[0]], ("q", 0)).items for k in (1, 4, 24, 50)]
    for small, large in itertools.pairwise(pools):
        assert large[: len(small)] == small


def test_several_correct_tools_are_all_in() -> None:
    c = cut([5, 4, 3, 2, 1, 0], 3, [4, 0, 1], ("q", 1))
    assert sorted(c.items) == [0, 1, 4]
    assert c.ranks == [2, 6, 5]
    assert (c.retrieved, c.injected) == (False, True)
    with pytest.raises(ValueError, match="cannot hold 3"):
        cut([5, 4, 3, 2, 1, 0], 2, [4, 0, 1], ("q", 1))


def test_a_pool_of_one_is_the_correct_tool() -> None:
    assert cut([5, 4, 3], 1, [3], ("q", 0)).items == [3]
