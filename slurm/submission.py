"""One submission of a run: frozen code, frozen pipeline file, sbatch files, and its jobs.

RUN/pipeline/submissions/001/
    code/           the checkout as it was, so that later edits change nothing
    pipeline.toml   settings.json   (params from --set, and the site's settings)
    resolved.json   every task's command, resources and environment, placeholders filled
    STEP.sbatch
    jobs.json       step -> job id, its tasks and their array indices, what it waits for

It is written as `.partial-001` and gets its name once Slurm would take all of it; without
jobs.json nothing of it was queued.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tyro

from gatewright.errors import UserError
from slurm import batch, plan, scheduler, spec
from slurm.environment import settings
from slurm.freeze import freeze_code
from slurm.site import Site
from slurm.spec import Pipeline, Step, Task

JOBS = "jobs.json"


@dataclasses.dataclass
class QueuedStep:
    """A step's job, as submitted."""

    step: str
    job: str
    tasks: dict[str, int]
    """Task name -> index in the array.  Names: a later submission's matrix may be another one."""
    array: bool
    after: list[str]

    def task_id(self, name: str) -> str:
        """Return Slurm's id of one task: `123_4` in an array, else `123`."""
        return f"{self.job}_{self.tasks[name]}" if self.array else self.job


@dataclasses.dataclass(frozen=True)
class SubmittedTask:
    """A task as it was submitted once, whether or not the pipeline still has it."""

    name: str
    job: str
    """Slurm's id."""
    folder: Path
    """The submission."""


def _numbered(run: Path) -> list[Path]:
    found = (run / plan.RECORDS / "submissions").glob("[0-9]*")
    return sorted((p for p in found if p.name.isdecimal()), key=lambda p: int(p.name))


def folders(run: Path) -> list[Path]:
    """Return a run's submission folders, oldest first; one that queued nothing is none."""
    return [folder for folder in _numbered(run) if (folder / JOBS).is_file()]


def next_folder(run: Path) -> Path:
    """Return the folder of a run's next submission."""
    last = max((int(p.name) for p in _numbered(run)), default=0)
    return run / plan.RECORDS / "submissions" / f"{last + 1:03}"


def read_settings(path: Path) -> dict[str, Any]:
    """Return what a run's settings.json holds.

    Raises:
        UserError: it is damaged.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise UserError(f"{path}: is damaged ({e}); run or submit the pipeline again") from e
    if not isinstance(found, dict):
        raise UserError(f"{path}: is damaged (no JSON object); run or submit the pipeline again")
    return found


def queued(folder: Path) -> list[QueuedStep]:
    """Return the jobs of a submission.

    Raises:
        UserError: its jobs.json is damaged.
    """
    path = folder / JOBS
    try:
        rows = [QueuedStep(**row) for row in json.loads(path.read_text(encoding="utf-8"))]
        assert all(isinstance(row.tasks, dict) for row in rows)
    except (ValueError, TypeError, AssertionError) as e:
        raise UserError(
            f"{path}: is damaged, so its jobs are not known: end those that squeue --me shows, "
            f"and remove {folder}"
        ) from e
    return rows


def submitted(run: Path) -> list[SubmittedTask]:
    """Return every task of every submission of a run, oldest first."""
    return [
        SubmittedTask(name, row.task_id(name), folder)
        for folder in folders(run)
        for row in queued(folder)
        for name in row.tasks
    ]


def active(run: Path) -> list[SubmittedTask]:
    """Return the submitted tasks that wait or run in the queue."""
    tasks = submitted(run)
    known = scheduler.jobs(t.job for t in tasks) if tasks else {}
    return [t for t in tasks if t.job in known and known[t.job].active]


def load(folder: Path) -> tuple[Pipeline, Site]:
    """Return the pipeline and site settings that a submission froze."""
    path = folder / "settings.json"
    frozen = read_settings(path)
    try:
        values, overrides = dict(frozen["site"]), dict(frozen["set"])
        for field in dataclasses.fields(Site):
            if field.type == "tuple[str, ...]":
                values[field.name] = tuple(values[field.name])
        site = Site(**values)
    except (KeyError, TypeError, ValueError) as e:
        raise UserError(f"{path}: is damaged ({e!r}); submit the pipeline again") from e
    return spec.load(folder / "pipeline.toml", overrides, site.params), site


@dataclasses.dataclass
class TaskArgs:
    """Which task of which submission: what sbatch files and srun pass on, not for people."""

    submission: tyro.conf.Positional[Path]
    """Submission folder (RUN/pipeline/submissions/NNN)."""
    step: tyro.conf.Positional[str]
    """Step of the pipeline."""
    index: tyro.conf.Positional[int]
    """Index of the task in the step's matrix."""

    def load(self) -> tuple[Pipeline, Site, Task]:
        """Return the frozen pipeline and site, and the task.

        Raises:
            UserError: no such submission, step or task.
        """
        if not (self.submission / "settings.json").is_file():
            raise UserError(f"{self.submission}: is no submission folder (no settings.json)")
        pipeline, site = load(self.submission)
        tasks = pipeline.tasks_of(pipeline.step(self.step).name)
        if not 0 <= self.index < len(tasks):
            raise UserError(f"step {self.step!r} has tasks 0 to {len(tasks) - 1}, no {self.index}")
        return pipeline, site, tasks[self.index]


@contextlib.contextmanager
def draft(folder: Path) -> Iterator[Path]:
    """Yield a folder that becomes `folder` at the end of the block, or vanishes on an error."""
    partial = folder.with_name(f".partial-{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        shutil.rmtree(folder, ignore_errors=True)  # an earlier dry run
        os.rename(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write(
    folder: Path,
    becomes: Path,
    pipeline: Pipeline,
    run: Path,
    site: Site,
    overrides: dict[str, str],
    steps: list[Step],
    code: Path,
    site_file: Path,
) -> None:
    """Write a submission into an empty folder.

    Args:
        becomes: where it will lie when its jobs run.
        steps: those that get an sbatch file.
        site_file: where `site` came from; no part of the code, even if it lies there.
    """
    freeze_code(code, folder / "code", [run, site_file])
    shutil.copyfile(pipeline.path, folder / "pipeline.toml")
    _write_json(folder / "settings.json", {"set": overrides, "site": dataclasses.asdict(site)})
    rows = [resolved(pipeline, run, site, task) for task in pipeline.tasks]
    _write_json(folder / "resolved.json", rows)
    for step in steps:
        text = batch.script(pipeline, step, site, run, becomes)
        (folder / f"{step.name}.sbatch").write_text(text)


def _write_json(path: Path, value: Any) -> None:
    """Write a file of a draft: as readable for others as the umask says, for it may hold tokens."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def resolved(pipeline: Pipeline, run: Path, site: Site, task: Task) -> dict[str, Any]:
    """Return what a submission says of a task in resolved.json."""
    return {
        "task": task.name,
        "command": task.argv(str(run)),
        "outputs": list(task.outs),
        "parents": [p.name for p in pipeline.parents(task)],
        "inputs": list(task.inputs),
        "processes_per_node": task.step.processes,
        "resources": dataclasses.asdict(task.step.resources),
        "environment": settings(task, site.env),
    }


def read_resolved(folder: Path) -> dict[str, dict[str, Any]]:
    """Return task name -> what a submission's resolved.json says of it.

    Raises:
        UserError: it is damaged or gone.
    """
    path = folder / "resolved.json"
    try:
        return {row["task"]: row for row in json.loads(path.read_text(encoding="utf-8"))}
    except (OSError, ValueError, TypeError, KeyError) as e:
        raise UserError(
            f"{path}: is damaged, so what its jobs do is not known: python -m slurm.cancel "
            f"{folder.parents[2]} first"
        ) from e
