"""Layers of the local (no Transformer Engine) models: norms and causal attention."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from gatewright import kernels


class LocalRMSNorm(nn.RMSNorm):
    """RMSNorm that works with sequence parallelism, which Megatron's torch norm refuses.

    Its gradient must be summed over tensor-parallel processes when each sees only a part
    of the sequence; the mark on the weight tells Megatron to do so.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__(
            hidden_size, eps=eps, device=torch.cuda.current_device(), dtype=config.params_dtype
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return kernels.gated_rms_norm(x, self.weight, self.eps)


def token_losses(labels_BS: Tensor, logits_SBV: Tensor) -> Tensor:
    """Return each token's cross-entropy, (B, S), when one process holds the whole vocabulary.

    Torch's fused softmax passes over the logits half as often as Megatron's, which is made
    for a vocabulary that is split.
    """
    losses = F.cross_entropy(
        logits_SBV.flatten(0, 1).float(), labels_BS.t().flatten(), reduction="none"
    )
    return losses.view(logits_SBV.shape[:2]).t().contiguous()


class LocalGatedRMSNorm(nn.Module):
    """The norm inside a Mamba-2 mixer, per group of channels, without mamba_ssm's Triton.

    Takes the constructor arguments of mamba_ssm's `RMSNormGated`, which Megatron's mixer
    passes.  In training the mixer gates by silu(z) inside the scan and calls this without z.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.eps = eps
        self.group_size = group_size
        self.norm_before_gate = norm_before_gate

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        return kernels.gated_rms_norm(
            x,
            self.weight,
            self.eps,
            z=z,
            group_size=self.group_size,
            norm_before_gate=self.norm_before_gate,
        )

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the weight as a checkpoint shard: channels are split over tensor parallel."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"]
            if metadata
            else parallel_state.get_data_parallel_group(with_context_parallel=True),
        )


class LocalCausalAttention(MegatronModule):
    """Causal attention through torch's fused kernel; packed documents attend to themselves.

    Megatron's own local attention materialises all scores and refuses packed input.

    Shapes: query (S, B, Hq, P), key and value (S, B, Hkv, P) -> (S, B, Hq * P); packed
    ("thd"): (T, Hq, P), (T, Hkv, P) -> (T, Hq * P).
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any):
        super().__init__(config=config)
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        assert attention_bias is None
        assert attention_mask is None
        if packed_seq_params is None:
            q_BHSP, k_BHSP, v_BHSP = (t.permute(1, 2, 0, 3) for t in (query, key, value))
            return self._attend(q_BHSP, k_BHSP, v_BHSP).permute(2, 0, 1, 3).flatten(2)
        ends = packed_seq_params.cu_seqlens_q.tolist()
        parts = [
            self._attend(*(t[a:b].transpose(0, 1)[None] for t in (query, key, value)))[0]
            for a, b in itertools.pairwise(ends)
        ]
        return torch.cat(parts, dim=1).transpose(0, 1).flatten(1)

    def _attend(self, q_BHSP: Tensor, k_BHSP: Tensor, v_BHSP: Tensor) -> Tensor:
        grouped = q_BHSP.size(1) != k_BHSP.size(1)
        return F.scaled_dot_product_attention(
            q_BHSP, k_BHSP, v_BHSP, is_causal=True, scale=self.softmax_scale, enable_gqa=grouped
        )
