"""The split by content is fixed, fair and blind to padding."""

import pytest
import torch

from synthetic import sequences
from synthetic.sequences import Batch


def random_batch(count: int, length: int, g: torch.Generator) -> Batch:
    tokens = torch.randint(20, (count, length), generator=g)
    ends = torch.randint(3, length + 1, (count, 1), generator=g)
    at = torch.arange(length)
    return Batch(tokens, at < ends, at == ends - 1, group=1)


def test_one_sequence_in_eight_is_a_test_sequence() -> None:
    batch = random_batch(8000, 12, torch.Generator().manual_seed(0))
    share = sequences.in_test(batch).float().mean()
    assert abs(float(share) - 1 / sequences.TEST_ONE_IN) < 0.02


def test_the_split_depends_on_the_sequence_alone() -> None:
    batch = random_batch(200, 12, torch.Generator().manual_seed(1))
    side = sequences.in_test(batch)
    other = torch.where(batch.valid, batch.tokens, 7)  # another padding
    assert torch.equal(sequences.in_test(Batch(other, batch.valid, batch.answer, 1)), side)
    for i in range(20):
        assert sequences.in_test(batch.rows(torch.tensor([i])))[0] == side[i]
    changed = batch.tokens.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 20
    assert not torch.equal(sequences.in_test(Batch(changed, batch.valid, batch.answer, 1)), side)


def test_draws_come_from_one_side_only_and_keep_their_answers() -> None:
    g = torch.Generator().manual_seed(2)
    for test in (False, True):
        batch = sequences.draw(lambda n: random_batch(n, 9, g), 50, test=test)
        assert len(batch) == 50
        assert (sequences.in_test(batch) == test).all()
        assert (batch.answer.sum(1) == 1).all()
        assert (batch.answer & ~batch.valid).sum() == 0


def test_a_sampler_without_sequences_of_that_side_is_refused() -> None:
    g = torch.Generator().manual_seed(3)
    batch = random_batch(400, 9, g)
    only = batch.rows((~sequences.in_test(batch)).nonzero()[:, 0])
    with pytest.raises(ArithmeticError, match="half of its space"):
        sequences.draw(lambda n: only.rows(slice(0, n)), 5, test=True)
