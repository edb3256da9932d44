"""Pretraining recipes: one named function per real run returns its complete configuration.

They live in the library because two stages need them: `pretrain.train` runs one,
`tools.plan` says beforehand what it will take.
"""

from __future__ import annotations

from gatewright.config import Recipes
from gatewright.megatron.config import (
    CheckpointConfig,
    LogConfig,
    ParallelConfig,
    PretrainConfig,
    TrainConfig,
)
from gatewright.models import ModelConfig

RECIPES: Recipes[PretrainConfig] = Recipes("pretrain")

PAPER_TOKENS = 300_000_000_000
"""Tokens that "On the Importance of Gating" pretrains on (section 5)."""


def _paper_training() -> TrainConfig:
    """The paper's optimisation: AdamW, 4K tokens, 256 sequences, peak 3e-4, cosine.

    (Its appendix "Tool-calling task".)  What it leaves open is named here: warm-up,
    the cosine's floor, Adam's betas.
    """
    seq_len_tokens, global_batch_sequences = 4096, 256
    steps = -(-PAPER_TOKENS // (seq_len_tokens * global_batch_sequences))
    return TrainConfig(
        steps=steps,
        seq_len_tokens=seq_len_tokens,
        global_batch_sequences=global_batch_sequences,
        micro_batch_sequences=2,
        lr=3e-4,
        min_lr=3e-5,
        lr_warmup_steps=2000,
        weight_decay=0.1,
        dtype="bf16",
        fp32_gates=True,
    )


def _cluster(model: ModelConfig) -> PretrainConfig:
    return PretrainConfig(
        model=model,
        train=_paper_training(),
        parallel=ParallelConfig(overlap=True),  # 128-way data parallel, ZeRO 1
        checkpoint=CheckpointConfig(
            every_steps=1000, keep_last=3, keep_every_steps=25_000, asynchronous=True
        ),
        log=LogConfig(every_steps=10, gates_every_steps=500),
    )


@RECIPES.register
def mamba2_1p5b_128xh100() -> PretrainConfig:
    """The paper's Mamba-2: 32 layers, d 2048, 1.482B parameters, 300B tokens."""
    return _cluster(
        ModelConfig(
            family="mamba2",
            vocab_size=131_072,
            d_model=2048,
            n_layers=32,
            d_state=128,
            head_dim=64,
            ngroups=8,
        )
    )


@RECIPES.register
def llama_2b_128xh100() -> PretrainConfig:
    """The paper's Transformer: 28 layers, d 2048, 1.976B parameters, 300B tokens."""
    return _cluster(
        ModelConfig(
            family="llama",
            vocab_size=131_072,
            d_model=2048,
            n_layers=28,
            n_heads=16,
            n_kv_heads=16,
            head_dim=128,
            ffn_dim=5632,
        )
    )


def _debug(model: ModelConfig) -> PretrainConfig:
    """The matched pair's common part: same tokens, same batches, about a minute on 2 cores."""
    return PretrainConfig(
        model=model,
        train=TrainConfig(
            steps=180,
            seq_len_tokens=512,
            global_batch_sequences=4,
            micro_batch_sequences=4,
            lr=3e-3,
            min_lr=3e-4,
            lr_warmup_steps=18,
            dtype="fp32",
        ),
        checkpoint=CheckpointConfig(every_steps=90, keep_last=1),
        log=LogConfig(every_steps=1, gates_every_steps=40),
        vocab_follows_tokenizer=True,
    )


@RECIPES.register
def mamba2_debug_cpu() -> PretrainConfig:
    """A Mamba-2 of 4.9M parameters for two CPU cores; pairs with llama_debug_cpu."""
    return _debug(
        ModelConfig(
            family="mamba2",
            vocab_size=8192,
            d_model=256,
            n_layers=6,
            max_seq_len_tokens=2048,
            tie_embeddings=True,
            d_state=64,
            head_dim=64,
            ngroups=2,
            chunk_size=64,
        )
    )


@RECIPES.register
def llama_debug_cpu() -> PretrainConfig:
    """A Llama of 4.7M parameters for two CPU cores; pairs with mamba2_debug_cpu."""
    return _debug(
        ModelConfig(
            family="llama",
            vocab_size=8192,
            d_model=256,
            n_layers=4,
            max_seq_len_tokens=2048,
            tie_embeddings=True,
            n_heads=4,
            n_kv_heads=4,
            head_dim=64,
            ffn_dim=512,
            rope_theta=10_000.0,
        )
    )
