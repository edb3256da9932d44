"""Take a run out of the queue; training saves first unless told otherwise."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import tyro

from gatewright import cli
from slurm import job, plan, scheduler, status, submission

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
    run = args.run.resolve()
    pipeline, _ = status.open_run(run)
    active = submission.active_jobs(run, pipeline)
    if not active:
        print(f"{run}: nothing of it is in the queue")
        return
    jobs = scheduler.jobs(active.values())
    tasks = {t.name: t for t in pipeline.tasks}
    saving = {
        name: job_id
        for name, job_id in active.items()
        if job_id in jobs  # it may have left the queue since it was found active
        and jobs[job_id].state == "RUNNING"
        and not args.now
        and name in tasks
        and tasks[name].step.resumes
    }
    # The file first: a job that saves from now on must not go back into the queue.
    (run / plan.RECORDS / job.CANCEL).touch()
    scheduler.cancel([i for name, i in active.items() if name not in saving])
    for job_id in saving.values():
        scheduler.tell_to_save(job_id)
    if saving:
        print(
            f"waiting for {', '.join(saving)} to save (at most {args.wait_seconds} s)", flush=True
        )
    deadline = time.monotonic() + args.wait_seconds
    left = saving
    while left and time.monotonic() < deadline:
        time.sleep(1)
        jobs = scheduler.jobs(left.values())
        left = {n: i for n, i in left.items() if i in jobs and jobs[i].active}
    scheduler.cancel(list(left.values()))
    print(f"cancelled {len(active)} jobs of {run}; --submit goes on from what is finished")


if __name__ == "__main__":
    cli.run(main, Args, prog=PROG)
