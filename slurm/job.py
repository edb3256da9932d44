"""The life of one Slurm job, in place of its batch script (which execs this).

A job looks first whether its task is finished (a job may be requeued at any moment).  Warned of
the time limit (SIGUSR1), it lets its command save and goes back into the queue under its own
id, so that what waits for it goes on waiting.  A command that is killed or crashes is started
again in place as long as it gets further each time; bad input (exit code 2) is final.  After a
node's failure Slurm itself requeues the job.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from types import FrameType

from gatewright import cli
from gatewright.errors import UserError
from slurm import plan, scheduler, submission
from slurm.site import Site
from slurm.spec import Pipeline, Task

CANCEL = "cancelled"
"""File in RUN/pipeline that tells saving jobs not to go back into the queue."""
_BAD_INPUT = 2
_CRASHES_WITHOUT_PROGRESS = 2
_FRUITLESS_JOBS = 2
_REQUEUE_WAIT_SECONDS = 300


class Job:
    """One task of a submission, on the first node of its allocation."""

    def __init__(self, folder: Path, pipeline: Pipeline, site: Site, task: Task) -> None:
        self.folder, self.pipeline, self.site, self.task = folder, pipeline, site, task
        self.run = folder.parents[2]
        self.log = plan.log_path(self.run, task)
        array, index = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
        self.id = f"{array}_{index}" if array else os.environ["SLURM_JOB_ID"]
        self.warned = False
        self._warned_at = 0.0

    def main(self) -> int:
        """Run the task to its end, or as far as the time limit lets it; return the exit code."""
        if plan.why_run(self.pipeline, self.run, self.task) is None:
            plan.adopt(self.run, self.task)
            print(f"{self.task.name} is finished already")
            return 0
        plan.clear_leave_requests(self.run, self.task)
        signal.signal(signal.SIGUSR1, self._on_warning)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        argv = self.srun_command()
        record = plan.begin(self.pipeline, self.run, self.task, argv, self.log)
        record.job = self.id
        plan.write_record(self.run, self.task, record)
        mark = plan.progress_mark(self.run, self.task)
        code = self._until_it_ends(argv)
        stopped = self.warned or code == plan.EXIT_RUN_AGAIN
        moved = plan.progress_mark(self.run, self.task) != mark
        record.fruitless = 0 if moved else record.fruitless + 1
        if stopped and record.fruitless >= _FRUITLESS_JOBS:
            self.say(
                f"{record.fruitless} jobs in a row ended without having saved anything: give the "
                "step more time, or let it save more often"
            )
            stopped = False
        record = plan.end(self.run, self.task, record, code, stopped=stopped)
        if record.state == "done":
            return 0
        if record.state == "failed":
            return code or 1
        return self._go_on_later(code)

    def srun_command(self) -> list[str]:
        """Return the srun that starts one launcher (slurm.node) on each node."""
        r = self.task.step.resources
        argv = ["srun", "--unbuffered", "--kill-on-bad-exit=1", "--ntasks-per-node=1"]
        argv += [f"--nodes={r.nodes}", f"--ntasks={r.nodes}"]
        argv += [f"--cpus-per-task={r.cpus}"]  # srun stopped inheriting it in Slurm 22.05
        python = self.site.python
        image = r.container or self.site.container
        if image:
            mounts = [f"{self.run}:{self.run}", *self.site.container_mounts]
            argv += [f"--container-image={image}", f"--container-mounts={','.join(mounts)}"]
            argv += [f"--container-workdir={self.folder / 'code'}"]
            python = self.site.container_python
        node = [python, "-m", "slurm.node", str(self.folder)]
        return [*argv, *node, self.task.step.name, str(self.task.index)]

    def _until_it_ends(self, argv: list[str]) -> int:
        """Run the command, again after a crash that came after progress; return its exit code."""
        crashes = 0
        while True:
            mark = plan.progress_mark(self.run, self.task)
            code = self._once(argv)
            if code in (0, _BAD_INPUT, plan.EXIT_RUN_AGAIN) or self.warned:
                return code
            if not self.task.step.resumes:
                return code
            crashes = 1 if plan.progress_mark(self.run, self.task) != mark else crashes + 1
            if crashes > _CRASHES_WITHOUT_PROGRESS:
                self.say(f"exit code {code} again without getting further: giving up")
                return code
            self.say(f"exit code {code}: starting again from the last checkpoint")

    def _once(self, argv: list[str]) -> int:
        with open(self.log, "ab") as log:
            srun = subprocess.Popen(argv, stdout=log, stderr=log)
        while (code := srun.poll()) is None:
            time.sleep(0.2)
            late = self.warned and time.monotonic() - self._warned_at > 0.8 * self.site.save_seconds
            if late:  # better to lose some steps than the place in the queue
                self.say("the command does not leave: ending it")
                srun.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    srun.wait(10)
                srun.kill()
        return code if code >= 0 else 128 - code

    def _on_warning(self, number: int, frame: FrameType | None) -> None:
        if self.task.step.resumes:
            self.warned, self._warned_at = True, self._warned_at or time.monotonic()
            plan.ask_to_leave(self.run, self.task, os.environ["SLURM_JOB_ID"])
        else:
            self.say(
                "the time limit is near and this step cannot resume: if it does not finish, "
                "give it more time in the pipeline file"
            )

    def _go_on_later(self, code: int) -> int:
        """Put this job back into the queue, unless the run was cancelled."""
        if (self.run / plan.RECORDS / CANCEL).exists():
            self.say("saved; not going on, because the run was cancelled")
            return code or plan.EXIT_RUN_AGAIN
        self.say(f"saved (exit code {code}); back into the queue to go on")
        try:
            scheduler.requeue(self.id)
        except UserError as e:
            self.say(f"{e}; submit the pipeline again to go on")
            return plan.EXIT_RUN_AGAIN
        time.sleep(_REQUEUE_WAIT_SECONDS)  # Slurm ends this process
        return plan.EXIT_RUN_AGAIN

    def say(self, message: str) -> None:
        """Write a line into the task's log and the job's own output."""
        line = f"--- job {self.id}, {time.strftime('%Y-%m-%d %H:%M:%S')}: {message}\n"
        with open(self.log, "a", encoding="utf-8") as log:
            log.write(line)
        print(line, end="", flush=True)


def main(args: submission.TaskArgs) -> int:
    """Run one task inside a Slurm job (sbatch files call this)."""
    if "SLURM_JOB_ID" not in os.environ:
        raise UserError("runs inside a Slurm job only; python -m slurm.pipeline submits one")
    pipeline, site, task = args.load()
    return Job(args.submission, pipeline, site, task).main()


if __name__ == "__main__":
    cli.run(main, submission.TaskArgs, prog="python -m slurm.job")
