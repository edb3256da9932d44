"""Starting a run from the weights of another checkpoint, with a fresh optimizer."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gatewright import artifact
from gatewright.checkpoints import models_on_disk
from gatewright.checkpoints.opening import open_checkpoint, resolve_run
from gatewright.errors import UserError
from gatewright.megatron import checkpoints, distributed
from gatewright.models import ModelConfig

FLAG = "--init-from"
_CONVERTED = ".init-from"
_NOT_COMPARED = {  # what shapes no weight and changes no result, by the model's family
    "mamba2": (
        "max_seq_len_tokens",
        "chunk_size",
        "n_heads",
        "n_kv_heads",
        "ffn_dim",
        "rope_theta",
    ),
    "llama": ("max_seq_len_tokens", "chunk_size", "expand", "d_state", "ngroups", "d_conv"),
}


def check(folder: Path, model: ModelConfig, tokenizer: Path) -> None:
    """Refuse a checkpoint that is not of this model, before any work.

    Args:
        folder: a Megatron run or `iter_*` folder, or a Hugging Face or mamba_ssm folder.
        model: the run's model, vocabulary resolved.
        tokenizer: the run's tokenizer.

    Raises:
        UserError: no checkpoint, a cut file, another size, or another vocabulary.
    """
    folder = Path(folder)
    if (folder / artifact.MANIFEST).is_file():
        found = artifact.read_manifest(folder, flag=FLAG)["kind"]
        if found not in ("pretrain", "hf-model", "mamba_ssm-model"):
            raise UserError(f"{FLAG} {folder}: is a folder of kind {found}, which holds no model")
        artifact.require_whole(folder, FLAG, (".safetensors", ".bin", ".distcp"))
    opened = open_checkpoint(folder)
    theirs = dataclasses.asdict(models_on_disk.model_config(opened))
    models_on_disk.require_unbounded_dt(opened)
    for name, value in dataclasses.asdict(model).items():
        if theirs[name] == value or name in _NOT_COMPARED[model.family]:
            continue
        flag = f"--model.{name.replace('_', '-')} {theirs[name]}"
        mend = "take another recipe" if name == "family" else f"give {flag}"
        raise UserError(
            f"{FLAG} {folder}: its model.{name} is {theirs[name]}, but this run's is {value}; "
            f"{mend}, or another checkpoint"
        )
    models_on_disk.require_trained_tokenizer(folder, tokenizer)


def load_weights(folder: Path, out: Path, model: nn.Module, optimizer: Any) -> None:
    """Load a checkpoint's weights into every process's part of the model.

    A folder of another format is converted to a Megatron checkpoint inside `out` first, from
    which each process takes its part, and which is removed again.

    Args:
        optimizer: its master weights are set to what was loaded.

    Raises:
        UserError: the folder could not be converted, or a weight is not finite; in every
            process.
    """
    source, converted = resolve_run(Path(folder)), Path(out) / _CONVERTED
    foreign = open_checkpoint(source).format != "megatron"
    if foreign:
        _convert(source, converted)
        source = resolve_run(converted)
    checkpoints.load(source, model)
    dist.barrier()
    if foreign and distributed.is_main():
        shutil.rmtree(converted)
    _require_finite(folder, model)
    optimizer.reload_model_params()


def _require_finite(folder: Path, model: nn.Module) -> None:
    names = [n for n, p in model.named_parameters() if not bool(torch.isfinite(p).all())]
    found: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(found, names)
    if bad := [name for names in found for name in names]:
        raise UserError(
            f"{FLAG} {folder}: {bad[0]} holds values that are not finite; take another checkpoint"
        )


def _convert(source: Path, target: Path) -> None:
    """Convert in the main process; where it fails, every process stops instead of waiting."""
    from gatewright.checkpoints.convert import convert

    failures: list[str | None] = [None]
    if distributed.is_main():
        try:
            shutil.rmtree(target, ignore_errors=True)  # of a start that was killed here
            convert(source, "megatron", target, check=False)
        except (OSError, UserError) as error:
            failures = [str(error)]
    dist.broadcast_object_list(failures, src=0)
    if failures[0] is not None:
        raise UserError(f"{FLAG} {source}: {failures[0]}")
