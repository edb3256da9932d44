"""Talking to Slurm: the few questions and commands the pipeline needs, each one process."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from gatewright.errors import UserError

_TIMEOUT_SECONDS = 60


@dataclasses.dataclass(frozen=True)
class Job:
    """One job or array task as the scheduler knows it."""

    id: str
    """`123`, or `123_4` for an array task."""
    state: str
    """PENDING, RUNNING, COMPLETED, FAILED, TIMEOUT, CANCELLED, NODE_FAIL, ..."""
    reason: str
    """Why it waits."""

    @property
    def active(self) -> bool:
        """Whether it waits or runs."""
        return self.state in ACTIVE


ACTIVE = {
    "PENDING",
    "RUNNING",
    "CONFIGURING",
    "COMPLETING",
    "SUSPENDED",
    "REQUEUED",
    "REQUEUE_HOLD",
    "REQUEUE_FED",
    "RESIZING",
    "SIGNALING",
    "STAGE_OUT",
    "STOPPED",
}


def _call(*argv: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            argv, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False
        )
    except FileNotFoundError as e:
        raise UserError(
            f"{argv[0]} is not here: run this on a machine of the cluster (a login node), or use "
            "--local"
        ) from e
    except subprocess.TimeoutExpired as e:
        raise UserError(f"{argv[0]} did not answer within {_TIMEOUT_SECONDS} s") from e


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"


def available() -> bool:
    """Tell whether Slurm's commands are on this machine."""
    return shutil.which("sbatch") is not None


def check(script: Path, named: str) -> None:
    """Let the scheduler judge a job without queueing it (`sbatch --test-only`).

    Raises:
        UserError: it would refuse the job; its reason and `named` are in the message.
    """
    done = _call("sbatch", "--test-only", str(script))
    if done.returncode:
        reason = re.sub(r"^(sbatch|allocation failure): (error: )?", "", _last_line(done.stderr))
        raise UserError(f"{named}: Slurm would refuse it: {reason} ({script})")


def submit(script: Path, dependencies: Sequence[str], array: str | None) -> str:
    """Queue a job and return its id.

    Args:
        dependencies: such as `afterok:12:13`.
        array: the array's indices, in place of those in the file.

    Raises:
        UserError: the scheduler refused it.
    """
    argv = ["sbatch", "--parsable"]
    if dependencies:
        argv.append(f"--dependency={','.join(dependencies)}")
    if array is not None:
        argv.append(f"--array={array}")
    done = _call(*argv, str(script))
    if done.returncode:
        raise UserError(f"{script}: sbatch refused it: {_last_line(done.stderr)}")
    return done.stdout.strip().split(";")[0]


def jobs(ids: Iterable[str]) -> dict[str, Job]:
    """Return what the scheduler knows of these jobs' tasks: `123` or `123_4` -> Job.

    Finished jobs are known for a few minutes (or longer, where there is accounting).
    """
    wanted = sorted({i.split("_")[0] for i in ids})
    found: dict[str, Job] = {}
    if not wanted:
        return found
    done = _call("squeue", "-h", "-r", "-t", "all", "-o", "%i|%T|%r", "-j", ",".join(wanted))
    if done.returncode and "Invalid job id" not in done.stderr:
        raise UserError(f"squeue: {_last_line(done.stderr)}")
    if done.returncode and len(wanted) > 1:  # one forgotten job fails the whole question
        for one in wanted:
            found |= jobs([one])
        return found
    for line in done.stdout.splitlines():
        job_id, state, reason = [p.strip() for p in line.split("|")]
        found[job_id] = Job(job_id, state, reason)
    return found


def accounted(job_id: str) -> str | None:
    """Return the final state of a job that the queue has forgotten, where there is accounting."""
    try:
        done = _call("sacct", "-n", "-X", "-P", "-o", "State", "-j", job_id)
    except UserError:
        return None
    lines = done.stdout.split()
    return lines[-1].split()[0] if done.returncode == 0 and lines else None


def cancel(ids: Sequence[str]) -> None:
    """Cancel jobs or array tasks; those already gone do not matter."""
    if ids:
        _call("scancel", *ids)


def tell_to_save(job_id: str) -> None:
    """Send a running job the signal that the time limit would: save and leave."""
    _call("scancel", "--batch", "--signal=USR1", job_id)


def requeue(job_id: str) -> None:
    """Put a running job back into the queue under its id.

    Raises:
        UserError: the cluster does not allow it.
    """
    done = _call("scontrol", "requeue", job_id)
    if done.returncode:
        raise UserError(f"scontrol requeue {job_id}: {_last_line(done.stderr)}")
