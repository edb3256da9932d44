"""Property tests of the associative-recall generator: exactly one right answer, always known."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from synthetic.capacity import tasks


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["ar", "mqar"]), st.integers(1, 9), st.integers(0, 30), st.integers(0, 99))
def test_every_answer_is_the_one_value_bound_to_the_queried_key(
    name: str, facts: int, spare: int, seed: int
) -> None:
    length = None if name == "ar" else 4 * facts + spare
    task = tasks.make(name, 20, facts, length)  # type: ignore[arg-type]
    b = tasks.sample(task, 5, torch.Generator().manual_seed(seed))
    assert b.tokens.shape == (5, task.length)
    for tokens, positions, answers in zip(b.tokens, b.positions, b.answers, strict=True):
        keys, values = tokens[0 : 2 * facts : 2].tolist(), tokens[1 : 2 * facts : 2].tolist()
        assert len(set(keys)) == len(set(values)) == facts
        assert max(keys) < 10 <= min(values)
        assert len(set(positions.tolist())) == task.queries
        assert int(positions.min()) >= 2 * facts
        table = dict(zip(keys, values, strict=True))
        asked = tokens[positions].tolist()
        assert [table[k] for k in asked] == answers.tolist()
        if name == "mqar":
            assert set(asked) == set(keys)
            assert all((i - 2 * facts) % 2 == 0 for i in positions.tolist())
            assert 0 <= int(tokens.min()) <= int(tokens.max()) < 20


def test_the_pairs_written_before_a_query_are_those_that_the_law_counts() -> None:
    task = tasks.make("mqar", 512, 16)
    b = tasks.sample(task, 400, torch.Generator().manual_seed(0))
    pairs = (b.tokens[:, :-1] < 256) & (b.tokens[:, 1:] >= 256)  # a key, then a value
    for t in (32, 48, 62):
        want = task.facts / 2 + t / 4
        assert float(pairs[:, :t].sum(1).double().mean()) == pytest.approx(want, abs=0.5)


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="vocabulary of 9 must be even"):
        tasks.make("ar", 9, 2)
    with pytest.raises(ValueError, match="hold 11 facts"):
        tasks.make("mqar", 20, 11)
    with pytest.raises(ValueError, match="length 19 is too short: facts and queries take 20"):
        tasks.make("mqar", 20, 5, 19)
    with pytest.raises(ValueError, match="must be 11"):
        tasks.make("ar", 20, 5, 30)


def test_streams_are_the_same_whatever_their_chunk() -> None:
    task = tasks.make("mqar", 20, 3)
    stream = tasks.Stream(task, 4, torch.Generator().manual_seed(1), chunk=3)
    seen = [stream.next().tokens for _ in range(7)]
    assert all(s.shape == (4, 12) for s in seen)
    assert len({tuple(s.flatten().tolist()) for s in seen}) == 7
    first = tasks.sample(task, 12, torch.Generator().manual_seed(1)).tokens
    assert torch.equal(torch.cat(seen[:3]), first)
