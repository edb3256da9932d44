"""Take a run out of the queue; training saves first unless told otherwise."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import tyro

from gatewright import cli
from gatewright.errors import UserError
from slurm import job, local, plan, scheduler, status, submission

PROG = "python -m slurm.cancel"


@dataclasses.dataclass
class Args:
    """Cancel the jobs of a run; `slurm.pipeline --submit` goes on with it later."""

    run: tyro.conf.Positional[Path]
    """Run folder."""
    now: bool = False
    """Do not let training save first."""
    wait_seconds: int = 180
    """How long training may take to save before it is ended."""


def main(args: Args) -> None:
    """Cancel the jobs of a run; `slurm.pipeline --submit` goes on with it later."""
    if args.wait_seconds < 0:
        raise UserError(f"--wait-seconds {args.wait_seconds}: give 0 or more")
    run = args.run.resolve()
    status.open_run(run)
    with local.locked(run):  # not while a submission queues one job after another
        cancel(run, now=args.now, wait_seconds=args.wait_seconds)


def cancel(run: Path, *, now: bool, wait_seconds: float) -> None:
    """Take every job of every submission out of the queue."""
    active = submission.active(run)
    if not active:
        print(f"{run}: nothing of it is in the queue")
        return
    jobs = scheduler.jobs(task.job for task in active)
    saving = [
        task
        for task in active
        if not now
        and task.job in jobs  # it may have left the queue since it was found active
        and jobs[task.job].state == "RUNNING"
        and _resumes(task)
    ]
    # The file first: a job that saves from now on must not go back into the queue.
    (run / plan.RECORDS / job.CANCEL).touch()
    scheduler.cancel([task.job for task in active if task not in saving])
    for task in saving:
        try:
            scheduler.tell_to_save(task.job)
        except UserError as e:  # it is ended below; if that fails, too, it is an error
            print(f"{task.name} could not be told to save: {e}", flush=True)
    if saving:
        names = ", ".join(task.name for task in saving)
        print(f"waiting for {names} to save (at most {wait_seconds} s)", flush=True)
    deadline = time.monotonic() + wait_seconds
    left = [task.job for task in saving]
    while left and time.monotonic() < deadline:
        time.sleep(1)
        jobs = scheduler.jobs(left)
        left = [i for i in left if i in jobs and jobs[i].state in ("RUNNING", "COMPLETING")]
    scheduler.cancel([task.job for task in saving])
    print(f"cancelled {len(active)} jobs of {run}; --submit goes on from what is finished")


def _resumes(task: submission.SubmittedTask) -> bool:
    pipeline, _ = submission.load(task.folder)  # as its job knows it
    return any(t.step.resumes for t in pipeline.tasks if t.name == task.name)


if __name__ == "__main__":
    cli.run(main, Args, prog=PROG)
