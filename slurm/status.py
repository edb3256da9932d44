"""What a run is doing: steps, jobs, progress, loss, and why something waits or failed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import time
from pathlib import Path

import tyro

from gatewright import cli, runlog
from gatewright.errors import UserError
from slurm import plan, scheduler, spec, submission
from slurm.local import clock, tail
from slurm.spec import Pipeline, Task
from slurm.submission import SubmittedTask

PROG = "python -m slurm.status"
# A tqdm line: `desc:  34%|###   | 34/100 [00:10<00:20,  3.30it/s, loss=2.1]`
_BAR = re.compile(r"(\d+)%\|[^\r\[]*\[[\d:]+<([\d:?]+)")
_ENDED = ("failed", "cancelled", "stopped")
_WHY = {
    "Dependency": "waits for the steps before it",
    "Resources": "waits for free nodes",
    "Priority": "waits behind other jobs",
    "BeginTime": "back in the queue, starts again soon",
    "JobArrayTaskLimit": "waits for other tasks of its array (throttle)",
    "DependencyNeverSatisfied": "will never run: a step before it failed",
    "AssocMaxJobsLimit": "waits: the account's job limit is reached",
    "QOSMaxJobsPerUserLimit": "waits: your job limit is reached",
    "ReqNodeNotAvail": "waits: nodes are down or reserved",
}


@dataclasses.dataclass
class Args:
    """Show the steps of a run, their jobs, progress and time left."""

    run: tyro.conf.Positional[Path]
    """Run folder."""
    lines: int = 5
    """Last lines of the log shown for failed tasks."""
    json: bool = False
    """Print JSON instead."""


@dataclasses.dataclass
class Row:
    """One task's line."""

    task: str
    state: str
    """finished, running, waits, stopped, failed, cancelled, not submitted, unknown."""
    job: str = ""
    seconds: float = 0.0
    progress: str = ""
    """Percent and time left, from the command's progress bar."""
    loss: float | None = None
    why: str = ""
    log: str = ""
    tail: list[str] = dataclasses.field(default_factory=list)


def open_run(run: Path) -> tuple[Pipeline, Path | None]:
    """Return a run's pipeline as last submitted, and that submission, or as last run here.

    Raises:
        UserError: the folder is no run, or what it keeps is damaged.
    """
    kept = run / plan.RECORDS / "pipeline.toml"
    try:
        folders = submission.folders(run)
        run_here = kept.stat().st_mtime if kept.is_file() else None
    except OSError as e:
        raise UserError(f"{run}: cannot be read ({e.strerror})") from e
    if folders and (run_here is None or run_here < _submitted_at(folders[-1])):
        return submission.load(folders[-1])[0], folders[-1]
    if run_here is None:
        raise UserError(f"{run}: is no run folder (no {plan.RECORDS}/pipeline.toml)")
    settings = run / plan.RECORDS / "settings.json"
    overrides = submission.read_settings(settings) if settings.is_file() else {}
    return spec.load(kept, overrides), None


def _submitted_at(folder: Path) -> float:
    return (folder / submission.JOBS).stat().st_mtime


def progress_of(lines: list[str]) -> str:
    """Return `34%, 0:20 left` from the last progress bar in a log's lines, or nothing."""
    for line in reversed(lines):
        bars = _BAR.findall(line)
        if bars:
            percent, left = bars[-1]
            return f"{percent}%" if "?" in left or percent == "100" else f"{percent}%, {left} left"
    return ""


def last_loss(run: Path, task: Task) -> float | None:
    """Return the last loss in a training task's metrics.jsonl."""
    loss = None
    for out in task.out_paths(run):
        with contextlib.suppress(OSError, ValueError):
            for row in runlog.read_metrics(out / "metrics.jsonl"):
                loss = row.get("loss", loss)
    return loss


def _row(
    run: Path, task: Task, submitted: SubmittedTask | None, jobs: dict[str, scheduler.Job] | None
) -> Row:
    record = plan.read_record(run, task)
    log = plan.log_path(run, task)
    job_id = submitted.job if submitted is not None else ""
    row = Row(task.name, "not submitted", job=job_id, log=str(log))
    job = (jobs or {}).get(job_id)
    if record is not None:
        row.seconds = record.seconds
        row.loss = last_loss(run, task)
    if job is not None and job.active:
        _say_queued(row, job)
        if row.state == "running":
            row.progress = progress_of(tail(log, 50))
            if record is not None and record.state == "running":
                row.seconds += time.time() - record.started
        return row
    if record is not None and _is_finished(run, task, record):
        row.state = "finished"
        return row
    if record is not None and _ran_here_last(record, submitted):
        alive = record.state == "running" and _lock_held(run)
        row.job = ""
        row.state = "running" if alive else {"running": "stopped"}.get(record.state, record.state)
        row.progress = progress_of(tail(log, 50)) if alive else ""
    elif submitted is not None:
        mine = record is not None and record.job == job_id
        if jobs is None and not (mine and record is not None and record.state in _ENDED):
            row.state, row.why = "unknown", "no squeue here: ask on a machine of the cluster"
            return row
        ended = job.state if job is not None else scheduler.accounted(job_id)
        row.state = record.state if record is not None and mine else "failed"
        if row.state == "running":  # nobody was left to write how it ended
            row.state = "failed"
        row.why = _ending(ended, record)
        if row.state == "failed" and row.why == "cancelled":
            row.state, row.why = "cancelled", ""
    if row.state == "failed" and record is not None:
        row.why = row.why or f"exit code {record.exit_code}"
        row.tail = tail(log)
    return row


def _say_queued(row: Row, job: scheduler.Job) -> None:
    row.state = "running" if job.state in ("RUNNING", "COMPLETING") else "waits"
    row.why = _WHY.get(job.reason, job.reason) if row.state == "waits" else ""


def _is_finished(run: Path, task: Task, record: plan.Record) -> bool:
    kept = record.state != "failed" and not plan.is_forgotten(record)
    return kept and plan.has_manifests(run, task)


def _ran_here_last(record: plan.Record, submitted: SubmittedTask | None) -> bool:
    """Tell whether a task's last run was one on this machine, and no job."""
    if submitted is None:
        return True
    return not record.job and record.started > _submitted_at(submitted.folder)


def _ending(state: str | None, record: plan.Record | None) -> str:
    """Say in words how a job left the queue without finishing its task."""
    if record is not None and record.state == "failed":
        return f"exit code {record.exit_code}"
    if state == "TIMEOUT":
        return "reached its time limit: give the step more time"
    if state == "OUT_OF_MEMORY":
        return "ran out of memory: give the step more"
    if state is not None and state.startswith("CANCELLED"):
        return "cancelled"
    if record is not None and record.state == "stopped":
        return "saved and left the queue: --submit goes on"
    return f"left the queue ({state})" if state else "left the queue"


def _lock_held(run: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return Path(f"/proc/{int((run / plan.RECORDS / 'lock').read_text())}").exists()
    return False


def rows(run: Path) -> tuple[Pipeline, list[Row]]:
    """Return a run's pipeline, and a row for each task and each job whose task it has no more."""
    pipeline, _ = open_run(run)
    submitted = submission.submitted(run)
    jobs: dict[str, scheduler.Job] | None = {}
    if submitted:
        known = scheduler.available()
        jobs = scheduler.jobs(task.job for task in submitted) if known else None
    queued = [t for t in submitted if t.job in (jobs or {}) and (jobs or {})[t.job].active]
    last = {t.name: t for t in [*submitted, *queued]}
    found: dict[str, Row] = {}
    for task in pipeline.tasks:  # parents come first
        row = _row(run, task, last.get(task.name), jobs)
        ended = [p.name for p in pipeline.parents(task) if found[p.name].state in _ENDED]
        if row.state == "cancelled" and ended:
            first = found[ended[0]]
            row.why = first.why if first.state == "cancelled" else ""
            row.why = row.why or f"because {first.task} {first.state}"
        found[task.name] = row
    for orphan in queued:
        if orphan.name not in found:
            row = Row(orphan.name, "", job=orphan.job)
            _say_queued(row, (jobs or {})[orphan.job])
            row.why = "the pipeline no longer has it; slurm.cancel ends it"
            found[orphan.name] = row
    return pipeline, list(found.values())


def main(args: Args) -> None:
    """Show the steps of a run, their jobs, progress and time left."""
    if args.lines < 0:
        raise UserError(f"--lines {args.lines}: give 0 or more")
    run = args.run.resolve()
    pipeline, found = rows(run)
    if args.json:
        print(json.dumps([dataclasses.asdict(row) for row in found], indent=2))
        return
    name = max(len(row.task) for row in found)
    job = max(len(row.job) for row in found)
    print(f"{pipeline.name} in {run}")
    for row in found:
        words = [row.progress, f"loss {row.loss:.4f}" if row.loss is not None else "", row.why]
        spent = clock(row.seconds) if row.seconds else ""
        line = f"{row.task:<{name}}  {row.job:<{job}}  {row.state:<13} {spent:>8}  "
        print((line + "; ".join(w for w in words if w)).rstrip())
    for row in found:
        if row.state == "failed":
            print(f"\n{row.task}: {row.why}; {row.log}")
            for line in row.tail[-args.lines :] if args.lines else []:
                print(f"  | {line}")
    counts: dict[str, int] = {}
    for row in found:
        counts[row.state] = counts.get(row.state, 0) + 1
    print("\n" + ", ".join(f"{n} {state}" for state, n in counts.items()))


if __name__ == "__main__":
    cli.run(main, Args, prog=PROG)
