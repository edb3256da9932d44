"""The small Mamba-2 of the model-level benchmarks, and switching between the two sides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

PEER = "transformers, its own kernels"


def mamba2(**changes: Any) -> Any:
    """Return a Mamba-2 of 5.5M parameters (d_model 256, 6 layers, 8 heads of 64, N = 64)."""
    from transformers import Mamba2Config, Mamba2ForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 8192,
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "num_heads": 8,
        "head_dim": 64,
        "state_size": 64,
        "n_groups": 1,
        "expand": 2,
        "use_bias": False,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": None,
    }
    return Mamba2ForCausalLM(Mamba2Config(**(sizes | changes)))


def bound(f: Callable[[], object]) -> Callable[[], object]:
    """Return `f` run with transformers' Mamba2 bound to our kernels, and unbound after."""
    from gatewright.kernels import bind_transformers

    def run() -> object:
        with bind_transformers():
            return f()

    return run
