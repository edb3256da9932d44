"""Process groups: one process without a launcher, or what torchrun started."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from gatewright.megatron import cpu
from gatewright.megatron.config import ParallelConfig


def device() -> torch.device:
    """Return where this process computes."""
    return torch.device("cuda", torch.cuda.current_device()) if cpu.present() else cpu.CPU


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def is_main() -> bool:
    """Tell whether this is the process that speaks for all of them."""
    return rank() == 0


def _start(timeout: timedelta) -> None:
    """Join the process group that torchrun described, or make a group of one."""
    backend = "cpu:gloo,cuda:nccl" if cpu.present() else "gloo"
    if cpu.present():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ and "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
        )


@contextlib.contextmanager
def processes(
    parallel: ParallelConfig, *, seed: int = 1234, timeout_minutes: float = 10
) -> Iterator[int]:
    """Hold Megatron's process groups open; yields the data parallel size.

    A world that exists already is used and left as it is, so that several layouts can be
    tried in one launch.  The generators of all processes are seeded: alike over data parallel
    ranks, differently over tensor and pipeline ranks, as Megatron expects.

    Raises:
        UserError: the processes do not divide evenly into copies of the model.
    """
    cpu.enable()
    from megatron.core import parallel_state

    started_here = not dist.is_initialized()
    if started_here:
        _start(timedelta(minutes=timeout_minutes))
    data_parallel = parallel.data(dist.get_world_size())
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        context_parallel_size=parallel.context,
        create_gloo_process_groups=True,
    )
    seed_everything(seed)
    try:
        yield data_parallel
    finally:
        _end_layout()
        if started_here:
            dist.destroy_process_group()


def _end_layout() -> None:
    """End the groups of a layout, but not the world.

    Megatron only forgets most of its groups.  Each gloo group keeps three threads, one of which
    wakes a hundred times a second, so groups left over from earlier layouts would slow the next.
    """
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if cpu.present():
        return
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy, torch and Megatron's tracked generators."""
    import random

    import numpy as np
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
