"""Horn-clause worlds: classes by brute-force search, examples parsed back, answers all known."""

import itertools
import math
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gatewright import plackett_luce
from synthetic import sequences
from synthetic.rules import examples as ex
from synthetic.rules import runs, world
from synthetic.rules.examples import Pools
from synthetic.rules.settings import PAPER, SMALL
from synthetic.rules.world import Size, World


def name_of(w: World, which: int, number: int) -> str:
    return "r_" + "".join(world.SYMBOLS[i] for i in w.text[which, number])


def reachable(w: World, which: int, proposition: int, goal: int) -> bool:
    """Search every chain of clauses."""
    if which == w.size.sets - 1:
        return proposition == goal
    return any(
        reachable(w, which + 1, int(b), goal)
        for a, b in zip(w.inputs[which], w.outputs[which], strict=True)
        if a == proposition
    )


@settings(max_examples=25, deadline=None)
@given(
    sets=st.integers(2, 4),
    propositions=st.integers(2, 7),
    density=st.floats(0.1, 1.0),
    seed=st.integers(0, 1000),
)
def test_classes_are_what_a_search_finds(
    sets: int, propositions: int, density: float, seed: int
) -> None:
    clauses = max(1, int(density * propositions**2))
    w = world.make(Size(sets, propositions, clauses, symbols=2, digits=3), seed)
    rng = np.random.default_rng(seed)
    for _ in range(10):
        turn, now, goal = rng.integers(sets - 1), *rng.integers(propositions, size=2)
        levels = w.levels(np.array([turn]), np.array([now]), np.array([goal]))[0]
        for clause in range(clauses):
            applies = w.inputs[turn, clause] == now
            leads = reachable(w, turn + 1, int(w.outputs[turn, clause]), int(goal))
            paper_class = {(1, 1): 1, (1, 0): 2, (0, 1): 3, (0, 0): 4}[int(applies), int(leads)]
            assert levels[clause] == 4 - paper_class
        assert w.reach[turn, now, goal] == reachable(w, int(turn), int(now), int(goal))


def test_propositions_clauses_and_names_are_distinct() -> None:
    w = world.make(PAPER.world, 3)
    every = [name_of(w, i, p) for i in range(3) for p in range(128)]
    assert len(set(every)) == 3 * 128
    assert all(len(p) == 6 for p in every)
    for a, b in zip(w.inputs, w.outputs, strict=True):
        assert len(set(zip(a.tolist(), b.tolist(), strict=True))) == 128
    assert len({*w.names.ravel().tolist(), *w.free.tolist()}) == 10_000
    assert np.array_equal(world.make(PAPER.world, 3).names, w.names)
    assert not np.array_equal(world.make(PAPER.world, 4).names, w.names)


POOLS = [
    Pools("random", "anywhere", resampled=0.1),
    Pools("random", "resampled", resampled=0.3),
    Pools("random", "absent", resampled=0.1),
    Pools("ranked", beta=10.0, resampled=1.0),
    Pools("ranked", beta=0.0, inject=False, resampled=1.0),
]


@pytest.mark.parametrize("pools", POOLS)
@pytest.mark.parametrize("size", [SMALL.world, Size(3, 40, 60, symbols=4, digits=4)])
def test_prompts_are_parsed_back_and_every_right_answer_is_known(pools: Pools, size: Size) -> None:
    w = world.make(size, 0)
    rng = np.random.default_rng(1)
    asked = ex.questions(w, 60, rng, None)
    shown = rng.integers(1, 13, size=60)
    e = ex.fill(w, asked, pools, shown, rng)
    batch = ex.encode(e)
    for i in range(60):
        text = ex.text(batch.tokens[i][batch.valid[i]].tolist())
        clauses, now, goal, answer = ex.parse(text)
        turn = int(e.turn[i])
        assert len(clauses) == e.sizes[i] <= shown[i]
        assert (now, goal) == (name_of(w, turn, asked[i, 1]), name_of(w, 2, asked[i, 2]))
        assert len({name for name, _, _ in clauses}) == len(clauses), "a name stands for one clause"
        assert int(answer) == e.target[i]
        # Which names are right, found by search from the text alone.
        numbers = {name_of(w, turn + 1, p): p for p in range(size.propositions)}
        known = {
            (name_of(w, turn, a), name_of(w, turn + 1, b)): int(n)
            for a, b, n in zip(w.inputs[turn], w.outputs[turn], w.names[turn], strict=True)
        }
        right = set()
        resampled = pools.resampled * len(clauses)
        for slot, (name, start, end) in enumerate(clauses):
            if start == now and reachable(w, turn + 1, numbers[end], int(asked[i, 2])):
                right.add(int(name))
            fixed = known[start, end]
            if slot < max(1, math.ceil(resampled - 1e-9)):
                assert int(name) in w.free
            else:
                assert int(name) == fixed
        assert {int(n) for n in e.right_names()[i] if n >= 0} == right
        for guess in right:
            after = int(e.after(np.full(60, guess))[i])
            assert reachable(w, turn + 1, after, int(asked[i, 2]))
        if pools.oracle != "absent" and pools.inject:
            assert int(answer) in right
            assert e.right_names()[i, 0] == int(answer)
        elif pools.kind == "random":
            assert not right
        leading = {
            n
            for (start, end), n in known.items()
            if start == now and reachable(w, turn + 1, numbers[end], int(asked[i, 2]))
        }
        assert {int(n) for n in e.right_names("known")[i] if n >= 0} == leading
        renamed = {int(n) for n in e.right_names("renamed")[i] if n >= 0}
        assert renamed == right - set(w.names[turn].tolist())
        if pools.oracle == "resampled":
            assert e.right_names("renamed")[i, 0] == int(answer)
        if pools.oracle == "absent":
            assert int(answer) in leading
        if pools.oracle == "resampled":
            assert int(answer) in w.free
        assert batch.tokens[i][batch.answer[i]].tolist() == [int(c) for c in answer]
    assert prompt_lengths(batch) == {ex.prompt_tokens(w, int(k)) for k in e.sizes}


def prompt_lengths(batch: sequences.Batch) -> set[int]:
    return set(batch.valid.sum(1).tolist())


def test_the_papers_prompt_has_the_papers_form() -> None:
    w = world.make(PAPER.world, 0)
    rng = np.random.default_rng(0)
    e = ex.fill(w, ex.questions(w, 1, rng, 0), POOLS[0], np.array([2]), rng)
    batch = ex.encode(e)
    text = ex.text(batch.tokens[0].tolist())
    clause = r"\d{4}:r_[0-9a-z]{4}->r_[0-9a-z]{4}\|"
    assert re.fullmatch(clause * 2 + r"r_[0-9a-z]{4},r_[0-9a-z]{4}<START>\d{4}", text)
    assert ex.prompt_tokens(w, 2) == batch.tokens.shape[1]


def test_the_most_relevant_clause_stands_next_to_the_question() -> None:
    w = world.make(SMALL.world, 0)
    rng = np.random.default_rng(0)
    asked = ex.questions(w, 300, rng, None)
    sure = Pools("ranked", beta=math.inf, resampled=1.0)
    e = ex.fill(w, asked, sure, np.full(300, 8), rng)
    assert (np.diff(e.levels, axis=1) >= 0).all()
    assert (e.levels[:, -1] == 3).all()
    assert (e.target == e.names[:, -1]).all()
    noisy = ex.fill(w, asked, Pools("ranked", beta=1.0, resampled=1.0), np.full(300, 8), rng)
    assert 0.1 < (noisy.levels[:, -1] == 3).mean() < 0.9


def test_rankings_have_plackett_luce_probabilities() -> None:
    """Against the enumeration of all orders of five clauses of known classes."""
    levels = np.array([3, 2, 1, 0, 0])
    beta, draws = 0.8, 40_000
    noise = np.random.default_rng(0).gumbel(size=(draws, 5))
    orders = plackett_luce.ranking(np.broadcast_to(levels, (draws, 5)), beta, noise)
    found = Counter(map(tuple, orders.tolist()))
    weights = np.exp(beta * levels)
    total = 0.0
    for order in itertools.permutations(range(5)):
        left, p = list(order), 1.0
        for item in order:
            p *= weights[item] / sum(weights[j] for j in left)
            left.remove(item)
        total += p
        assert math.log(p) == pytest.approx(plackett_luce.log_probability(order, levels, beta))
        assert found[order] / draws == pytest.approx(p, abs=5 * math.sqrt(p / draws) + 1e-4)
    assert total == pytest.approx(1)


def test_distinct_rows_are_uniform_and_distinct() -> None:
    rng = np.random.default_rng(0)
    pool = np.arange(100, 160)
    for count in (3, 40):
        rows = world.distinct_rows(rng, pool, 2000, count)
        assert all(len(set(r)) == count for r in rows.tolist())
        shares = np.bincount(rows.ravel(), minlength=160)[100:] / rows.size
        assert np.abs(shares * 60 - 1).max() < 0.25
    with pytest.raises(ValueError, match="61 different"):
        world.distinct_rows(rng, pool, 1, 61)


def test_training_and_test_prompts_are_disjoint() -> None:
    w = world.make(SMALL.world, 0)
    draw = runs.training_batches(SMALL, w, "length", 0)
    train = {
        tuple(t[v].tolist())
        for step in range(60)
        for t, v in zip(draw(step).tokens, draw(step).valid, strict=True)
    }
    assert len(train) > 1500
    e = runs.test_turns(w, SMALL.training("length"), 1, 300, 0)
    batch = ex.encode(e)
    test = {tuple(t[v].tolist()) for t, v in zip(batch.tokens, batch.valid, strict=True)}
    assert len(e.turn) == 300
    assert set(e.turn) == {0}
    assert not train & test


def test_impossible_worlds_are_refused() -> None:
    with pytest.raises(ValueError, match="fewer clauses"):
        Size(3, 4, 17)
    with pytest.raises(ValueError, match="too few propositions"):
        Size(3, 13, 13, symbols=1)
    with pytest.raises(ValueError, match="too few names"):
        Size(3, 40, 40, digits=2)
    with pytest.raises(ValueError, match="not a prompt"):
        ex.parse("1:r_a->r_b|r_a")
    with pytest.raises(ValueError, match="not a clause"):
        ex.parse("x:r_a->r_b|r_a,r_b<START>1")
