"""DeepSpeed on this machine: process group, engine, checkpoints that survive kill -9.

The model's parameters stay fp32 throughout.  DeepSpeed's own bf16 mode casts every parameter,
`A_log`, `D` and `dt_bias` among them, and a decay rate rounded to 8 bits is another gate; so
bf16 here is autocast: matrix products in bfloat16, everything else as it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gatewright import artifact
from gatewright.errors import UserError
from sft.recipes import TrainConfig

FP32_PARAMETERS = ("A_log", "D", "dt_bias")
LATEST = "latest.json"


def use_device() -> torch.device:
    """Choose this process's device and tell DeepSpeed before it is imported."""
    if torch.cuda.is_available():
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    os.environ["DS_ACCELERATOR"] = "cpu"
    return torch.device("cpu")


@contextlib.contextmanager
def process_group(device: torch.device, *, deepspeed: bool = True) -> Iterator[None]:
    """Join torchrun's process group, or make one of a single process, for the block.

    On CPU the collectives are gloo's: DeepSpeed's shared-memory ones would be compiled on
    first use, for a minute.
    """
    import datetime

    import torch.distributed as dist

    backend = "nccl" if device.type == "cuda" else "gloo"
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    added = {} if "MASTER_ADDR" in os.environ else alone
    if added:
        os.environ.update(added)  # DeepSpeed reads them
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group(backend, timeout=datetime.timedelta(minutes=30))
    try:
        if deepspeed:
            _import_deepspeed(device)
        yield
    finally:
        _leave(deepspeed)
        for name in added:
            os.environ.pop(name, None)


def _leave(deepspeed: bool) -> None:
    """Destroy the process group, and DeepSpeed's memory of it if it has one."""
    if deepspeed:
        from deepspeed import comm as deepspeed_comm

        deepspeed_comm.destroy_process_group()
    else:
        import torch.distributed as dist

        dist.destroy_process_group()


def _import_deepspeed(device: torch.device) -> None:
    import logging

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)
    if device.type == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        dist_backend="nccl" if device.type == "cuda" else "gloo",
        auto_mpi_discovery=False,
        verbose=False,
    )


def deepspeed_config(config: TrainConfig, world_size: int) -> dict[str, Any]:
    """Return the DeepSpeed configuration of a training configuration.

    Raises:
        UserError: the batch does not divide over the processes.
    """
    per_pass = config.micro_batch_packs * world_size
    if config.global_batch_packs % per_pass:
        raise UserError(
            f"--train.global-batch-packs {config.global_batch_packs} is not a multiple of "
            f"{world_size} processes x --train.micro-batch-packs {config.micro_batch_packs}"
        )
    out: dict[str, Any] = {
        "train_batch_size": config.global_batch_packs,
        "train_micro_batch_size_per_gpu": config.micro_batch_packs,
        "gradient_accumulation_steps": config.global_batch_packs // per_pass,
        "gradient_clipping": config.clip_norm,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": config.zero_stage, "contiguous_gradients": False},
    }
    if config.precision == "bf16":
        out["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    return out


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return AdamW's groups: matrices decay; norms, biases and Mamba's A_log, D, dt_bias do not."""
    decay: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        kept = parameter.ndim >= 2 and name.rpartition(".")[2] not in FP32_PARAMETERS
        (decay if kept else plain).append(parameter)
    groups = [
        {"params": decay, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def initialize(module: nn.Module, config: TrainConfig, world_size: int) -> Any:
    """Return the DeepSpeed engine around `module` with torch's AdamW."""
    import deepspeed

    optimizer = torch.optim.AdamW(
        parameter_groups(module, config.weight_decay),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=optimizer,
        config=deepspeed_config(config, world_size),
        dist_init_required=False,
    )
    return engine


def learning_rate(config: TrainConfig, step: int, steps: int) -> float:
    """Return the rate of optimizer step `step` (from 0): linear warm-up, then cosine."""
    import math

    if step < config.lr_warmup_steps:
        return config.lr * (step + 1) / config.lr_warmup_steps
    span = max(steps - config.lr_warmup_steps, 1)
    share = min((step - config.lr_warmup_steps) / span, 1.0)
    low = config.lr * config.min_lr_ratio
    return low + (config.lr - low) * 0.5 * (1 + math.cos(math.pi * share))


def set_learning_rate(engine: Any, lr: float) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] = lr


def gradient_norm(engine: Any) -> float | None:
    """Return the gradients' global norm before clipping; None where ZeRO reports it itself.

    Without ZeRO the engine clips but keeps the norm to itself.
    """
    if engine.zero_optimization_stage() > 0:
        return None
    gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients))


def first_for_all(work: Callable[[], None]) -> None:
    """Run `work` on rank 0 while the others wait; if it refuses, all leave, and rank 0 says why.

    Raises:
        UserError: on rank 0, what `work` raised.
        SystemExit: on the others, with exit code 2.
    """
    import torch.distributed as dist

    refusal: list[UserError | None] = [None]
    if dist.get_rank() == 0:
        try:
            work()
        except UserError as e:
            refusal = [e]
    dist.broadcast_object_list(refusal, src=0)
    if refusal[0] is not None:
        if dist.get_rank() == 0:
            raise refusal[0]
        raise SystemExit(2)


@contextlib.contextmanager
def gathered(engine: Any, *, change: bool = False) -> Iterator[nn.Module]:
    """Give whole parameters for the block: under ZeRO-3 each rank else holds a piece.

    Args:
        change: hand rank 0's changes to the others' pieces at the end.
    """
    module: nn.Module = engine.module
    if engine.zero_optimization_stage() < 3:
        yield module
        return
    import deepspeed

    parameters = list(module.parameters())
    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0 if change else None):
        yield module


def save_weights(engine: Any, file: Path) -> None:
    """Write the whole weights, without the optimizer, to one file or not at all."""
    import torch.distributed as dist
    from safetensors.torch import save_model

    with gathered(engine) as module:
        if dist.get_rank() == 0:
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_name(f"partial_{file.name}")
            save_model(module, str(partial))
            os.replace(partial, file)
    dist.barrier()


def load_weights(engine: Any, file: Path) -> None:
    """Put weights that `save_weights` wrote into the engine's module, to be saved as a model.

    The optimizer still belongs to the newest weights: no further step may follow.
    """
    import torch.distributed as dist
    from safetensors.torch import load_model

    with gathered(engine, change=True) as module:
        if engine.zero_optimization_stage() < 3 or dist.get_rank() == 0:
            load_model(module, str(file))


def save_checkpoint(engine: Any, folder: Path, step: int, state: dict[str, Any], keep: int) -> None:
    """Write a checkpoint that is complete or absent.

    DeepSpeed writes into a temporary folder; it is renamed when every rank is done, and the
    pointer to it is replaced last.  Older checkpoints are removed after that.
    """
    import torch.distributed as dist

    rank = dist.get_rank()
    tag, partial = f"step_{step:07d}", f"partial_step_{step:07d}"
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder / partial, ignore_errors=True)
    dist.barrier()
    engine.save_checkpoint(str(folder), tag=partial, client_state=state, save_latest=False)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder / tag, ignore_errors=True)
        os.rename(folder / partial, folder / tag)
        facts = {"tag": tag, "step": step, "processes": dist.get_world_size()}
        artifact.write_json(folder / LATEST, facts)
        for old in sorted(folder.glob("step_*"))[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    dist.barrier()


def latest_checkpoint(folder: Path, processes: int) -> tuple[str, int] | None:
    """Return (tag, step) of the newest complete checkpoint, None if there is none.

    Raises:
        UserError: another number of processes than `processes` wrote it: its optimizer is cut
            into as many parts.
    """
    pointer = folder / LATEST
    if not pointer.is_file():
        return None
    found = json.loads(pointer.read_text())
    wrote = found.get("processes", processes)
    if wrote != processes:
        raise UserError(
            f"{folder / found['tag']}: was written by {wrote} processes and cannot be resumed by "
            f"{processes}; start {wrote} (torchrun --nproc-per-node)"
        )
    return found["tag"], found["step"]


def load_checkpoint(engine: Any, folder: Path, tag: str) -> dict[str, Any]:
    """Load weights and optimizer into the engine; return the state saved beside them."""
    path, state = engine.load_checkpoint(str(folder), tag=tag)
    if path is None:
        raise UserError(f"{folder / tag}: cannot be resumed from; remove the folder to start anew")
    return dict(state)
