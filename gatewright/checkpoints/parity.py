"""Do two checkpoints hold the same model?  Their logits on the same tokens, in fp32."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gatewright.checkpoints.models_on_disk import dt_limit
from gatewright.checkpoints.storage import Checkpoint
from gatewright.checkpoints.views import hf_views
from gatewright.errors import UserError
from gatewright.models import ModelConfig, hf_config, load_hf_model

TOLERANCE = 1e-4
"""Largest difference of a logit, relative to the largest logit where that exceeds 1."""
CHECK_TOKENS = 48


@dataclasses.dataclass(frozen=True)
class Parity:
    """How far two models' logits are apart."""

    max_difference: float
    largest_logit: float

    @property
    def agrees(self) -> bool:
        return self.max_difference <= TOLERANCE * max(1.0, self.largest_logit)


def check_tokens(model: ModelConfig) -> Any:
    """Return the tokens that both models read: (2, CHECK_TOKENS), the same every time."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.vocab_size, (2, CHECK_TOKENS), generator=generator)


def logits(checkpoint: Checkpoint, model: ModelConfig) -> Any:
    """Return a checkpoint's logits on `check_tokens` as fp32 (2, CHECK_TOKENS, V) on the CPU.

    A Megatron checkpoint is loaded by Megatron-Core into its own model, anything else by
    transformers; mamba_ssm's format, whose engine needs CUDA, through its Hugging Face names.
    """
    import torch

    with torch.no_grad(), _quiet():
        if checkpoint.format == "megatron":
            found = _megatron_logits(checkpoint, model)
        else:
            found = _transformers_logits(checkpoint, model)
    gc.collect()
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the engines' progress bars and remarks about missing kernels out of the output."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def compare(first: Any, second: Any, source: Path) -> Parity:
    """Return how far the logits of a model from `source` and of what it became are apart.

    Raises:
        UserError: one of them is not finite, so there is nothing to compare.
    """
    largest = max(float(first.abs().max()), float(second.abs().max()))
    difference = float((first - second).abs().max())
    if difference != difference or largest == float("inf"):
        raise UserError(
            f"{source}: its model gives NaN or infinity on random tokens, so nothing can be "
            "compared; take another checkpoint, or write it as it is with --no-check"
        )
    return Parity(difference, largest)


def _transformers_logits(checkpoint: Checkpoint, model: ModelConfig) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    from gatewright.checkpoints.torch_dist_writer import as_torch

    if checkpoint.format == "huggingface":
        built = load_hf_model(
            AutoModelForCausalLM, checkpoint.root, named=str(checkpoint.root), dtype=torch.float32
        )
    else:
        config, limit = hf_config(model), dt_limit(checkpoint)
        if limit is not None:
            config.time_step_limit = limit
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(config)
        built = built.to_empty(device="cpu")
        if model.tie_embeddings:
            built.tie_weights()
        built.load_state_dict(
            {n: as_torch(v.read(), v.dtype) for n, v in hf_views(checkpoint, model).items()},
            strict=not model.tie_embeddings,
        )
    built.eval()
    return built(input_ids=check_tokens(model), use_cache=False).logits.float()


def _megatron_logits(checkpoint: Checkpoint, model: ModelConfig) -> Any:
    import torch

    from gatewright.megatron import build, checkpoints, cpu, distributed
    from gatewright.megatron.config import ParallelConfig

    with distributed.processes(ParallelConfig()):
        built = build.build_model(model, dtype=torch.float32)
        checkpoints.load(checkpoint.root, built)
        built.eval()
        tokens = check_tokens(model).to(distributed.device())
        positions = torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)
        with cpu.redirect():
            return built(tokens, positions, None).float().cpu()
