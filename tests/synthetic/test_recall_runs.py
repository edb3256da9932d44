"""Training and measuring an arm: seeds as if alone, honest measures, what is left to do."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from gatewright.errors import UserError
from synthetic.recall import cells, curriculum, model, resume, runs, tasks
from synthetic.recall.tasks import Batch, Task

SMALL = runs.Arm(Task("haystack", length=24), cells.Cell("rwkv7", 8), layers=2, steps=12, batch=8)


def test_seeds_that_train_together_train_as_if_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curriculum, "GATE_WINDOW", 2)
    monkeypatch.setattr(curriculum, "GATE_ACCURACY", 0.05)
    arm = dataclasses.replace(SMALL, curriculum="gated", steps=20)
    together, alone = runs.train(arm, [1, 2, 3], "x"), runs.train(arm, [2], "x")
    for name, value in together.parameters.items():
        assert (value[1] - alone.parameters[name][0]).abs().max() < 1e-4, name
    assert together.curve[1] == pytest.approx(alone.curve[0], abs=1e-4)
    assert together.opened[1] == alone.opened[0] > curriculum.GATE_STEP
    assert len(set(together.opened)) > 1  # each seed opens its own gate


def test_the_learning_curve_is_training_accuracy_by_fifty_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = iter(range(120))

    def scored(p: dict, arm: runs.Arm, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        share = next(steps) / 100
        return sum(v.square().flatten(1).sum(1) for v in p.values()), torch.tensor([share, 0.5])

    monkeypatch.setattr(runs, "_scored", scored)
    curve = runs.train(dataclasses.replace(SMALL, steps=120), [0, 1], "x").curve
    assert curve[0] == pytest.approx([0.245, 0.745, 1.095])
    assert curve[1] == [0.5] * 3


def test_a_diverged_seed_has_a_row_without_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    scored = runs._scored

    def broken(p: dict, arm: runs.Arm, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        loss, accuracy = scored(p, arm, batch)
        return loss * torch.tensor([1.0, math.inf]), accuracy

    monkeypatch.setattr(runs, "_scored", broken)
    good, bad = runs.run(SMALL, [4, 7], 32, "wall/x")
    assert "failed" not in good
    assert 0 <= good["accuracy"] <= 1
    assert bad["failed"] == "wall/x, seed 7: not finite at step 0"
    assert not bad.keys() & {"accuracy", "rebinding", "nothing_bound"}


@pytest.mark.parametrize("sequences", [1, 256, 300])
def test_exactly_the_asked_sequences_are_measured(
    sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, sample = [], tasks.sample

    def counted(task: Task, batch: int, g: torch.Generator, **kwargs: bool) -> Batch:
        drawn.append(batch)
        return sample(task, batch, g, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(tasks, "sample", counted)
    found = runs.measure(model.initial(SMALL.size, [0, 1]), SMALL, sequences)
    assert sum(drawn) == sequences
    assert found.shape == (2, 1)
    assert bool((found * sequences == (found * sequences).round()).all())


def test_dense_arms_are_measured_at_the_last_query_of_their_own_layout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arm = dataclasses.replace(SMALL, task=Task("haystack", length=32, dense=4), steps=1)

    def logits(
        p: dict, size: model.Size, tokens: torch.Tensor, where: torch.Tensor
    ) -> torch.Tensor:
        """Answer rightly at the last query if there are four, and never with one."""
        out = torch.zeros(*where.shape, size.vocab)
        if where.shape[-1] == 4:
            assert int(where[0, 0, -1]) == 31
            keys, values = tokens[:, :, 0:8:2], tokens[:, :, 1:8:2]
            asked = tokens.gather(2, where - 1)[..., -1:]
            answer = values.gather(2, (keys == asked).float().argmax(-1, keepdim=True))
            out[..., -1, :].scatter_(-1, answer, 1.0)
        return out

    monkeypatch.setattr(runs, "train", lambda arm, seeds, desc: _untrained(arm, seeds))
    monkeypatch.setattr(model, "logits", logits)
    (row,) = runs.run(arm, [0], 64, "x")
    assert (row["accuracy"], row["accuracy_one_query"]) == (1.0, 0.0)
    assert row["rebinding"] < 0.2
    assert row["nothing_bound"] is False
    one = dataclasses.replace(arm, task=Task("haystack", length=32))
    assert "accuracy_one_query" not in runs.run(one, [0], 16, "x")[0]


def _untrained(arm: runs.Arm, seeds: list[int]) -> runs.Trained:
    n = len(seeds)
    return runs.Trained(model.initial(arm.size, seeds), [1.0] * n, [[0.0]] * n, {})


@pytest.mark.parametrize(
    ("task", "answers"),
    [
        (Task("mqar", pairs=8), 100),
        (Task("mqar", pairs=8, layout="shuffled"), 800),
        (Task("haystack", length=32, dense=4), 100),
    ],
)
def test_nothing_bound_counts_the_scored_answers(
    task: Task, answers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(runs, "nothing_bound", lambda a, r, n: seen.append(n) or False)
    monkeypatch.setattr(runs, "train", lambda arm, seeds, desc: _untrained(arm, seeds))
    runs.run(runs.Arm(task, cells.Cell("deltanet", 8)), [0], 100, "x")
    assert seen == [answers]


def test_what_binds_nothing_is_told_from_what_binds() -> None:
    assert runs.nothing_bound(0.12, 0.13, 2048)
    assert runs.nothing_bound(0.12, 0.11, 2048)
    assert not runs.nothing_bound(0.34, 0.05, 2048)


def row(arm: runs.Arm, seed: int, **other: object) -> dict:
    measures = {"floor": 0.1, "parameters": 1, "seconds": 1.0, "cpu_seconds": 1.0, "accuracy": 0.5}
    return {"arm": "wall/x", **arm.settings(), "seed": seed, **measures, **other}


def test_an_arm_cut_short_lacks_its_other_seeds() -> None:
    wanted = {"wall/x": SMALL, "wall/y": SMALL}
    there = [row(SMALL, 0), row(SMALL, 2)]
    assert resume.missing(there, wanted, 4) == [
        ("wall/x", SMALL, [1, 3]),
        ("wall/y", SMALL, [0, 1, 2, 3]),
    ]
    assert resume.missing([row(SMALL, s) for s in range(4)], {"wall/x": SMALL}, 4) == []


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("steps", 99, "wall/x was trained with steps=99, not 12"),
        ("lr", 0.5, "lr=0.5, not 0.003"),
        ("width", 16, "width=16, not 8"),
        ("dense", 4, "dense=4, not 1"),
        ("arm", "wall/z", "an arm 'wall/z' that is not known"),
        ("seed", 5, "holds seed 5 of wall/x; give --seeds 6 or more"),
        ("seed", None, "rows of another version"),
    ],
)
def test_rows_of_other_settings_are_refused(field: str, value: object, message: str) -> None:
    good = row(SMALL, 0)
    resume.require_same(Path("x"), [good], {"wall/x": SMALL}, 5)
    with pytest.raises(UserError, match=message):
        resume.require_same(Path("x"), [good | {field: value}], {"wall/x": SMALL}, 5)
    without = {k: v for k, v in good.items() if k != "seconds"}
    with pytest.raises(UserError, match="another version"):
        resume.require_same(Path("x"), [without], {"wall/x": SMALL}, 5)
