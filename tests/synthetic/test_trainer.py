"""The sequence trainer: early stop, evaluation steps, and a run that goes on where it stopped."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from synthetic import sequence_models as sm
from synthetic import trainer
from synthetic.key_value import task as tasks
from synthetic.ranks import Diverged
from synthetic.sequences import Batch
from synthetic.trainer import Recipe

TASK = tasks.Task(8, 20, 2, 4, 0.3, 0.5, "best_last")
SIZE = sm.Size("mamba2", d_model=16, layers=1, heads=2, head_dim=8, d_state=8)
RECIPE = Recipe(steps=12, batch=8, lr=1e-2, eval_every=5)


def draw(step: int) -> Batch:
    table = tasks.dictionary(TASK, 0)
    return tasks.sample(TASK, table, RECIPE.batch, torch.Generator().manual_seed(step))


def model() -> torch.nn.Module:
    return sm.build(SIZE, TASK.vocab, 64, seed=0)


def test_the_learning_rate_follows_the_papers_schedule() -> None:
    schedule = dataclasses.replace(RECIPE, steps=1000).schedule()
    assert schedule.factor(24) == pytest.approx(0.5)
    assert schedule.factor(50) == pytest.approx(1.0)
    assert schedule.factor(999) == pytest.approx(0.1, abs=1e-3)


def test_evaluations_come_on_time_and_training_learns() -> None:
    done = trainer.train(
        model(), draw, dataclasses.replace(RECIPE, steps=62), lambda s: {"seen": s}, desc="t"
    )
    assert [c["step"] for c in done.curve] == [*range(5, 61, 5), 62]
    assert [c["seen"] for c in done.curve] == [c["step"] for c in done.curve]
    assert done.curve[-1]["loss"] < done.curve[0]["loss"] - 0.1
    assert 0 < done.data_seconds < done.cpu_seconds


def test_a_run_stops_early_when_told() -> None:
    done = trainer.train(
        model(), draw, RECIPE, lambda s: {"acc": s}, stop=lambda m: m["acc"] >= 10, desc="t"
    )
    assert done.steps == 10


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(tmp_path: Path, optimizer: Any) -> None:
    recipe = dataclasses.replace(RECIPE, optimizer=optimizer)
    whole = model()
    once = trainer.train(whole, draw, recipe, lambda s: {}, desc="t")

    class Stop(Exception):
        pass

    def stopping(step: int) -> Batch:
        if step == 8:
            raise Stop
        return draw(step)

    file, kwargs = tmp_path / "partial.pt", {"checkpoint_seconds": 0.0, "desc": "t"}
    with pytest.raises(Stop):
        trainer.train(model(), stopping, recipe, lambda s: {}, checkpoint=file, **kwargs)
    assert file.exists()
    resumed = sm.build(SIZE, TASK.vocab, 64, seed=3)
    twice = trainer.train(resumed, draw, recipe, lambda s: {}, checkpoint=file, **kwargs)
    assert [c["step"] for c in twice.curve] == [c["step"] for c in once.curve]
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_a_file_of_another_run_is_not_resumed_from(tmp_path: Path) -> None:
    file, name = tmp_path / "partial.pt", {"seed": 0, "offset": -5.0}
    trainer.train(model(), draw, RECIPE, lambda s: {}, desc="t", checkpoint=file, name=name)
    assert file.exists()
    for other in ({"seed": 0, "offset": None}, {"seed": 1, "offset": -5.0}, None):
        fresh = trainer.train(
            model(), draw, RECIPE, lambda s: {"new": s}, desc="t", checkpoint=file, name=other
        )
        assert [c["new"] for c in fresh.curve] == [5, 10, 12]
        trainer.train(model(), draw, RECIPE, lambda s: {}, desc="t", checkpoint=file, name=name)
    file.unlink()
    assert trainer.train(model(), draw, RECIPE, lambda s: {}, desc="t", checkpoint=file).steps == 12


def test_a_kill_in_the_final_evaluation_loses_nothing(tmp_path: Path) -> None:
    """Also after an early stop: the run is not trained further."""
    file, kwargs = tmp_path / "partial.pt", {"desc": "t", "name": {"seed": 0}}

    def train(m: torch.nn.Module, draw: Any) -> trainer.Trained:
        return trainer.train(
            m, draw, RECIPE, lambda s: {"acc": s}, stop=lambda c: c["acc"] >= 10,
            checkpoint=file, **kwargs,
        )  # fmt: skip

    once = model()
    done = train(once, draw)

    def no_more(step: int) -> Batch:
        raise AssertionError(step)

    again = sm.build(SIZE, TASK.vocab, 64, seed=3)
    assert train(again, no_more) == done
    assert done.steps == 10
    for a, b in zip(once.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_loss_that_is_not_finite_ends_the_run() -> None:
    broken = model()
    with torch.no_grad():
        next(iter(broken.parameters())).fill_(float("nan"))
    with pytest.raises(Diverged, match="not finite before step 5"):
        trainer.train(broken, draw, RECIPE, lambda s: {}, desc="t")
