"""The perturbed dictionary: one right answer a query, the paper's statistics, a clean split."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from synthetic import sequences
from synthetic.key_value import task as tasks
from synthetic.key_value.settings import PAPER, SMALL
from synthetic.key_value.task import Task

SMALLEST = Task(
    symbols=7, entries=20, length=3, pairs=9, noise=0.3, query_ratio=0.4, order="best_first"
)


def rows_of(task: Task, batch: sequences.Batch) -> list[list[int]]:
    return [t[v].tolist() for t, v in zip(batch.tokens, batch.valid, strict=True)]


@settings(max_examples=60, deadline=None)
@given(
    symbols=st.integers(3, 9),
    length=st.integers(1, 4),
    pairs=st.integers(1, 9),
    noise=st.floats(0, 1),
    ratio=st.floats(0.05, 0.95),
    order=st.sampled_from(["best_first", "best_last"]),
    seed=st.integers(0, 1000),
)
def test_sequences_are_parsed_back_and_have_one_right_answer(
    symbols: int, length: int, pairs: int, noise: float, ratio: float, order: tasks.Order, seed: int
) -> None:
    entries = min(symbols**length, 2 * pairs)
    pairs = min(pairs, entries)
    task = Task(symbols, entries, length, pairs, noise, ratio, order)
    table = tasks.dictionary(task, seed)
    assert len({tuple(k) for k in table[:, :length].tolist()}) == entries
    keys = {tuple(row[:length]) for row in table.tolist()}
    batch = tasks.sample(task, table, 6, torch.Generator().manual_seed(seed))
    for row, valid, answer in zip(batch.tokens, batch.valid, batch.answer, strict=True):
        text = row[valid].tolist()
        context, queries = tasks.parse(task, text)
        n = len(context)
        assert 1 <= n <= pairs
        assert len(text) == task.tokens(n)
        assert len({k for k, _ in context}) == n, "a key shown twice has two answers"
        assert {k for k, _ in context} <= keys
        asked = max(1, math.ceil(ratio * n))
        assert len(queries) == asked
        best = context[:asked] if order == "best_first" else context[n - asked :]
        assert sorted(queries) == sorted(best)
        wanted = [symbol for _, value in queries for symbol in value]
        assert row[answer].tolist() == wanted
        # Every answer is predicted from the token before it, inside the sequence.
        assert not answer[0]
        assert (answer & ~valid).sum() == 0


def test_noise_is_the_papers() -> None:
    task = dataclasses.replace(SMALLEST, entries=300, pairs=100, noise=0.1)
    table = tasks.dictionary(task, 0)
    values = {tuple(r[:3]): r[3:] for r in table.tolist()}
    batch = tasks.sample(task, table, 60, torch.Generator().manual_seed(0), pairs=100)
    shown = [p for row in rows_of(task, batch) for p in tasks.parse(task, row)[0]]
    same = [[a == b for a, b in zip(values[k], v, strict=True)] for k, v in shown]
    flat = [x for row in same for x in row]
    assert sum(flat) / len(flat) == pytest.approx(0.9, abs=0.008)  # the truth is never redrawn
    assert sum(all(row) for row in same) / len(same) == pytest.approx(0.9**3, abs=0.02)
    changed = [b for (k, v) in shown for a, b in zip(values[k], v, strict=True) if a != b]
    counts = torch.bincount(torch.tensor(changed), minlength=7) / len(changed)
    assert float((counts - 1 / 7).abs().max()) < 0.04


def test_memory_reaches_what_the_paper_says() -> None:
    assert PAPER.task.memory_accuracy() == pytest.approx(0.43, abs=0.001)
    assert SMALL.task.memory_accuracy() == pytest.approx(PAPER.task.memory_accuracy(), abs=0.01)
    assert (PAPER.task.tokens(512), PAPER.task.queries(512)) == (10_151, 52)


def test_fewer_queries_can_be_asked_of_longer_contexts() -> None:
    task = dataclasses.replace(SMALLEST, order="best_last", entries=40)
    table = tasks.dictionary(task, 0)
    batch = tasks.sample(task, table, 5, torch.Generator().manual_seed(0), pairs=18, queries=2)
    for row in rows_of(task, batch):
        context, queries = tasks.parse(task, row)
        assert (len(context), sorted(queries)) == (18, sorted(context[-2:]))


def test_orders_of_queries_are_all_equally_likely() -> None:
    task = dataclasses.replace(SMALLEST, query_ratio=0.3)
    table = tasks.dictionary(task, 0)
    batch = tasks.sample(task, table, 600, torch.Generator().manual_seed(1), pairs=9)
    orders: dict[tuple, int] = {}
    for row in rows_of(task, batch):
        context, queries = tasks.parse(task, row)
        order = tuple(context.index(q) for q in queries)
        orders[order] = orders.get(order, 0) + 1
    assert len(orders) == 6
    assert max(orders.values()) < 2 * min(orders.values())


def test_training_and_test_sequences_are_disjoint() -> None:
    table = tasks.dictionary(SMALLEST, 0)
    g = torch.Generator().manual_seed(0)

    def sample(count: int) -> sequences.Batch:
        return tasks.sample(dataclasses.replace(SMALLEST, pairs=1), table, count, g)

    # Contexts of one pair: few enough that unsplit draws would meet.
    train = {tuple(r) for r in rows_of(SMALLEST, sequences.draw(sample, 3000, test=False))}
    test = {tuple(r) for r in rows_of(SMALLEST, sequences.draw(sample, 500, test=True))}
    whole = {tuple(r) for r in rows_of(SMALLEST, sample(3000))}
    assert train & whole
    assert not train & test


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="fewer than 50 keys"):
        dataclasses.replace(SMALLEST, symbols=7, length=2, entries=50)
    with pytest.raises(ValueError, match="more than the 20 entries"):
        dataclasses.replace(SMALLEST, pairs=21)
    table = tasks.dictionary(SMALLEST, 0)
    with pytest.raises(ValueError, match="more than the 20 entries"):
        tasks.sample(SMALLEST, table, 1, torch.Generator(), pairs=21)
    with pytest.raises(ValueError, match="not a pair"):
        tasks.parse(SMALLEST, [0, 1, 2, 3, SMALLEST.bar, 1])
