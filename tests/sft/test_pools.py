"""Training pools: sizes, members, orders, and the bounded tool corpus."""

from collections import Counter
from typing import Any

import pytest

from gatewright.tool_pool import ToolPool
from sft.pools import PoolBuilder, ToolCorpus
from tests.sft.material import WORDS, tool

CORPUS = [tool(f"{a}_{b}", "item", description=f"Can {a} a {b}.") for a in WORDS for b in WORDS]


def names(tools: list[dict[str, Any]]) -> list[str]:
    return [t["function"]["name"] for t in tools]


def own(*chosen: str) -> list[dict[str, Any]]:
    return [t for t in CORPUS if t["function"]["name"] in chosen]


def test_sizes_are_uniform_in_1_to_k() -> None:
    builder = PoolBuilder(CORPUS, 6)
    sizes = Counter(
        len(builder.draw("alpha", own("alpha_bravo"), ["alpha_bravo"], (i,)).tools)
        for i in range(1200)
    )
    assert sorted(sizes) == [1, 2, 3, 4, 5, 6]
    assert all(abs(n - 200) < 60 for n in sizes.values())  # five standard deviations


def test_pools_are_the_corpus_ranking_best_first() -> None:
    query = "please delta the golf"
    builder = PoolBuilder(CORPUS, 24)
    ranking = ToolPool(CORPUS).rank(query)
    pool = builder.draw(query, own("delta_golf"), ["delta_golf"], ("x",), size=24)
    assert names(pool.tools)[0] == "delta_golf"
    assert names(pool.tools) == [CORPUS[i]["function"]["name"] for i in ranking[:24]]
    assert not pool.injected


def test_a_called_tool_is_always_in_and_other_own_tools_come_before_distractors() -> None:
    builder = PoolBuilder(CORPUS, 8)
    mine = own("hotel_hotel", "india_india", "juliet_juliet")
    for i in range(50):
        pool = builder.draw("alpha bravo", mine, ["india_india"], (i,))
        assert "india_india" in names(pool.tools)
        assert len(set(names(pool.tools))) == len(pool.tools) == pool.drawn
        if pool.drawn >= 3:
            assert {"hotel_hotel", "juliet_juliet"} <= set(names(pool.tools))
            assert pool.own_left_out == 0
        else:
            assert pool.own_left_out == 3 - pool.drawn


def test_a_called_tool_that_is_not_retrieved_stands_anywhere() -> None:
    builder = PoolBuilder(CORPUS, 4)
    places = Counter()
    for i in range(400):
        pool = builder.draw("alpha bravo", own("india_india"), ["india_india"], (i,), size=4)
        assert pool.injected
        places[names(pool.tools).index("india_india")] += 1
    assert sorted(places) == [0, 1, 2, 3]
    assert all(abs(n - 100) < 50 for n in places.values())


def test_a_pool_never_is_smaller_than_its_calls_need() -> None:
    mine = own("alpha_alpha", "bravo_bravo", "charlie_charlie")
    pool = PoolBuilder(CORPUS, 8).draw("?", mine, names(mine), ("x",), size=1)
    assert sorted(names(pool.tools)) == sorted(names(mine))


def test_orders() -> None:
    query, mine = "delta golf", own("delta_golf")
    first = names(PoolBuilder(CORPUS, 8, "best-first").draw(query, mine, [], ("x",), 8).tools)
    last = names(PoolBuilder(CORPUS, 8, "best-last").draw(query, mine, [], ("x",), 8).tools)
    shuffled = PoolBuilder(CORPUS, 8, "random")
    assert last == first[::-1]
    orders = {tuple(names(shuffled.draw(query, mine, [], (i,), 8).tools)) for i in range(20)}
    assert len(orders) > 10
    assert all(sorted(o) == sorted(first) for o in orders)


def test_the_seed_and_the_id_fix_a_pool() -> None:
    def draw(seed: int, key: int) -> list[str]:
        builder = PoolBuilder(CORPUS, 24, "random", seed)
        return names(builder.draw("alpha", own("alpha_bravo"), ["alpha_bravo"], (key,)).tools)

    assert draw(0, 1) == draw(0, 1)
    assert draw(0, 1) != draw(1, 1)
    assert draw(0, 1) != draw(0, 2)


def test_own_schemas_are_shown_and_scored() -> None:
    mine = [tool("alpha_bravo", "zebra", description="Counts zebras at the zoo.")]
    pool = PoolBuilder(CORPUS, 8).draw("zoo zebras", mine, ["alpha_bravo"], ("x",), 8)
    assert pool.tools[names(pool.tools).index("alpha_bravo")] == mine[0]
    outside = [tool("unheard_of", "item", description="Can alpha a bravo.")]
    ranked = PoolBuilder(CORPUS, 8).draw("alpha bravo", outside, ["unheard_of"], ("x",), 8)
    assert not ranked.injected  # the corpus does not hold it, its score still counts


@pytest.mark.parametrize("size", [0, 101])
def test_k_must_fit_the_corpus(size: int) -> None:
    with pytest.raises(ValueError, match="max_pool_size"):
        PoolBuilder(CORPUS, size)


def test_tools_without_a_word_that_bm25_knows_keep_their_order() -> None:
    foreign = [tool(name, description="查") for name in ("天气", "新闻", "时间")]
    pool = PoolBuilder(foreign, 3).draw("天气?", foreign[1:2], ["新闻"], ("x",), size=2)
    assert names(pool.tools) == ["天气", "新闻"]


def test_a_bounded_corpus_is_a_sample_that_ignores_the_order_of_rows() -> None:
    forward, backward = ToolCorpus(30), ToolCorpus(30)
    for t in CORPUS:
        forward.add([t])
    for t in reversed(CORPUS):
        backward.add([t])
    assert len(forward) == 30
    assert forward.seen_over_limit > 0
    assert sorted(names(forward.tools())) == sorted(names(backward.tools()))
    assert names(forward.tools()) != names(CORPUS[:30])


def test_a_name_keeps_its_first_schema() -> None:
    corpus = ToolCorpus(10)
    corpus.add([tool("same", "first"), tool("same", "second"), tool("other")])
    assert corpus.tools() == [tool("same", "first"), tool("other")]
