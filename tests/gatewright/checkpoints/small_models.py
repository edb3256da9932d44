"""Small real models for the checkpoint tests, in both engines' own formats."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from gatewright.artifact import write_json
from gatewright.models import ModelConfig, hf_config

MAMBA = ModelConfig(
    family="mamba2", vocab_size=96, d_model=32, n_layers=2, d_state=8, head_dim=16, chunk_size=16
)
LLAMA = ModelConfig(
    family="llama",
    vocab_size=96,
    d_model=32,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    ffn_dim=48,
    max_seq_len_tokens=128,
)

VARIANTS = {
    "mamba2-g1": MAMBA,
    "mamba2-g2": dataclasses.replace(MAMBA, ngroups=2),
    "mamba2-g2-tied": dataclasses.replace(MAMBA, ngroups=2, tie_embeddings=True),
    "llama-gqa": LLAMA,
    "llama-mha-tied": dataclasses.replace(LLAMA, n_kv_heads=4, tie_embeddings=True),
}


def save_huggingface(folder: Path, model: ModelConfig, *, seed: int = 0, **kwargs: object) -> Path:
    """Write a randomly initialised transformers model; every parameter is off its initial value."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    built = AutoModelForCausalLM.from_config(hf_config(model))
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    built.to(kwargs.pop("dtype", torch.float32)).save_pretrained(folder, **kwargs)
    return folder


def save_megatron(run: Path, model: ModelConfig, *, seed: int = 0) -> Path:
    """Write a Megatron run folder with one checkpoint of a randomly initialised model."""
    from gatewright.megatron import build, checkpoints, distributed
    from gatewright.megatron.config import CheckpointConfig, ParallelConfig

    run.mkdir(parents=True)
    with distributed.processes(ParallelConfig(), seed=seed):
        built = build.build_model(model)
        with torch.no_grad():
            for parameter in built.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        description = {"model": dataclasses.asdict(model)}
        saver = checkpoints.Saver(run, CheckpointConfig(), description)
        saver.save(built, None, None, step=3, consumed_samples=24)
        saver.close()
    write_json(run / "config.json", description)
    return run
