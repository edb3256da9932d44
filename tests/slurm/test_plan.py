"""What counts as progress of a command that may be started again."""

import os
from pathlib import Path

import pytest

from slurm import plan, spec
from slurm.spec import Task


@pytest.fixture
def task(tmp_path: Path) -> Task:
    file = tmp_path / "pipeline.toml"
    file.write_text('name = "t"\n[step.a]\ncommand = "true"\nout = "a"\nresumes = true\n')
    (tmp_path / "a" / "pool_size=1").mkdir(parents=True)
    (tmp_path / "a" / "latest").write_text("iter_10")
    (tmp_path / "a" / "pool_size=1" / "answers.json").write_text("{}\n")
    return spec.load(file).tasks[0]


def test_what_a_repeated_crash_leaves_is_no_progress(task: Task, tmp_path: Path) -> None:
    before = plan.progress_mark(tmp_path, task)
    for name in ("unhealthy.jsonl", "metrics.jsonl", "config.json", "gates_at_start.json"):
        (tmp_path / "a" / name).write_text("again\n")
    for name in (".iter_0000020.partial-1f", "checkpoints/partial_step_0000020", "tensorboard"):
        (tmp_path / "a" / name).mkdir(parents=True)
        (tmp_path / "a" / name / "half").write_text("half")
    os.utime(tmp_path / "a" / "pool_size=1" / "answers.json")  # written again as it was
    assert plan.progress_mark(tmp_path, task) == before


@pytest.mark.parametrize("saved", ["pool_size=1/answers.json", "checkpoints/step_2/w", "latest"])
def test_what_a_command_saves_is_progress(saved: str, task: Task, tmp_path: Path) -> None:
    before = plan.progress_mark(tmp_path, task)
    path = tmp_path / "a" / saved
    path.parent.mkdir(parents=True, exist_ok=True)
    if saved == "latest":
        path.write_text("iter_20")
        os.utime(path, ns=(1, 1))
    else:
        with open(path, "a") as f:
            f.write("{}\n")
    assert plan.progress_mark(tmp_path, task) != before


def test_what_a_step_that_resumes_left_is_never_replaced(task: Task, tmp_path: Path) -> None:
    """Days of training are for their owner to remove."""
    p = spec.load(tmp_path / "pipeline.toml")
    for number in (1, 2, 3):
        (tmp_path / "a" / "number").write_text(str(number))
        plan.begin(p, tmp_path, task, [], tmp_path / "log", anew=True)
        (tmp_path / "a").mkdir()
    kept = {path.parent.name: path.read_text() for path in tmp_path.glob("a.stale*/number")}
    assert kept == {"a.stale": "1", "a.stale-2": "2", "a.stale-3": "3"}
    assert (tmp_path / "a.stale" / "latest").exists()
