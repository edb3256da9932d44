"""Saving and resuming a run, so that no crash can leave a checkpoint that lies.

A checkpoint is a folder `iter_0001000/` in Megatron's torch_dist format, which any tensor,
pipeline or data parallel size can load.  It is written under another name, synced to disk,
and renamed; then the file `latest`, which holds the folder's name, is replaced atomically.
What `latest` names is complete.  Whatever else lies around is ignored, and removed at the
next start.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import re
import shutil
import struct
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

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
    name = pointer.read_text(encoding="utf-8", errors="replace").strip()
    folder = Path(out) / name
    if not _NAME.fullmatch(name) or not (folder / "metadata.json").is_file():
        raise UserError(
            f"{pointer}: names {name!r}, which is missing or damaged; {_others(folder)}"
        )
    return folder


def _others(folder: Path) -> str:
    """Say how to go on from another checkpoint of the same run."""
    names = [p.name for p in complete(folder.parent) if p != folder]
    return (
        f"write the name of another checkpoint into {folder.parent / LATEST} "
        f"(complete: {', '.join(names) or 'none'})"
    )


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
        self._in_flight: Path | None = None

    def save(
        self,
        model: nn.Module,
        optimizer: Any,
        schedule: Any,
        step: int,
        consumed_samples: int,
        *,
        at_once: bool = False,
    ) -> None:
        """Write `iter_<step>` (all processes call this together).

        Args:
            at_once: in this process even if saves are asynchronous; so is one that has to
                make up for an asynchronous save that failed.
        """
        from megatron.core import dist_checkpointing

        at_once = not self.finish(block=True) or at_once  # one save at a time
        asynchronous = self._queue is not None and not at_once
        partial = self._partial_folder(step)
        _answer_through_a_queue(asynchronous=asynchronous)
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
                async_sharded_save=asynchronous,
            )
        if request is None or self._queue is None:
            self._publish(partial, step)
            return
        request.add_finalize_fn(lambda: self._publish(partial, step))
        self._in_flight = partial
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

    def finish(self, *, block: bool) -> bool:
        """Publish an asynchronous save that is done; wait for it if `block`.

        All processes call this together; without a save under way it costs nothing.

        Returns:
            False, after a warning, if its writer failed or was killed: nothing is kept of it.
        """
        if self._queue is None:
            return True
        try:
            with cpu.redirect():
                self._queue.maybe_finalize_async_calls(blocking=block)
        except CheckpointException as e:  # in every process
            assert self._in_flight is not None
            if distributed.is_main():
                print(
                    f"warning: writing {self._in_flight} failed ({_cause(e)}); "
                    "the next checkpoint is written at once",
                    file=sys.stderr,
                )
                shutil.rmtree(self._in_flight, ignore_errors=True)  # others may still write
            return False
        return True

    def close(self) -> None:
        """Stop the writer, after `finish`."""
        if self._queue is not None:
            self._queue.close()


def _answer_through_a_queue(*, asynchronous: bool) -> None:
    """Give the next save's writer a new queue to report through: of forks, or of this process.

    Megatron starts a manager process for that, which imports the main module anew: seconds
    at the first save, and a process left behind when the trainer is killed. New for every
    save, because a writer killed while it answered leaves its queue locked; and a save in this
    process must not use a queue of forks: Megatron reads it without waiting, but a thread
    fills it.
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
        UserError: the folder is no checkpoint, damaged, or of a model of other sizes.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException

    folder = Path(folder)
    if not (folder / "metadata.json").is_file():
        raise UserError(f"{folder}: is no complete torch_dist checkpoint")
    unreadable = (CheckpointException, CheckpointingException, *_UNREADABLE)
    try:
        common = dist_checkpointing.load_common_state_dict(str(folder))
        step, consumed_samples = int(common["step"]), int(common["consumed_samples"])
        same_layout = common["layout"] == _layout()
    except unreadable as e:
        raise UserError(f"{folder}: is damaged ({_cause(e)}); {_others(folder)}") from e
    with cpu.redirect():
        request = _state(model, optimizer, schedule, loading=True)
        if optimizer is not None and same_layout:
            request["rng"] = _rng_state()
        try:
            state = dist_checkpointing.load(request, str(folder))
        except unreadable as e:
            raise UserError(
                f"{folder}: is damaged, or not of this model ({_cause(e)}); its sizes are in "
                f"{folder / CONFIG}; {_others(folder)}"
            ) from e
        model.load_state_dict(state["model"], strict=True)
        if optimizer is not None:
            optimizer.load_state_dict(state["optimizer"])
            schedule.load_state_dict(state["schedule"])
            if same_layout:
                _restore_rng(state["rng"])
    return step, consumed_samples


_UNREADABLE = (
    OSError,
    EOFError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    RuntimeError,
    pickle.UnpicklingError,
    struct.error,
)
"""What torch and Megatron raise at files whose bytes are not what they wrote."""


def _cause(error: BaseException) -> str:
    """Return one line of the first failure that an error stands for."""
    while isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
