"""What of a pipeline is finished, what must run, and why: the same for both executors.

A task is finished when every folder it writes has a manifest, and the record of the run that
wrote them has the fingerprint the task has now: its command, its parents' content hashes, and
the files outside the run that it names.  Records lie in `RUN/pipeline/tasks/`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gatewright import artifact
from gatewright.errors import UserError
from slurm.spec import Pipeline, Task

RECORDS = "pipeline"
"""Folder of a run in which the executors keep their own files."""

_ASKED_FOR = ["asked to run again"]  # in place of a record's command
EXIT_RUN_AGAIN = 75
"""Exit code of a command that saved and left before its end (EX_TEMPFAIL): run it again."""


@dataclasses.dataclass
class Record:
    """What is known about the last run of a task; written before it starts and after it ends."""

    task: str
    state: str
    """running, done, failed, stopped."""
    fingerprint: dict[str, Any]
    command: list[str]
    log: str
    started: float
    """Seconds since the epoch."""
    seconds: float = 0.0
    """Spent over all attempts at this fingerprint."""
    cpu_seconds: float = 0.0
    """Of all cores, over all attempts on this machine: what it costs, however busy it was."""
    exit_code: int | None = None
    peak_memory_bytes: int = 0
    attempts: int = 1
    outs: dict[str, str] = dataclasses.field(default_factory=dict)
    """Output folder -> content hash."""
    job: str = ""
    """Slurm's id of the job that runs it; empty on this machine."""
    fruitless: int = 0
    """Jobs in a row that reached their time limit without having saved anything."""


def record_path(run: Path, task: Task) -> Path:
    return run / RECORDS / "tasks" / f"{task.slug}.json"


def log_path(run: Path, task: Task) -> Path:
    return run / RECORDS / "logs" / f"{task.slug}.log"


def read_record(run: Path, task: Task) -> Record | None:
    """Return a task's record, or None if it never ran (or the record is damaged)."""
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError, TypeError):
        return Record(**json.loads(record_path(run, task).read_text()))
    return None


def write_record(run: Path, task: Task, record: Record) -> None:
    path = record_path(run, task)
    path.parent.mkdir(parents=True, exist_ok=True)
    artifact.write_json(path, record)


def has_manifests(run: Path, task: Task) -> bool:
    return all((out / artifact.MANIFEST).is_file() for out in task.out_paths(run))


def out_hashes(run: Path, task: Task) -> dict[str, str]:
    return {out: artifact.content_hash(run / out) for out in task.outs}


def fingerprint_inputs(task: Task) -> dict[str, str]:
    """Return path -> identity of every file outside the run that a task names.

    A folder with a manifest answers with its content hash.  Other files answer with size and
    time of change: hashing terabytes of corpus on each start would cost more than the work.

    Raises:
        UserError: a name or pattern that matches nothing.
    """
    found: dict[str, str] = {}
    for pattern in task.inputs:
        paths = sorted(glob.glob(pattern, recursive=True))
        if not paths:
            raise UserError(f"step {task.step.name!r}: inputs: {pattern!r} matches no file")
        for name in paths:
            path = Path(name)
            if path.is_dir() and (path / artifact.MANIFEST).is_file():
                found[name] = artifact.content_hash(path)
                continue
            files = sorted(path.rglob("*")) if path.is_dir() else [path]
            digest = hashlib.sha256()
            for file in files:
                if file.is_file():
                    stat = file.stat()
                    line = f"{file.relative_to(path)}\0{stat.st_size}\0{stat.st_mtime_ns}\n"
                    digest.update(line.encode())
            found[name] = digest.hexdigest()
    return found


def fingerprint(pipeline: Pipeline, run: Path, task: Task) -> dict[str, Any]:
    """Return what decides whether a finished task is still valid.

    The run folder is left out of the command, so that a run may be moved or renamed.
    Parents must be finished.
    """
    return {
        "command": task.argv("{run}"),
        "processes": task.step.processes,
        "env": task.step.env,
        "parents": {
            out: artifact.content_hash(run / out)
            for parent in pipeline.parents(task)
            for out in parent.outs
        },
        "inputs": fingerprint_inputs(task),
    }


def why_run(pipeline: Pipeline, run: Path, task: Task) -> str | None:
    """Return why a task whose parents are finished must run, or None if it is finished."""
    record = read_record(run, task)
    present = has_manifests(run, task)
    if record is None:
        return "its output was made by something else" if present else "not run yet"
    if is_forgotten(record):
        return "asked for"
    now = fingerprint(pipeline, run, task)
    old = record.fingerprint
    if now != old:
        for part, said in (
            ("command", "its command changed"),
            ("processes", "its command changed"),
            ("env", "its environment changed"),
            ("inputs", "its inputs changed"),
        ):
            if now[part] != old.get(part):
                return said
        before = old.get("parents", {})
        made = [p for p, h in now["parents"].items() if before.get(p) != h]
        return f"{', '.join(made) or 'a parent'} changed"
    if not present:
        return {
            "failed": f"failed before (exit code {record.exit_code})",
            "done": "its output is gone",
        }.get(record.state, "unfinished")
    if record.state == "failed":
        return f"failed before (exit code {record.exit_code})"
    # A record that still says running or stopped: the executor died, but its command went on
    # to write the manifest, which comes last.  The work is complete.
    if record.state == "done" and record.outs != out_hashes(run, task):
        return "its output was changed by something else"
    return None


def adopt(run: Path, task: Task) -> None:
    """Mark a task done whose command finished although its executor did not see it."""
    record = read_record(run, task)
    if record is not None and record.state != "done":
        record.state, record.exit_code = "done", 0
        record.outs = out_hashes(run, task)
        write_record(run, task, record)


# A job tells the launchers on its nodes to leave by a file, not by a signal: whether srun passes
# a signal to a step's main process or to everything below it depends on the cluster, and data
# loaders would die of it.
def _leave_folder(run: Path, task: Task) -> Path:
    return run / RECORDS / "leave" / task.slug


def ask_to_leave(run: Path, task: Task, job: str) -> None:
    """Ask the command of a task, wherever it runs under this job, to save and leave."""
    folder = _leave_folder(run, task)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / job).touch()


def asked_to_leave(run: Path, task: Task, job: str) -> bool:
    """Tell whether a job asked its command to leave."""
    with contextlib.suppress(FileNotFoundError):
        # Listing the folder, unlike looking for a file, is never answered from NFS's cache.
        return job in os.listdir(_leave_folder(run, task))
    return False


def clear_leave_requests(run: Path, task: Task) -> None:
    shutil.rmtree(_leave_folder(run, task), ignore_errors=True)


@contextlib.contextmanager
def forgotten(run: Path, tasks: list[Task]) -> Iterator[None]:
    """Make finished tasks unfinished, for good only if the block succeeds.

    Their next runs will set their output aside.
    """
    before = [(task, record) for task in tasks if (record := read_record(run, task)) is not None]
    try:
        for task, record in before:
            fingerprint = {**record.fingerprint, "command": _ASKED_FOR}
            write_record(run, task, dataclasses.replace(record, fingerprint=fingerprint))
        yield
    except BaseException:
        for task, record in before:
            write_record(run, task, record)
        raise


def is_forgotten(record: Record) -> bool:
    """Tell whether a task is to run again although it has finished."""
    return record.fingerprint.get("command") == _ASKED_FOR


def progress_mark(run: Path, task: Task) -> tuple[str, ...]:
    """Return what changes when a command saves: names and sizes of all files in its folders.

    For files at the top of a folder also their time of change, because a pointer to the newest
    checkpoint keeps its size.  What a command writes again at each start does not count: a
    crash that only repeats itself would else look like progress for ever.
    """
    found: list[str] = []
    for out in task.out_paths(run):
        for folder, names, files in os.walk(out):
            names[:] = sorted(n for n in names if not _gets_nowhere(n))
            for path in (Path(folder, n) for n in sorted(files) if not _gets_nowhere(n)):
                with contextlib.suppress(FileNotFoundError):
                    stat = path.stat()
                    at = stat.st_mtime_ns if path.parent == out else ""
                    found.append(f"{path.relative_to(run)} {stat.st_size} {at}")
    return tuple(found)


_NO_PROGRESS = (
    *("tensorboard", "metrics.jsonl", "config.json", "unhealthy.jsonl"),
    "gates_at_start.json",
)


def _gets_nowhere(name: str) -> bool:
    return name in _NO_PROGRESS or name.startswith((".", "partial_"))


def begin(
    pipeline: Pipeline,
    run: Path,
    task: Task,
    command: list[str],
    log: Path,
    *,
    anew: bool = False,
) -> Record:
    """Make room for a task's output and record that it runs.

    Output of another command or other inputs is set aside as `NAME.stale`, and so is a half
    output, unless the step resumes: then it is kept for the command to carry on from (but
    not if it is to be made `anew`).  What a step that resumes left is set aside beside what
    was set aside before (`NAME.stale-2`), never in its place.
    """
    record = read_record(run, task)
    now = fingerprint(pipeline, run, task)
    carries_on = record is not None and record.fingerprint == now and not anew
    keeps = carries_on and task.step.resumes and not has_manifests(run, task)
    for out in task.out_paths(run):
        if out.exists() and not keeps:
            os.rename(out, _room_for_stale(task, out))
        out.parent.mkdir(parents=True, exist_ok=True)
        for partial in out.parent.glob(f".{glob.escape(out.name)}.partial-*"):
            shutil.rmtree(partial, ignore_errors=True)
    fresh = Record(task.name, "running", now, command, str(log.relative_to(run)), time.time())
    if carries_on and record is not None:
        fresh.seconds, fresh.attempts = record.seconds, record.attempts + 1
        fresh.cpu_seconds = record.cpu_seconds
        fresh.peak_memory_bytes, fresh.fruitless = record.peak_memory_bytes, record.fruitless
    write_record(run, task, fresh)
    return fresh


def _room_for_stale(task: Task, out: Path) -> Path:
    stale = out.with_name(f"{out.name}.stale")
    if not task.step.resumes:
        shutil.rmtree(stale, ignore_errors=True)
        return stale
    number = 1
    while os.path.lexists(stale):
        number += 1
        stale = out.with_name(f"{out.name}.stale-{number}")
    return stale


def end(run: Path, task: Task, record: Record, exit_code: int, *, stopped: bool = False) -> Record:
    """Record how a task ended; a finished one drops what it had set aside.

    Exit code 0 without all manifests is a failure, unless the command was asked to stop.
    """
    record.seconds += time.time() - record.started
    record.exit_code = exit_code
    if has_manifests(run, task) and exit_code == 0:
        record.state, record.outs = "done", out_hashes(run, task)
        if not task.step.resumes:  # days of training are for their owner to remove
            for out in task.out_paths(run):
                shutil.rmtree(out.with_name(out.name + ".stale"), ignore_errors=True)
    else:
        record.state = "stopped" if stopped else "failed"
    write_record(run, task, record)
    return record
