"""The files that sbatch gets: one a step, readable, with its tasks' commands as comments."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from gatewright.errors import UserError
from slurm.site import Site
from slurm.spec import Pipeline, Step, Task

_BODY = """\

set -e
{setup}set -u
cd {code}
# The job's life (save before the limit, requeue, records) is slurm/job.py; exec makes it the
# process that the signal reaches.
exec {python} -m slurm.job {submission} {step} {index}
"""

_IN_DIRECTIVES = re.compile(r"[\w./+=@~,:-]")
_IN_MOUNTS = re.compile(r"[\w./+=@~-]")
_MARGIN_SECONDS = 60


def check(pipeline: Pipeline, site: Site, run: Path) -> None:
    """Refuse what sbatch files cannot carry, and jobs that would have no time to work.

    Raises:
        UserError: the run's path has other letters than sbatch or a container takes as they
            are; the limit of a step that resumes is not longer than the time it needs to save.
    """
    images = [site.container, *(step.resources.container for step in pipeline.steps)]
    taken = _IN_MOUNTS if any(images) else _IN_DIRECTIVES
    strange = taken.sub("", str(run))
    if strange:
        raise UserError(
            f"--run {str(run)!r}: sbatch{' or the container' if any(images) else ''} would not "
            f"take {strange[0]!r} as it is: choose a path of letters, digits and . _ - + = @ /"
        )
    for step in pipeline.steps:
        least = site.save_seconds + _MARGIN_SECONDS
        if step.resumes and step.resources.seconds <= least:
            raise UserError(
                f"{pipeline.path}: step {step.name!r}: time = {step.resources.time!r} leaves less "
                f"than {_MARGIN_SECONDS} s to work before the job saves: give it more than "
                f"{least} s, or the site file a smaller save_seconds (now {site.save_seconds})"
            )


def _comment(text: str) -> str:
    """Return a comment of the file; a line break in `text` must not end it."""
    return "".join(f"# {line}\n" for line in text.splitlines())


def array_of(indices: list[int], throttle: int | None) -> str:
    """Return Slurm's notation of array indices: `0-2,5%4`."""
    ranges: list[list[int]] = []
    for i in sorted(indices):
        if ranges and ranges[-1][1] == i - 1:
            ranges[-1][1] = i
        else:
            ranges.append([i, i])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
    return f"{text}%{throttle}" if throttle else text


def options(pipeline: Pipeline, step: Step, site: Site, run: Path) -> list[str]:
    """Return the #SBATCH options of a step."""
    r = step.resources
    tasks = pipeline.tasks_of(step.name)
    pattern = "%A_%a" if step.matrix else "%j"
    found = [
        f"--job-name={pipeline.name}.{step.name}",
        f"--output={run}/pipeline/logs/slurm/{step.name}-{pattern}.out",
        "--open-mode=append",
        f"--nodes={r.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={r.cpus}",
        f"--time={r.time}",
        f"--signal=B:USR1@{site.save_seconds}",
        "--requeue",
        "--kill-on-invalid-dep=yes",
    ]
    if step.matrix:
        found.append(f"--array={array_of([t.index for t in tasks], step.throttle)}")
    if r.gpus:
        found.append(site.gpu_option.format(n=r.gpus))
    memory = r.memory or site.memory
    if memory:
        found.append(f"--mem={memory}")
    partition = r.partition or (site.cpu_partition if not r.gpus else "") or site.partition
    if partition:
        found.append(f"--partition={partition}")
    account = r.account or site.account
    if account:
        found.append(f"--account={account}")
    return [*found, *site.sbatch]


def readable(task: Task, run: Path) -> str:
    """Return a task's command for a comment: torchrun where it takes processes."""
    argv = task.argv(str(run))
    r, processes = task.step.resources, task.step.processes
    if processes and argv[0] == "python":
        argv[:1] = ["torchrun", f"--nnodes={r.nodes}", f"--nproc-per-node={processes}"]
    return shlex.join(argv)


def script(pipeline: Pipeline, step: Step, site: Site, run: Path, submission: Path) -> str:
    """Return the text of a step's sbatch file.

    Args:
        run: the run folder, as the nodes see it.
        submission: the folder with the frozen code (`code/`) and pipeline file.
    """
    summary = f": {step.summary}" if step.summary else ""
    lines = ["#!/bin/bash\n", _comment(f"{pipeline.name}: step {step.name}{summary}")]
    lines.append(_comment(f"Written by python -m slurm.pipeline {pipeline.path.name} --submit."))
    lines += [f"#SBATCH {option}\n" for option in options(pipeline, step, site, run)]
    lines.append("\n")
    for task in pipeline.tasks_of(step.name):
        index = f"{task.index}: " if step.matrix else ""
        lines.append(_comment(f"{index}{readable(task, run)}"))
    setup = "".join(f"{line}\n" for line in site.setup)
    index = '"$SLURM_ARRAY_TASK_ID"' if step.matrix else "0"
    code = shlex.quote(str(submission / "code"))
    lines.append(
        _BODY.format(
            setup=setup,
            code=code,
            python=shlex.quote(site.python),
            submission=shlex.quote(str(submission)),
            step=step.name,
            index=index,
        )
    )
    return "".join(lines)
