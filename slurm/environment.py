"""What every command of a pipeline finds in its environment, on this machine and on Slurm."""

from __future__ import annotations

import os

from gatewright import launch
from slurm.spec import Task

# Stated once, here; a step's `env` and the site's [env] override it.
_GPU = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron overlaps communication in issue order
    "NCCL_DEBUG": "WARN",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # a dead peer ends the others instead of a hang
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",  # what a timeout's report needs
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}


def settings(
    task: Task, site: dict[str, str] | None = None, cores: int | None = None
) -> dict[str, str]:
    """Return the variables that a task's command gets on top of what it inherits.

    OMP threads: the step's cores on a node, divided among its torchrun processes.

    Args:
        cores: of the machine that runs it, where that is known; it may have fewer.
    """
    resources = task.step.resources
    threads = max(1, min(resources.cpus, cores or resources.cpus) // (task.step.processes or 1))
    found = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    if resources.gpus:
        found |= _GPU
    return {**found, **(site or {}), **task.step.env}


def environment(task: Task, site: dict[str, str] | None = None) -> dict[str, str]:
    """Return the whole environment of a task's command, the allocator's tuning included."""
    return launch.tuned_env({**os.environ, **settings(task, site, os.cpu_count())})
