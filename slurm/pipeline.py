"""Run a pipeline file: on this machine (`--local`) or as Slurm jobs (`--submit`)."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import tyro

from gatewright import cli
from gatewright.errors import UserError
from slurm import batch, job, local, overrides, plan, queue, scheduler, spec, submission
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
    _check_run(run)
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
        return _Submission(args, pipeline, site, changes, run, chosen, forced).go()
    if args.dry_run:
        return local.dry_run(pipeline, run, chosen, forced)
    local.check_nodes(chosen)
    again = [a for a in sys.argv[1:] if not a.startswith("--from")]
    if args.start_from in again:
        again.remove(args.start_from)
    with local.locked(run) as lock_fd:
        if submission.active(run):
            raise UserError(f"{run}: has jobs in the queue: python -m slurm.cancel {run} first")
        known = {k: v for k, v in (site.params if site else {}).items() if k in pipeline.params}
        local.keep_pipeline_file(pipeline, run, {**known, **changes})
        command = f"{PROG} {shlex.join(again)}"
        return local.execute(pipeline, run, chosen, forced, command, lock_fd)


def _check_run(run: Path) -> None:
    """Refuse a run folder that is a file, lies below one, or has no possible name."""
    try:
        for place in (run / plan.RECORDS, run, *run.parents):
            if place.exists():
                if not place.is_dir():
                    raise UserError(f"--run {run}: {place} is a file; choose another folder")
                return
    except OSError as e:
        raise UserError(f"--run {run}: cannot be made ({e.strerror}); choose another folder") from e


@dataclasses.dataclass(frozen=True)
class _Submission:
    """What is asked for: a pipeline, a run of it, and which of its tasks."""

    args: Args
    pipeline: Pipeline
    site: sites.Site
    changes: dict[str, str]
    run: Path
    chosen: list[Task]
    forced: set[str]

    def go(self) -> int:
        """Write the sbatch files of what is not finished or queued, submit, print the graph."""
        batch.check(self.pipeline, self.site, self.run)
        self._check_inputs()
        if self.args.dry_run:
            with local.locked(self.run):
                return self._dry_run()
        scheduler.need()
        with local.locked(self.run):
            return self._submit()

    def _check_inputs(self) -> None:
        for task in self.chosen:
            for pattern in task.inputs:
                if not Path(pattern).is_absolute():
                    raise UserError(
                        f"step {task.step.name!r}: inputs: {pattern!r} must be an absolute path: "
                        "the jobs run in a copy of the code"
                    )
            try:
                plan.fingerprint_inputs(task)
            except UserError as e:
                if not self.args.dry_run:  # the files may be looked at where the data is not
                    raise
                print(f"note: {e}")

    def _dry_run(self) -> int:
        why = local.reasons(self.pipeline, self.run, self.chosen, self.forced)
        pending = queue.todo(self.chosen, why, {})
        if not pending:
            return self._nothing(0)
        folder = self.run / plan.RECORDS / "submissions" / "dry-run"
        with submission.draft(folder) as draft:
            self._write(draft, folder, pending)
        self._show(queue.unqueued(self.pipeline, pending), folder)
        print("nothing was submitted (--dry-run)")
        return 0

    def _submit(self) -> int:
        pipeline, run, chosen = self.pipeline, self.run, self.chosen
        active = {task.name: task for task in submission.active(run)}
        again = [task for task in chosen if task.step.name in self.forced]
        for task in again:
            if task.name in active:
                raise UserError(
                    f"--from {self.args.start_from}: {task.name!r} is in the queue (job "
                    f"{active[task.name].job}): python -m slurm.cancel {run} first"
                )
        why = local.reasons(pipeline, run, chosen, self.forced)
        pending = queue.todo(chosen, why, active)
        queue.check_queued(pipeline, run, self.site, why, pending, active)
        if not pending:  # what is in the queue but finished is just leaving
            return self._nothing(sum(why.get(name) is not None for name in active))
        folder = submission.next_folder(run)
        with submission.draft(folder) as draft:
            self._write(draft, folder, pending)
            queue.check(draft, pending)
        with plan.forgotten(run, again), _not_cancelled(run):
            rows = queue.submit(pipeline, run, folder, pending, active)
        self._show(rows, folder)
        print(f"watch: python -m slurm.status {run}")
        return 0

    def _write(self, draft: Path, folder: Path, pending: dict[str, list[Task]]) -> None:
        submission.write(
            draft,
            folder,
            self.pipeline,
            self.run,
            self.site,
            self.changes,
            steps=[self.pipeline.step(name) for name in pending],
            code=local.CODE,
            site_file=sites.place(self.args.site),
        )

    def _nothing(self, waiting: int) -> int:
        queued = f", {waiting} of them still in the queue" if waiting else ", all finished"
        print(f"nothing to submit: {len(self.chosen)} tasks{queued}")
        return 0

    def _show(self, rows: list[submission.QueuedStep], folder: Path) -> None:
        tasks = sum(len(row.tasks) for row in rows)
        print(f"{self.pipeline.name}: {len(rows)} jobs, {tasks} tasks")
        print(queue.graph(self.pipeline, rows))
        print(f"files: {folder}")


@contextlib.contextmanager
def _not_cancelled(run: Path) -> Iterator[None]:
    """Take back that a run was cancelled, for good only if the block succeeds."""
    mark = run / plan.RECORDS / job.CANCEL
    was = mark.exists()
    mark.unlink(missing_ok=True)
    try:
        yield
    except BaseException:
        if was:
            mark.touch()
        raise


if __name__ == "__main__":
    cli.run(main, Args, prog=PROG)
