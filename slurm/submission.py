"""One submission of a run: frozen code, frozen pipeline file, sbatch files, and its jobs.

RUN/pipeline/submissions/001/
    code/           the checkout as it was, so that later edits change nothing
    pipeline.toml   settings.json   (params from --set, and the site's settings)
    resolved.json   every task's command, resources and environment, placeholders filled
    STEP.sbatch
    jobs.json       step -> job id, array indices, what it waits for
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tyro

from gatewright import artifact
from gatewright.errors import UserError
from slurm import batch, plan, scheduler, spec
from slurm.environment import settings
from slurm.site import Site
from slurm.spec import Pipeline, Step, Task

_IGNORED = shutil.ignore_patterns(".*", "runs", "build", "__pycache__", "*.egg-info", "*.partial-*")


@dataclasses.dataclass
class QueuedStep:
    """A step's job, as submitted."""

    step: str
    job: str
    indices: list[int]
    array: bool
    after: list[str]

    def task_id(self, index: int) -> str:
        """Return Slurm's id of one task: `123_4` in an array, else `123`."""
        return f"{self.job}_{index}" if self.array else self.job


def folders(run: Path) -> list[Path]:
    """Return a run's submission folders, oldest first; one cut short while written is none."""
    found = (run / plan.RECORDS / "submissions").glob("[0-9]*/settings.json")
    return sorted(path.parent for path in found)


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
    path = folder / "jobs.json"
    return [QueuedStep(**row) for row in json.loads(path.read_text())] if path.exists() else []


def job_ids(run: Path, pipeline: Pipeline) -> dict[str, str]:
    """Return task name -> the id of the job that it was last submitted as."""
    found: dict[str, str] = {}
    names = {s.name for s in pipeline.steps}
    for folder in folders(run):
        for row in queued(folder):
            tasks = pipeline.tasks_of(row.step) if row.step in names else []
            found |= {tasks[i].name: row.task_id(i) for i in row.indices if i < len(tasks)}
    return found


def active_jobs(run: Path, pipeline: Pipeline) -> dict[str, str]:
    """Return task name -> job id of the tasks that wait or run in the queue."""
    ids = job_ids(run, pipeline)
    known = scheduler.jobs(ids.values()) if ids else {}
    return {name: i for name, i in ids.items() if i in known and known[i].active}


def load(folder: Path) -> tuple[Pipeline, Site]:
    """Return the pipeline and site settings that a submission froze."""
    frozen = read_settings(folder / "settings.json")
    site = frozen["site"]
    for field in dataclasses.fields(Site):
        if field.type == "tuple[str, ...]":
            site[field.name] = tuple(site[field.name])
    pipeline = spec.load(folder / "pipeline.toml", frozen["set"], site["params"])
    return pipeline, Site(**site)


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


def _files_known_to_git(code: Path) -> list[str] | None:
    """Return what git tracks or would track below `code`; None without git."""
    if not (code / ".git").exists() or shutil.which("git") is None:
        return None
    argv = ["git", "-C", str(code), "ls-files", "-z", "-co", "--exclude-standard"]
    done = subprocess.run(argv, capture_output=True, check=False)
    return sorted({n for n in done.stdout.decode().split("\0") if n}) or None


def _all_but_the_code(run: Path) -> Callable[[str, list[str]], set[str]]:
    def ignored(folder: str, names: list[str]) -> set[str]:
        return {*_IGNORED(folder, names), *(n for n in names if Path(folder, n) == run)}

    return ignored


def freeze_code(code: Path, target: Path, run: Path) -> None:
    """Copy the checkout: what git tracks or would track, or without git all but caches."""
    names = _files_known_to_git(code)
    if names is None:
        shutil.copytree(code, target, ignore=_all_but_the_code(run))
    for name in names or ():
        source = code / name
        if source.is_file() and run not in source.parents:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)
    (target / artifact.REVISION).write_text((artifact.git_revision() or "unknown") + "\n")


def write(
    pipeline: Pipeline,
    run: Path,
    site: Site,
    overrides: dict[str, str],
    steps: list[Step],
    code: Path,
    name: str | None = None,
) -> Path:
    """Write a new submission folder and return it.

    Args:
        steps: those that get an sbatch file.
        name: the folder's name; by default the next number.
    """
    parent = run / plan.RECORDS / "submissions"
    number = int(folders(run)[-1].name) + 1 if folders(run) else 1
    folder = parent / (name or f"{number:03}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (run / plan.RECORDS / "logs" / "slurm").mkdir(parents=True, exist_ok=True)
    freeze_code(code, folder / "code", run)
    shutil.copyfile(pipeline.path, folder / "pipeline.toml")
    artifact.write_json(folder / "settings.json", {"set": overrides, "site": site})
    artifact.write_json(folder / "resolved.json", _resolved(pipeline, run, site))
    for step in steps:
        text = batch.script(pipeline, step, site, run, folder)
        (folder / f"{step.name}.sbatch").write_text(text)
    return folder


def _resolved(pipeline: Pipeline, run: Path, site: Site) -> list[dict[str, Any]]:
    return [
        {
            "task": task.name,
            "command": task.argv(str(run)),
            "outputs": list(task.outs),
            "parents": [p.name for p in pipeline.parents(task)],
            "inputs": list(task.inputs),
            "processes_per_node": task.step.processes,
            "resources": dataclasses.asdict(task.step.resources),
            "environment": settings(task, site.env),
        }
        for task in pipeline.tasks
    ]


def todo(
    pipeline: Pipeline, chosen: list[Task], why: dict[str, str | None], active: dict[str, str]
) -> dict[str, list[Task]]:
    """Return step name -> the tasks to submit, in dependency order."""
    found: dict[str, list[Task]] = {}
    for task in chosen:
        if why[task.name] is not None and task.name not in active:
            found.setdefault(task.step.name, []).append(task)
    return found


def dependencies(
    pipeline: Pipeline,
    step: Step,
    tasks: list[Task],
    submitted: dict[str, QueuedStep],
    active: dict[str, str],
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
        if row is not None and any(p.index in row.indices for p in mine.values()):
            same = row.array and row.indices == [t.index for t in tasks]
            matched = all(
                [p.index for p in pipeline.parents(t) if p.step.name == need] == [t.index]
                for t in tasks
            )
            found.append(f"{'aftercorr' if same and matched else 'afterok'}:{row.job}")
        waiting = [active[name] for name in mine if name in active]
        found += [f"afterok:{i}" for i in sorted(set(waiting))]
    return found


def submit(
    pipeline: Pipeline,
    folder: Path,
    pending: dict[str, list[Task]],
    active: dict[str, str],
) -> list[QueuedStep]:
    """Queue a submission's steps; either all of them are queued, or none.

    Raises:
        UserError: the scheduler refuses a job.
    """
    for name in pending:
        scheduler.check(folder / f"{name}.sbatch", f"step {name!r}")
    submitted: dict[str, QueuedStep] = {}
    try:
        for name, tasks in pending.items():
            step = pipeline.step(name)
            after = dependencies(pipeline, step, tasks, submitted, active)
            indices = [t.index for t in tasks]
            array = batch.array_of(indices, step.throttle) if step.matrix else None
            job = scheduler.submit(folder / f"{name}.sbatch", after, array)
            submitted[name] = QueuedStep(name, job, indices, bool(step.matrix), after)
            rows = [dataclasses.asdict(row) for row in submitted.values()]
            artifact.write_json(folder / "jobs.json", rows)
    except UserError:
        scheduler.cancel([row.job for row in submitted.values()])
        (folder / "jobs.json").unlink(missing_ok=True)
        raise
    return list(submitted.values())


def unqueued(pipeline: Pipeline, pending: dict[str, list[Task]]) -> list[QueuedStep]:
    """Return the rows that `submit` would return, with `-` for the job ids."""
    return [
        QueuedStep(name, "-", [t.index for t in tasks], bool(pipeline.step(name).matrix), [])
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
        tasks = f"{len(row.indices)} tasks" if row.array else ""
        needs = f"after {', '.join(step.needs)}" if step.needs else ""
        lines.append(
            f"  {row.job:>8}  {row.step:<{width}}  {tasks:<9} {size:<16} {r.time:>11}  {needs}"
        )
    return "\n".join(line.rstrip() for line in lines)
