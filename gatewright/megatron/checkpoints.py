"""Saving and resuming a run, so that no crash can leave a checkpoint that lies.

A checkpoint is a folder `iter_0001000/` in Megatron's torch_dist format, which any tensor,
pipeline or data parallel size can load.  It is written under another name, synced to disk,
and renamed; then the file `latest`, which holds the folder's name, is replaced atomically.
What `latest` names is complete.  Whatever else lies around is ignored, and removed at the
next start.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import re
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gatewright.artifact import write_json
from gatewright.errors import UserError
from gatewright.megatron import cpu, distributed
from gatewright.megatron.config import CheckpointConfig

LATEST = "latest"
CONFIG = "config.json"
_NAME = re.compile(r"iter_(\d{7,})")


def folder_name(step: int) -> str:
    """Return the name of the checkpoint after `step` optimizer steps."""
    return f"iter_{step:07d}"


def step_of(folder: Path) -> int:
    """Return the optimizer steps that a checkpoint folder's name states."""
    match = _NAME.fullmatch(folder.name)
    assert match, folder
    return int(match.group(1))


def complete(out: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    found = [p for p in Path(out).glob("iter_*") if _NAME.fullmatch(p.name)]
    return sorted((p for p in found if (p / "metadata.json").is_file()), key=step_of)


def latest(out: Path) -> Path | None:
    """Return the checkpoint that `latest` names, or None before the first save.

    Raises:
        UserError: `latest` names a folder that is gone.
    """
    pointer = Path(out) / LATEST
    if not pointer.is_file():
        return None
    folder = Path(out) / pointer.read_text().strip()
    if not (folder / "metadata.json").is_file():
        raise UserError(
            f"{pointer}: names {folder.name}, which is missing or damaged; write the name of "
            f"another checkpoint into it ({', '.join(p.name for p in complete(out)) or 'none'})"
        )
    return folder


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _point_latest_at(folder: Path) -> None:
    tmp = folder.parent / f".{LATEST}.{os.getpid()}"
    with open(tmp, "w", encoding="utf-8") as f:
        f.write(folder.name + "\n")
        f.flush()
        os.fsync(f.fileno())
    os.replace(tmp, folder.parent / LATEST)
    _sync(folder.parent)


def _metadata() -> dict[str, Any]:
    from megatron.core import parallel_state

    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _layout() -> list[int]:
    from megatron.core import parallel_state

    return [
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(),
    ]


def _rng_state() -> Any:
    """Return this process's generator states as a checkpoint shard."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    state = {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }
    shape = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    offset = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return ShardedObject("rng_state", state, shape, offset, replica_id=replica)


def _restore_rng(state: dict[str, Any]) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(state["tracker"])


def _state(model: nn.Module, optimizer: Any, schedule: Any, *, loading: bool) -> dict[str, Any]:
    weights = model.sharded_state_dict(metadata=_metadata())
    state: dict[str, Any] = {"model": weights}
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(
            weights, is_loading=loading, metadata=_metadata()
        )
        state["schedule"] = schedule.state_dict()
    return state


def checkpoint_bytes(model: nn.Module) -> int:
    """Return about how many bytes one checkpoint of all processes takes.

    Weights once, plus fp32 master weights and two moments.
    """
    from megatron.core import parallel_state

    mine = sum(p.numel() * (p.element_size() + 12) for p in model.parameters())
    total = torch.tensor(mine, dtype=torch.int64, device=distributed.device())
    dist.all_reduce(total, group=parallel_state.get_model_parallel_group())
    return int(total)


def require_space(out: Path, model: nn.Module) -> None:
    """Refuse to start when the disk cannot hold the next checkpoint.

    Raises:
        UserError: with the bytes needed and free.
    """
    need = checkpoint_bytes(model)
    free = shutil.disk_usage(out).free
    if free < need * 1.1:
        raise UserError(
            f"--out {out}: a checkpoint takes {need / 1e9:.1f} GB but only {free / 1e9:.1f} GB "
            "are free there; make room or choose another folder"
        )


def remove_partial(out: Path) -> None:
    """Remove what a killed save left behind."""
    for path in Path(out).glob(".iter_*.partial-*"):
        shutil.rmtree(path, ignore_errors=True)


def prune(out: Path, config: CheckpointConfig) -> None:
    """Keep the newest `keep_last` checkpoints and every multiple of `keep_every_steps`.

    Those beyond the one that `latest` names are of an earlier start, from which somebody went
    back; they do not count as newest.
    """
    newest = latest(out)
    ours = [p for p in complete(out) if newest is None or step_of(p) <= step_of(newest)]
    for folder in ours[: -config.keep_last]:
        if config.keep_every_steps and step_of(folder) % config.keep_every_steps == 0:
            continue
        _remove(folder)


def _remove(folder: Path) -> None:
    # The name goes first: a half-removed folder must not look complete.
    doomed = folder.parent / f".{folder.name}.partial-old"
    os.replace(folder, doomed)
    shutil.rmtree(doomed)


class Saver:
    """Writes checkpoints of one run, in this process or in a forked one."""

    def __init__(self, out: Path, config: CheckpointConfig, description: Any) -> None:
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

        self._out = Path(out)
        self._config = config
        self._description = description
        self._queue = AsyncCallsQueue() if config.asynchronous else None
        _answer_through_a_local_queue(asynchronous=config.asynchronous)

    def save(
        self, model: nn.Module, optimizer: Any, schedule: Any, step: int, consumed_samples: int
    ) -> None:
        """Write `iter_<step>` (all processes call this together)."""
        from megatron.core import dist_checkpointing

        self.finish(block=True)  # one save at a time
        partial = self._partial_folder(step)
        with cpu.redirect():
            state = _state(model, optimizer, schedule, loading=False)
            state["rng"] = _rng_state()
            state["step"] = step
            state["consumed_samples"] = consumed_samples
            state["layout"] = _layout()
            request = dist_checkpointing.save(
                state,
                str(partial),
                sharded_strategy=_save_strategy(),
                async_sharded_save=self._config.asynchronous,
            )
        if request is None or self._queue is None:
            self._publish(partial, step)
            return
        request.add_finalize_fn(lambda: self._publish(partial, step))
        with cpu.redirect():
            self._queue.schedule_async_request(request)

    def _partial_folder(self, step: int) -> Path:
        """Make a folder that no earlier, perhaps still running, writer knows."""
        names = [f".{folder_name(step)}.partial-{time.time_ns():x}"]
        dist.broadcast_object_list(names, src=0)
        partial = self._out / names[0]
        if distributed.is_main():
            partial.mkdir(parents=True)
        dist.barrier()
        return partial

    def _publish(self, partial: Path, step: int) -> None:
        """Sync, rename, and point `latest` at a finished checkpoint."""
        dist.barrier()
        if distributed.is_main():
            write_json(partial / CONFIG, self._description)
            for path in partial.iterdir():
                _sync(path)
            _sync(partial)
            final = self._out / folder_name(step)
            if final.exists():  # of a start that somebody went back from
                _remove(final)
            os.replace(partial, final)
            _sync(self._out)
            _point_latest_at(final)
            prune(self._out, self._config)
        dist.barrier()

    def finish(self, *, block: bool) -> None:
        """Publish an asynchronous save that is done; wait for it if `block`."""
        if self._queue is not None:
            with cpu.redirect():
                self._queue.maybe_finalize_async_calls(blocking=block)

    def close(self) -> None:
        """Wait for the last save and stop the writer."""
        self.finish(block=True)
        if self._queue is not None:
            self._queue.close()


def _answer_through_a_local_queue(*, asynchronous: bool) -> None:
    """Let writers report through a queue of this process or of its forks.

    Megatron starts a manager process for that, which imports the main module anew: seconds
    at the first save, and a process left behind when the trainer is killed.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    context = multiprocessing.get_context("fork")
    filesystem_async._results_queue = context.Queue() if asynchronous else queue.Queue()


def _save_strategy() -> Any:
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        FullyParallelSaveStrategyWrapper,
    )

    strategy = get_default_save_sharded_strategy("torch_dist")
    strategy.thread_count = 1 if not cpu.present() else 2
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if group.size() > 1:
        return FullyParallelSaveStrategyWrapper(strategy, group)
    return strategy


def load(
    folder: Path, model: nn.Module, optimizer: Any = None, schedule: Any = None
) -> tuple[int, int]:
    """Load a checkpoint into this process's part of the model; any layout may have saved it.

    Args:
        folder: an `iter_...` folder.
        optimizer: also restore its state (with `schedule`); None loads weights only.

    Returns:
        Optimizer steps done and sequences consumed.

    Raises:
        UserError: the folder is no checkpoint, or of a model of other sizes.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException

    folder = Path(folder)
    if not (folder / "metadata.json").is_file():
        raise UserError(f"{folder}: is no complete torch_dist checkpoint")
    common = dist_checkpointing.load_common_state_dict(str(folder))
    with cpu.redirect():
        request = _state(model, optimizer, schedule, loading=True)
        same_layout = common["layout"] == _layout()
        if optimizer is not None and same_layout:
            request["rng"] = _rng_state()
        try:
            state = dist_checkpointing.load(request, str(folder))
        except (CheckpointingException, KeyError, ValueError, RuntimeError) as e:
            raise UserError(
                f"{folder}: cannot be loaded into this model ({_first_line(e)}); its sizes are "
                f"in {folder / CONFIG}"
            ) from e
        model.load_state_dict(state["model"], strict=True)
        if optimizer is not None:
            optimizer.load_state_dict(state["optimizer"])
            schedule.load_state_dict(state["schedule"])
            if same_layout:
                _restore_rng(state["rng"])
    return int(common["step"]), int(common["consumed_samples"])


def _first_line(error: Exception) -> str:
    with contextlib.suppress(IndexError):
        return str(error).strip().splitlines()[0][:200]
    return type(error).__name__
