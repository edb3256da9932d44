"""Packed samples behave as if each stood alone: loss and gradients, both families."""

from pathlib import Path

import numpy as np
import pytest
import torch

from sft import parent
from sft.dataset import Samples, Writer
from sft.objective import PackedLoss
from sft.packing import PackStream, collate, plan, targets

LENGTHS = (37, 5, 64, 18, 41, 2)


@pytest.fixture
def samples(tmp_path: Path) -> Samples:
    random = np.random.default_rng(0)
    with Writer(tmp_path / "split") as writer:
        for i, length in enumerate(LENGTHS):
            mask = random.integers(0, 2, length)
            mask[0] = 1  # must never become a target: nothing precedes it in its sample
            mask[-1] = 1
            writer.add(random.integers(8, 500, length), mask, pool_size=1 + i % 3, row=i)
    return Samples(tmp_path / "split")


def test_what_is_written_is_read(samples: Samples) -> None:
    assert len(samples) == len(LENGTHS)
    assert [len(samples[i][0]) for i in range(len(samples))] == list(LENGTHS)
    assert samples.index["targets"].tolist() == [int(samples[i][1].sum()) for i in range(6)]


@pytest.mark.parametrize("family", ["mamba2", "llama"])
def test_packed_equals_separate(family: str, samples: Samples, models: dict[str, Path]) -> None:
    module = PackedLoss(parent.load(parent.inspect(models[family]))).train()
    order = [2, 5, 0, 1, 4, 3]

    def run(packs: list[list[int]], multiple: int = 1) -> tuple[float, list[torch.Tensor]]:
        module.zero_grad()
        total = sum(module(collate(samples, [pack], 0, multiple)) for pack in packs)
        assert isinstance(total, torch.Tensor)
        total.backward()
        return total.item(), [p.grad.clone() for p in module.parameters() if p.grad is not None]

    separate, wanted = run([[i] for i in order])
    for packs, multiple in (([order], 1), ([order[:3], order[3:]], 1), ([order], 64)):
        packed, found = run(packs, multiple)
        assert packed == pytest.approx(separate, rel=1e-5)
        assert len(found) == len(wanted) > 10
        for a, b in zip(found, wanted, strict=True):
            largest = b.abs().max()  # what the tensor's own rounding is relative to
            torch.testing.assert_close(a / largest, b / largest, rtol=1e-5, atol=1e-5)

    module.zero_grad()
    batch = collate(samples, [order[:3], order[3:]], 0)
    both = module(batch)
    assert both.item() == pytest.approx(separate, rel=1e-5)


@pytest.mark.parametrize("family", ["mamba2", "llama"])
def test_the_check_would_see_a_leak(family: str, samples: Samples, models: dict[str, Path]) -> None:
    module = PackedLoss(parent.load(parent.inspect(models[family])))
    batch = collate(samples, [[2, 0, 4]], 0)
    leaking = collate(samples, [[2, 0, 4]], 0)
    leaking.segments.zero_()
    leaking.boundaries[0] = [0, leaking.input_ids.shape[1]]
    with torch.no_grad():
        assert abs(float(module(batch)) - float(module(leaking))) > 1e-2


def test_targets_are_the_masked_tokens_of_the_same_sample(samples: Samples) -> None:
    pack = [3, 1, 5]
    batch = collate(samples, [pack], 0, multiple=32)
    wanted = [int(t) for i in pack for t in samples[i][0][1:][samples[i][1][1:] != 0]]
    assert batch.labels.tolist() == wanted
    assert targets(samples, pack) == len(wanted)
    assert batch.input_ids.shape[1] == 32
    following = batch.input_ids[0, batch.predict + 1]
    assert following.tolist() == wanted
    assert (batch.segments[0, batch.predict] == batch.segments[0, batch.predict + 1]).all()


def test_a_plan_holds_every_sample_once_and_fits() -> None:
    lengths = np.random.default_rng(1).integers(1, 300, 1000)
    packs = plan(lengths, 512, ("seed", 0))
    assert sorted(i for pack in packs for i in pack) == list(range(1000))
    assert max(lengths[pack].sum() for pack in packs) <= 512
    assert len(packs) <= 1.03 * lengths.sum() / 512  # little is left empty
    assert packs == plan(lengths, 512, ("seed", 0))
    assert packs != plan(lengths, 512, ("seed", 1))


def test_a_stream_resumes_at_the_next_pack(samples: Samples) -> None:
    def stream() -> PackStream:
        made = PackStream(samples, 64, seed=3)
        made.limit(2)
        return made

    whole = stream()
    first = [whole.take(1) for _ in range(4)]
    whole.limit(3)
    rest = [whole.take(1) for _ in range(9)]
    again = stream()
    assert [again.take(1) for _ in range(4)] == first
    again.limit(3)
    assert [again.take(1) for _ in range(2)] == rest[:2]
    resumed = PackStream(samples, 64, seed=3)
    resumed.restore(again.state())
    resumed.limit(3)
    assert [resumed.take(1) for _ in range(7)] == rest[2:]


def test_a_limit_keeps_larger_pools_out(samples: Samples) -> None:
    stream = PackStream(samples, 64, seed=0)
    assert stream.limit(1) == 2
    seen = {i for pack in stream.take(10) for i in pack}
    assert {int(samples.index["pool_size"][i]) for i in seen} == {1}
    assert stream.limit(0) == 0
    with pytest.raises(ValueError, match="no sample"):
        stream.take(1)


def test_a_sample_longer_than_the_context_is_refused(samples: Samples) -> None:
    with pytest.raises(ValueError, match="longer"):
        PackStream(samples, 63, seed=0)
