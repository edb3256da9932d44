"""Putting a submission's jobs into the queue: which tasks, what they wait for, all or none."""

from __future__ import annotations

import dataclasses
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path

from gatewright import artifact
from gatewright.errors import UserError
from slurm import batch, local, plan, scheduler, submission
from slurm.site import Site
from slurm.spec import Pipeline, Step, Task
from slurm.submission import QueuedStep, SubmittedTask

_MAY_NOT_CHANGE = {
    "command": "command",
    "inputs": "inputs",
    "processes_per_node": "processes",
    "resources": "resources",
    "environment": "environment",
}
"""Entries of resolved.json that a queued task keeps, and what people call them."""


def todo(
    chosen: list[Task],
    why: Mapping[str, str | None],
    active: Mapping[str, SubmittedTask],
) -> dict[str, list[Task]]:
    """Return step name -> the tasks to submit, in dependency order."""
    found: dict[str, list[Task]] = {}
    for task in chosen:
        if why[task.name] is not None and task.name not in active:
            found.setdefault(task.step.name, []).append(task)
    return found


def check_queued(
    pipeline: Pipeline,
    run: Path,
    site: Site,
    why: Mapping[str, str | None],
    pending: dict[str, list[Task]],
    active: Mapping[str, SubmittedTask],
) -> None:
    """Refuse to go on where what is in the queue is not what the pipeline says now.

    Raises:
        UserError: a queued task has another command (or inputs, resources, environment) now; it
            reads what is to be made again; a task of an earlier pipeline writes a folder that
            one to be submitted writes.
    """
    submitting = {task.name: task for tasks in pending.values() for task in tasks}
    tasks = {task.name: task for task in pipeline.tasks}
    for name, queued in active.items():
        if name in why and why[name] is None:  # finished; its job is just leaving
            continue
        then = submission.read_resolved(queued.folder).get(name, {})
        said = f"{name!r} is in the queue (job {queued.job})"
        first = f"python -m slurm.cancel {run} first"
        if name not in tasks:
            for other in submitting.values():
                if {*other.outs} & {*then.get("outputs", ())}:
                    raise UserError(f"{said} and writes what {other.name!r} would write: {first}")
            continue
        task = tasks[name]
        now = submission.resolved(pipeline, run, site, task)
        for key, people in _MAY_NOT_CHANGE.items():
            if name in why and now[key] != then.get(key):
                raise UserError(f"{said} with other {people} than now: {first}")
        for parent in pipeline.parents(task):
            if parent.name in submitting:
                raise UserError(
                    f"{said} and would read {parent.name!r}, which is to be made again: {first}"
                )


def dependencies(
    pipeline: Pipeline,
    step: Step,
    tasks: list[Task],
    submitted: Mapping[str, QueuedStep],
    active: Mapping[str, SubmittedTask],
) -> list[str]:
    """Return what a step's job waits for, in sbatch's words.

    Jobs of this submission are awaited whole (`afterok`), or task by task (`aftercorr`) when
    both arrays hold the same combinations; tasks queued earlier are awaited by themselves.
    """
    parents = [p for task in tasks for p in pipeline.parents(task)]
    found: list[str] = []
    for need in step.needs:
        row = submitted.get(need)
        mine = {p.name: p for p in parents if p.step.name == need}
        if row is not None and mine.keys() & row.tasks.keys():
            same = row.array and [*row.tasks.values()] == [t.index for t in tasks]
            matched = bool(step.matrix) and all(
                [p.index for p in pipeline.parents(t) if p.step.name == need] == [t.index]
                for t in tasks
            )
            found.append(f"{'aftercorr' if same and matched else 'afterok'}:{row.job}")
        waiting = {active[name].job for name in mine if name in active}
        found += [f"afterok:{i}" for i in sorted(waiting)]
    return found


def check(draft: Path, pending: Mapping[str, list[Task]]) -> None:
    """Let the scheduler judge a submission's files.

    Raises:
        UserError: it would refuse one.
    """
    for name in pending:
        scheduler.check(draft / f"{name}.sbatch", f"step {name!r}")


def submit(
    pipeline: Pipeline,
    run: Path,
    folder: Path,
    pending: Mapping[str, list[Task]],
    active: Mapping[str, SubmittedTask],
) -> list[QueuedStep]:
    """Queue a submission's steps; either all of them are queued, or none.

    A signal to stop is looked at between two jobs: while sbatch works, whether it queued a job
    is not known.

    Raises:
        UserError: the scheduler refuses a job, or the folder cannot be written.
        KeyboardInterrupt, SystemExit: it was asked to stop.
    """
    (run / plan.RECORDS / "logs" / "slurm").mkdir(parents=True, exist_ok=True)
    submitted: dict[str, QueuedStep] = {}
    with local.stoppable() as stop:
        try:
            for name, tasks in pending.items():
                step = pipeline.step(name)
                after = dependencies(pipeline, step, tasks, submitted, active)
                array = [t.index for t in tasks] if step.matrix else None
                indices = batch.array_of(array, step.throttle) if array is not None else None
                script = folder / f"{name}.sbatch"
                job = scheduler.submit(script, f"step {name!r}", after, indices)
                named = {t.name: t.index for t in tasks}
                submitted[name] = QueuedStep(name, job, named, bool(step.matrix), after)
                rows = [dataclasses.asdict(row) for row in submitted.values()]
                artifact.write_json(folder / submission.JOBS, rows)
                if stop.count:
                    raise _stopped(stop.number)
        except BaseException as e:
            _take_back(run, folder, [row.job for row in submitted.values()], e)
            if isinstance(e, OSError):
                said = f"{folder}: cannot be written ({e.strerror}); nothing was submitted"
                raise UserError(said) from e
            raise
    return list(submitted.values())


def _stopped(number: int) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


def _take_back(run: Path, folder: Path, jobs: list[str], error: BaseException) -> None:
    try:
        scheduler.cancel(jobs)
    except UserError as e:  # what is queued stays known
        first = str(error) or "interrupted"
        raise UserError(f"{first}; and {e}: python -m slurm.cancel {run}") from error
    shutil.rmtree(folder, ignore_errors=True)


def unqueued(pipeline: Pipeline, pending: Mapping[str, list[Task]]) -> list[QueuedStep]:
    """Return the rows that `submit` would return, with `-` for the job ids."""
    return [
        QueuedStep(
            name, "-", {t.name: t.index for t in tasks}, bool(pipeline.step(name).matrix), []
        )
        for name, tasks in pending.items()
    ]


def graph(pipeline: Pipeline, rows: list[QueuedStep]) -> str:
    """Return the submitted steps as a table: job, step, tasks, what it waits for."""
    lines = []
    width = max(len(row.step) for row in rows)
    for row in rows:
        step = pipeline.step(row.step)
        r = step.resources
        size = f"{r.nodes} node{'s' if r.nodes > 1 else ''}"
        size += f" x {r.gpus} GPU" if r.gpus else ""
        tasks = f"{len(row.tasks)} tasks" if row.array else ""
        needs = f"after {', '.join(step.needs)}" if step.needs else ""
        lines.append(
            f"  {row.job:>8}  {row.step:<{width}}  {tasks:<9} {size:<16} {r.time:>11}  {needs}"
        )
    return "\n".join(line.rstrip() for line in lines)
