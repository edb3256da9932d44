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
_SPEAKER = re.compile(
    r"^((sbatch|squeue|scancel|scontrol|slurm_load_jobs error|allocation failure|error|fatal): )+"
)
_GONE = ("Invalid job id", "already completing", "already completed", "already finished")


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
            argv,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
            start_new_session=True,  # a Ctrl-C must not end sbatch between queueing and its answer
        )
    except FileNotFoundError as e:
        raise _not_here(argv[0]) from e
    except subprocess.TimeoutExpired as e:
        raise UserError(
            f"{argv[0]} did not answer within {_TIMEOUT_SECONDS} s; look with squeue --me at what "
            "is queued, then try again"
        ) from e


def _not_here(program: str) -> UserError:
    return UserError(
        f"{program} is not here: run this on a machine of the cluster (a login node), or run the "
        "pipeline with --local in a folder of its own"
    )


def _last_line(text: str) -> str:
    """Return the last line that a command of Slurm wrote, without its own name."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return _SPEAKER.sub("", lines[-1]) if lines else "no message"


def available() -> bool:
    """Tell whether Slurm's commands are on this machine."""
    return shutil.which("sbatch") is not None


def need() -> None:
    """Refuse to go on where Slurm's commands are not on this machine."""
    if not available():
        raise _not_here("sbatch")


def check(script: Path, named: str) -> None:
    """Let the scheduler judge a job without queueing it (`sbatch --test-only`).

    Raises:
        UserError: it would refuse the job; its reason and `named` are in the message.
    """
    done = _call("sbatch", "--test-only", str(script))
    if done.returncode:
        raise UserError(f"{named}: Slurm would refuse it: {_last_line(done.stderr)}; {_WAY_OUT}")


_WAY_OUT = "change the step (in the file or with --set) or the site file"


def submit(script: Path, named: str, dependencies: Sequence[str], array: str | None) -> str:
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
        raise UserError(f"{named}: sbatch refused it: {_last_line(done.stderr)}; {_WAY_OUT}")
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
        raise UserError(f"squeue: {_last_line(done.stderr)}; try again later")
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
    lines = [line for line in done.stdout.splitlines() if line.strip()]  # "CANCELLED by 1000"
    return lines[-1].split()[0] if done.returncode == 0 and lines else None


def cancel(ids: Sequence[str]) -> None:
    """Cancel jobs or array tasks; those already gone do not matter.

    Raises:
        UserError: one could not be cancelled.
    """
    if ids:
        _scancel(*ids)


def tell_to_save(job_id: str) -> None:
    """Send a running job the signal that the time limit would: save and leave.

    One that is gone needs none.

    Raises:
        UserError: the signal could not be sent (Slurm keeps trying where a job waits again).
    """
    _scancel("--batch", "--signal=USR1", job_id)


def _scancel(*args: str) -> None:
    done = _call("scancel", *args)
    said = [line for line in done.stderr.splitlines() if line.strip()]
    bad = [line for line in said if not any(words in line for words in _GONE)]
    if done.returncode and (bad or not said):
        reason = _last_line("\n".join(bad))
        raise UserError(
            f"scancel {' '.join(args)}: {reason}; look with squeue --me at what is queued, then "
            "try again"
        )


def requeue(job_id: str) -> None:
    """Put a running job back into the queue under its id.

    Raises:
        UserError: the cluster does not allow it.
    """
    done = _call("scontrol", "requeue", job_id)
    if done.returncode:
        raise UserError(f"scontrol requeue {job_id}: {_last_line(done.stderr)}")
