"""Property tests of the recall tasks: one right answer, honest floors, deranged bindings."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from synthetic.recall import tasks
from synthetic.recall.curriculum import Curriculum
from synthetic.recall.tasks import MASK, Task, sample


def gen(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["fixed", "shuffled"]), st.integers(1, 40), st.integers(0, 99))
def test_mqar_answers_are_the_values_of_the_queried_keys(
    layout: str, pairs: int, seed: int
) -> None:
    task = Task("mqar", pairs=pairs, layout=layout)  # type: ignore[arg-type]
    b = sample(task, 4, gen(seed))
    assert b.tokens.shape == (4, task.tokens)
    for row, where, answers in zip(b.tokens, b.positions, b.answers, strict=True):
        keys, values = row[0 : 2 * pairs : 2].tolist(), row[1 : 2 * pairs : 2].tolist()
        assert sorted(keys) == list(range(5, 5 + pairs))
        assert (keys == sorted(keys)) or layout == "shuffled"
        assert all(5 + pairs <= v < MASK for v in values)
        assert [int(row[w]) for w in where] == [MASK] * task.queries
        queried = [int(row[w - 1]) for w in where]
        assert len(set(queried)) == task.queries
        assert [dict(zip(keys, values, strict=True))[q] for q in queried] == answers.tolist()
        assert (row == MASK).sum() == task.queries


def test_the_authors_sizes() -> None:
    fixed = Task("mqar", pairs=32)
    assert (fixed.tokens, fixed.values, fixed.queries) == (72, 26, 1)
    honest = Task("mqar", pairs=32, layout="shuffled")
    assert (honest.tokens, honest.queries) == (80, 8)
    assert Task("s5", length=8).vocab == 121


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(["haystack", "collision"]),
    st.integers(1, 4),
    st.integers(0, 60),
    st.integers(0, 99),
)
def test_the_needle_is_the_first_binding_at_every_gap(
    name: str, dense: int, cap: int, seed: int
) -> None:
    task = Task(name, length=40, dense=dense)  # type: ignore[arg-type]
    for limit in (cap, None):
        b = sample(task, 6, gen(seed), cap=limit)
        assert b.tokens.shape == (6, 40)
        for row, where, answers in zip(b.tokens, b.positions, b.answers, strict=True):
            ids = row.tolist()
            start = next(i for i, x in enumerate(ids) if x != 0)
            gap = 40 - 2 * dense - 8 - start
            assert 0 <= gap <= (task.max_gap if limit is None else min(limit, task.max_gap))
            keys, values = ids[start : start + 8 : 2], ids[start + 1 : start + 8 : 2]
            assert sorted(keys) == [5, 6, 7, 8]
            filler = ids[start + 8 : start + 8 + gap]
            if name == "haystack":
                assert all(9 <= x < MASK for x in filler)
            else:
                assert all(5 <= x < 9 for x in filler[0::2])
                assert all(9 <= x < MASK for x in filler[1::2])
            table = dict(zip(keys, values, strict=True))
            assert [table[ids[w - 1]] for w in where.tolist()] == answers.tolist()
            assert int(where[-1]) == 39


@pytest.mark.parametrize(
    "task",
    [
        Task("mqar", pairs=8),
        Task("mqar", pairs=8, layout="shuffled"),
        Task("haystack", length=32, dense=3),
        Task("collision", length=32, dense=2),
    ],
    ids=lambda task: f"{task.name} {task.layout}",
)
def test_a_rebound_key_has_its_neighbours_value_and_the_old_answer_is_scored(task: Task) -> None:
    plain, moved = sample(task, 50, gen(3)), sample(task, 50, gen(3), rebind=True)
    assert torch.equal(plain.answers, moved.answers)
    assert torch.equal(plain.positions, moved.positions)
    table = slice(0, 2 * task.table)  # at the full gap nothing stands before it
    old, new = plain.tokens[:, table][:, 1::2], moved.tokens[:, table][:, 1::2]
    assert torch.equal(new, old.roll(1, dims=1))
    same = torch.ones_like(plain.tokens, dtype=torch.bool)
    same[:, 1 : 2 * task.table : 2] = False
    assert torch.equal(plain.tokens[same], moved.tokens[same])  # keys, gap and questions stay
    keys = plain.tokens[:, table][:, 0::2]
    queries = plain.tokens.gather(1, plain.positions - 1)
    which = (keys[:, None] == queries[..., None]).float().argmax(-1)
    assert torch.equal(old.gather(1, which), moved.answers)
    assert float((new.gather(1, which) == moved.answers).float().mean()) < 0.1  # by chance only


def test_s5_has_nothing_to_rebind() -> None:
    with pytest.raises(ValueError, match="no bindings"):
        sample(Task("s5", length=4), 2, gen(0), rebind=True)


def test_s5_products_are_those_of_permutations() -> None:
    import itertools

    permutations = list(itertools.permutations(range(5)))
    b = sample(Task("s5", length=8), 20, gen(0))
    for row, answers in zip(b.tokens, b.answers, strict=True):
        running = tuple(range(5))
        for element, answer in zip(row[0::2].tolist(), answers.tolist(), strict=True):
            g = permutations[element]
            running = tuple(g[running[i]] for i in range(5))
            assert permutations[answer] == running
        assert set(row[1::2].tolist()) == {120}


@pytest.mark.parametrize(("pairs", "want"), [(8, 0.183), (16, 0.139), (32, 0.120)])
def test_the_floor_is_the_most_frequent_value_not_the_papers(pairs: int, want: float) -> None:
    task = Task("mqar", pairs=pairs)
    found = tasks.floors(task)
    assert found["floor"] == pytest.approx(want, abs=0.003)
    assert found["floor"] > 0.068  # the paper's "strongest no-binding strategy" at K = 32
    # The strategy itself, played on sequences.
    b = sample(task, 4000, gen(5))
    modes = [max(set(v), key=v.count) for v in b.tokens[:, 1 : 2 * pairs : 2].tolist()]
    played = (torch.tensor(modes) == b.answers[:, 0]).float().mean()
    assert float(played) == pytest.approx(found["floor"], abs=0.025)


def test_counting_collisions_decoys_too_is_no_stronger_floor() -> None:
    task = Task("collision", length=64)
    b = sample(task, 2000, gen(5))
    modes = [max(set(v), key=v.count) for v in b.tokens[:, 1:62:2].tolist()]
    played = (torch.tensor(modes) == b.answers[:, 0]).float().mean()
    assert float(played) < tasks.floors(task)["floor"] - 0.1


def test_the_s5_floor_counts_the_given_first_product() -> None:
    assert tasks.floors(Task("s5", length=16))["floor"] == pytest.approx(0.132, abs=5e-4)
    assert tasks.floors(Task("s5", length=32))["floor"] == pytest.approx(0.070, abs=5e-4)


def test_bad_sizes_name_their_flag() -> None:
    for kwargs, flag in (
        ({"name": "mqar", "pairs": 57}, "--pairs"),
        ({"name": "haystack", "length": 8}, "--length"),
        ({"name": "collision", "dense": 5}, "--dense"),
        ({"name": "s5", "length": 5}, "--length"),
    ):
        with pytest.raises(ValueError, match=flag):
            Task(**kwargs)  # type: ignore[arg-type]


def test_curricula() -> None:
    assert Curriculum("none", 50, 100, 1).cap(0, 0) is None
    assert Curriculum("uniform", 50, 100, 1).cap(0, 0) == 50
    ramp = Curriculum("ramp", 50, 100, 1)
    assert [ramp.cap(s, 0) for s in (0, 40, 80, 99)] == [0, 25, 50, 50]
    gated = Curriculum("gated", 80, 100, 2)
    assert gated.cap(0, 0) == gated.cap(99, 0) == 2
    for _ in range(50):
        gated.observe([0.7, 0.5])
    assert (gated.cap(0, 0), gated.cap(0, 1)) == (6, 2)
    for _ in range(2000):
        gated.observe([1.0, 0.0])
    assert (gated.opened(0), gated.opened(1)) == (1.0, 1 / 40)
