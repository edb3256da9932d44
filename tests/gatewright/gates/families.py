"""A small real model of every family with an A_log gate, built by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB = 96

FAMILIES: dict[str, dict[str, Any]] = {
    "mamba": {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 2},
    "falcon_mamba": {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 2},
    "jamba": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_experts": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 4,
        "mamba_expand": 2,
        "use_mamba_kernels": False,
    },
    "zamba": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_key_value_heads": 2,
        "n_mamba_heads": 2,
        "mamba_d_state": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "use_mamba_kernels": False,
    },
    "mamba2": {
        "hidden_size": 16,
        "num_hidden_layers": 3,
        "num_heads": 4,
        "head_dim": 8,
        "state_size": 8,
        "n_groups": 2,
        "expand": 2,
        "chunk_size": 16,
    },
    "bamba": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "attn_layer_indices": [1],
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "mamba_chunk_size": 16,
    },
    "zamba2": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "mamba_d_state": 8,
        "n_mamba_heads": 4,
        "mamba_headdim": 8,
        "mamba_expand": 2,
        "mamba_ngroups": 1,
        "chunk_size": 16,
        "num_mem_blocks": 1,
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "use_mamba_kernels": False,
    },
    "nemotron_h": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "hybrid_override_pattern": "M*M",
        "layers_block_type": ["mamba", "attention", "mamba"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 16,
        "use_mamba_kernels": False,
    },
    "falcon_h1": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
    },
    "granitemoehybrid": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "shared_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_local_experts": 0,
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
    },
    "qwen3_next": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "olmo_hybrid": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "kimi_linear": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "linear_num_heads": 2,
        "linear_head_dim": 8,
        "first_k_dense_replace": 2,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
}
"""model_type -> sizes; gates in a few layers, attention in others where the family mixes."""


def build(model_type: str, seed: int = 0) -> Any:
    """Return a model with every parameter off its initial value."""
    from transformers import AutoConfig, AutoModelForCausalLM

    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(model_type, vocab_size=VOCAB, **ids, **FAMILIES[model_type])
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def save(model_type: str, folder: Path, **kwargs: Any) -> Path:
    """Write a family's small model as a Hugging Face folder."""
    model = build(model_type)
    model.to(kwargs.pop("dtype", torch.float32)).save_pretrained(folder, **kwargs)
    return folder
