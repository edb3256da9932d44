"""The training loss of packed samples, for any transformers Mamba2 or Llama model.

The model's body runs over packed sequences with samples kept apart: Mamba-2 gets `seq_idx`,
so convolution and SSM state start anew in each sample; attention runs over each sample by
itself.  The head runs only where the next token carries loss, a few percent of a tool-calling
chat: a 32K vocabulary would else cost as much as the body.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gatewright.errors import UserError
from sft.packing import Batch

FAMILIES = ("mamba2", "llama")
ATTENTION = "gatewright_segments"


def _segment_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    boundaries: list[list[int]] | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention over each sample by itself.

    Args:
        query: (B, H, L, P); key, value: (B, H_kv, L, P).
        boundaries: per row, the starts of its samples and the row's end; None runs ordinary
            causal attention over the row, or attention with the given mask.

    Returns:
        (B, L, H, P) and None (no attention weights).
    """
    grouped = key.shape[1] != query.shape[1]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None and q.shape[2] > 1,
            scale=scaling,
            enable_gqa=grouped,
        )

    if boundaries is None:
        return attend(query, key, value, attention_mask).transpose(1, 2), None
    rows = []
    for b, bounds in enumerate(boundaries):
        pieces = [
            attend(
                query[b : b + 1, :, start:end],
                key[b : b + 1, :, start:end],
                value[b : b + 1, :, start:end],
                None,
            )
            for start, end in itertools.pairwise(bounds)
        ]
        rows.append(torch.cat(pieces, dim=2))
    return torch.cat(rows).transpose(1, 2), None


def register_attention() -> str:
    """Make per-sample attention known to transformers; return its name."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    def mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        # Without padding and cache the samples' boundaries say everything: no L x L mask.
        if kwargs.get("attention_mask") is None and kwargs["q_length"] == kwargs["kv_length"]:
            return None
        return sdpa_mask(*args, **kwargs)

    AttentionInterface.register(ATTENTION, _segment_attention)
    AttentionMaskInterface.register(ATTENTION, mask)
    return ATTENTION


class PackedLoss(nn.Module):
    """Wraps a causal language model; `forward` returns the summed loss of a packed batch.

    Args:
        model: `Mamba2ForCausalLM` or `LlamaForCausalLM`.

    Raises:
        UserError: another architecture.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.family = family_of(model)
        self.model = model

    def forward(self, batch: Batch, scale: float = 1.0) -> torch.Tensor:
        """Return `scale` times the sum of -log p(label) over the batch's targets (nats)."""
        body: nn.Module = self.model.base_model
        if self.family == "mamba2":
            hidden = body(batch.input_ids, use_cache=False, seq_idx=batch.segments)[0]
        else:
            hidden = body(
                batch.input_ids,
                use_cache=False,
                position_ids=batch.position_ids,
                boundaries=batch.boundaries,
            )[0]
        chosen = hidden.reshape(-1, hidden.shape[-1])[batch.predict]
        logits = self.model.lm_head(chosen.to(self.model.lm_head.weight.dtype)).float()
        return F.cross_entropy(logits, batch.labels, reduction="sum") * scale


def family_of(model: nn.Module) -> str:
    """Return mamba2 or llama.

    Raises:
        UserError: the model is neither.
    """
    family = getattr(model.config, "model_type", None)
    if family not in FAMILIES:
        raise UserError(f"--model: model_type {family!r} is neither mamba2 nor llama")
    return str(family)
