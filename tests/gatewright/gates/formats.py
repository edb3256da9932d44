"""Small checkpoints of real models in every format that the gate tool reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from tests.gatewright.gates import families


def huggingface(family: str, folder: Path) -> Path:
    return families.save(family, folder)


def sharded_bf16(family: str, folder: Path) -> Path:
    families.save(family, folder, dtype=torch.bfloat16, max_shard_size="6KB")
    assert (folder / "model.safetensors.index.json").is_file()
    return folder


def pytorch_bin(family: str, folder: Path) -> Path:
    """The older layout, which mamba_ssm still uses: one pickle of tensors."""
    model = families.build(family)
    folder.mkdir()
    model.config.save_pretrained(folder)
    torch.save(model.half().state_dict(), folder / "pytorch_model.bin")
    return folder


def deepspeed_universal(family: str, folder: Path) -> Path:
    """What ds_to_universal writes: bf16 weights and, per parameter, the fp32 master."""
    model = families.build(family)
    (folder / "zero").mkdir(parents=True)
    for name, parameter in model.named_parameters():
        place = folder / "zero" / name
        place.mkdir()
        torch.save({"param": parameter.data.clone()}, place / "fp32.pt")
        torch.save({"param": torch.zeros_like(parameter)}, place / "exp_avg.pt")
    shapes = {n: p.shape for n, p in model.named_parameters()}
    states = {"module": model.bfloat16().state_dict(), "param_shapes": [shapes], "dp_world_size": 2}
    torch.save(states, folder / "mp_rank_00_model_states.pt")
    model.config.save_pretrained(folder)
    return folder


def deepspeed_stage_3(family: str, folder: Path) -> Path:
    """The same from ZeRO stage 3: flat masters are the only weights, shapes stand apart."""
    model = families.build(family)
    (folder / "zero").mkdir(parents=True)
    for name, parameter in model.named_parameters():
        (folder / "zero" / name).mkdir()
        torch.save({"param": parameter.data.flatten()}, folder / "zero" / name / "fp32.pt")
    shapes = {n: p.shape for n, p in model.named_parameters()}
    for rank in range(2):
        gone = {n: torch.empty(0, dtype=torch.bfloat16) for n in shapes}
        states = {"module": gone, "param_shapes": [shapes], "dp_world_size": 2}
        torch.save(states, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    model.config.save_pretrained(folder)
    return folder


FORMATS: dict[str, Callable[[str, Path], Path]] = {
    "huggingface": huggingface,
    "sharded_bf16": sharded_bf16,
    "pytorch_bin": pytorch_bin,
    "deepspeed_universal": deepspeed_universal,
    "deepspeed_stage_3": deepspeed_stage_3,
}
