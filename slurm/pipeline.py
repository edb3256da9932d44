"""Run a pipeline file: on this machine (`--local`) or as Slurm jobs (`--submit`)."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import Annotated

import tyro

from gatewright import cli
from gatewright.errors import UserError
from slurm import job, local, overrides, plan, spec, submission
from slurm import site as sites
from slurm.spec import Pipeline, Task

PROG = "python -m slurm.pipeline"


@dataclasses.dataclass
class Args:
    """Run the steps of a pipeline file, each once: what is finished is skipped."""

    file: tyro.conf.Positional[Path]
    """Pipeline file (slurm/pipelines/demo.toml shows one)."""
    local: bool = False
    """Run on this machine, one step after another."""
    submit: bool = False
    """Submit to Slurm."""
    dry_run: bool = False
    """Only print what would run and why; with --submit also write the sbatch files."""
    run: Path | None = None
    """Run folder; by default runs/NAME."""
    site: Path | None = None
    """Site file; --submit takes $GATEWRIGHT_SITE or site.toml by default."""
    only: str | None = None
    """Run nothing but this step; its needs must be finished."""
    start_from: Annotated[str | None, tyro.conf.arg(name="from")] = None
    """Run this step and all that depend on it again, even if finished."""
    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Repeatable. NAME=VALUE: another value for an entry of the file's [params]. STEP.KEY=VALUE:
    other resources for a step (train.time=02:00:00), other values of its matrix (gates.scale=1,2),
    or train.flags="--x 1": words appended to its command."""


def main(args: Args) -> int:
    """Run the steps of a pipeline file, each once: what is finished is skipped."""
    if args.local == args.submit:
        raise UserError("choose one of --local (this machine) and --submit (Slurm)")
    site = sites.load(args.site) if args.submit or args.site else None
    changes = overrides.parse(args.set)
    pipeline = spec.load(args.file, changes, site.params if site else None)
    run = (args.run or Path("runs") / pipeline.name).resolve()
    there = next(place for place in (run, *run.parents) if place.exists())
    if not there.is_dir():
        raise UserError(f"--run {run}: {there} is a file; choose another folder")
    chosen = list(pipeline.tasks)
    forced: set[str] = set()
    if args.only:
        pipeline.step(args.only)
        chosen = pipeline.tasks_of(args.only)
        local.check_parents(pipeline, run, chosen)
    if args.start_from:
        pipeline.step(args.start_from)
        forced = pipeline.descendants(args.start_from)
    if args.submit:
        assert site is not None
        return submit(args, pipeline, site, changes, run, chosen, forced)
    if args.dry_run:
        return local.dry_run(pipeline, run, chosen, forced)
    if submission.folders(run) and submission.active_jobs(run, pipeline):
        raise UserError(f"{run}: has jobs in the queue: python -m slurm.cancel {run} first")
    _make(run)
    known = {k: v for k, v in (site.params if site else {}).items() if k in pipeline.params}
    local.keep_pipeline_file(pipeline, run, {**known, **changes})
    again = [a for a in sys.argv[1:] if not a.startswith("--from")]
    if args.start_from in again:
        again.remove(args.start_from)
    return local.execute(pipeline, run, chosen, forced, f"{PROG} {shlex.join(again)}")


def _make(run: Path) -> None:
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"--run {run}: cannot be made ({e.strerror}); choose another folder") from e


def submit(
    args: Args,
    pipeline: Pipeline,
    site: sites.Site,
    changes: dict[str, str],
    run: Path,
    chosen: list[Task],
    forced: set[str],
) -> int:
    """Write the sbatch files of what is not finished or queued, submit them, print the graph."""
    for task in chosen:
        for pattern in task.inputs:
            if not Path(pattern).expanduser().is_absolute():
                raise UserError(
                    f"step {task.step.name!r}: inputs: {pattern!r} must be an absolute path: the "
                    "jobs run in a copy of the code"
                )
        try:
            plan.fingerprint_inputs(task)
        except UserError as e:
            if not args.dry_run:  # the files may be looked at where the data is not
                raise
            print(f"note: {e}")
    active = {} if args.dry_run else submission.active_jobs(run, pipeline)
    for task in chosen:
        if task.step.name in forced and task.name in active:
            raise UserError(
                f"--from {args.start_from}: {task.name!r} is in the queue (job "
                f"{active[task.name]}): python -m slurm.cancel {run} first"
            )
    why = local.reasons(pipeline, run, chosen, forced)
    pending = submission.todo(pipeline, chosen, why, active)
    if not pending:
        waiting = [name for name in active if why.get(name)]  # others are done, just leaving
        queued = f", {len(waiting)} of them still in the queue" if waiting else ", all finished"
        print(f"nothing to submit: {len(chosen)} tasks{queued}")
        return 0
    _make(run)
    steps = [pipeline.step(name) for name in pending]
    name = "dry-run" if args.dry_run else None
    folder = submission.write(pipeline, run, site, changes, steps, local.CODE, name)
    if args.dry_run:
        rows = submission.unqueued(pipeline, pending)
    else:
        (run / plan.RECORDS / job.CANCEL).unlink(missing_ok=True)
        for task in chosen:
            if task.step.name in forced:
                plan.forget(run, task)
        rows = submission.submit(pipeline, folder, pending, active)
    print(f"{pipeline.name}: {len(rows)} jobs, {sum(map(len, pending.values()))} tasks")
    print(submission.graph(pipeline, rows))
    print(f"files: {folder}")
    if args.dry_run:
        print("nothing was submitted (--dry-run)")
    else:
        print(f"watch: python -m slurm.status {run}")
    return 0


if __name__ == "__main__":
    cli.run(main, Args, prog=PROG)
