"""Layers of the local (no Transformer Engine) models: norms, mixer, causal attention, loss."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import TransformerConfig, mlp
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from gatewright import kernels
from gatewright.kernels.binding import Binding

_active: Binding | None = None


def bind_kernels() -> Binding:
    """Let Megatron's linear layers and its SwiGLU use our kernels from now on; idempotent.

    Products of linear layers are most of a small model's training step; those whose inputs or
    gradients travel between processes stay Megatron's.  The binding's `undo()` gives Megatron
    its own functions back.
    """
    global _active
    if _active is not None:
        return _active
    theirs = layers.linear_with_grad_accumulation_and_async_allreduce

    @functools.wraps(theirs)
    def linear(input: Tensor, weight: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
        sends = options["allreduce_dgrad"] or options["sequence_parallel"]
        deferred = options.get("grad_output_buffer") is not None
        if sends or deferred or bias is not None or options["gradient_accumulation_fusion"]:
            return theirs(input=input, weight=weight, bias=bias, **options)
        return kernels.linear(input, weight)

    _active = Binding(_forget)
    _active.replace(mlp, "bias_swiglu_impl", _swiglu)
    _active.replace(layers, "linear_with_grad_accumulation_and_async_allreduce", linear)
    return _active


def _forget() -> None:
    global _active
    _active = None


def _swiglu(joint: Tensor, bias: Tensor | None, *_: Any) -> Tensor:
    assert bias is None
    return kernels.swiglu(joint)


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


class SummedLoss:
    """Joins a model's output layer with its loss, where one process holds the whole vocabulary.

    Given labels, the model then answers with the sum of all tokens' cross-entropies, and no
    more than a few hundred rows of logits exist at a time.  Without labels it answers with
    logits as before.
    """

    def __init__(self, model: nn.Module) -> None:
        tied = model.share_embeddings_and_output_weights
        self._weight = (
            model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
        )
        self._logits = model.output_layer.forward
        self._wanted = False
        model.output_layer.forward = self._hidden_or_logits
        model.compute_language_model_loss = self._loss
        model.register_forward_pre_hook(self._look_for_labels, with_kwargs=True)

    def _look_for_labels(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._wanted = kwargs.get("labels") is not None

    def _hidden_or_logits(self, hidden_SBD: Tensor, **options: Any) -> tuple[Tensor, None]:
        if self._wanted and hidden_SBD.dtype == torch.float32:
            return hidden_SBD, None
        return self._logits(hidden_SBD, **options)

    def _loss(self, labels_BS: Tensor, last_SB: Tensor) -> Tensor:
        labels, rows = labels_BS.t().flatten(), last_SB.flatten(0, 1)
        if rows.dtype == torch.float32:
            return kernels.linear_cross_entropy(rows, self._weight, labels)
        # The pieces' weight gradients would add up in bf16: whole logits round only once.
        return kernels.token_losses(rows, labels).sum()


class LocalMambaMixer(MambaMixer):
    """Megatron's mixer, with its training pass between the projections as one function.

    Megatron copies the input projection to (B, S, ...) and back, and normalises in a pass of
    its own; our kernels read (S, B, ...) as it lies and gate and normalise at once.
    """

    def _ssm_training(self, zxBCdt: Tensor, packed_seq_params: Any = None) -> Tensor:
        if self.cp.cp_size > 1:  # heads have to come back to this process's tokens before the norm
            return super()._ssm_training(zxBCdt, packed_seq_params)
        for module in (self.conv1d, self.norm):  # used without being called:
            for hook in module._forward_pre_hooks.values():  # wait for overlapped parameters
                hook(module, ())
        seq_idx = None
        if packed_seq_params is not None:
            seq_idx = self._create_packed_seq_idx(packed_seq_params, zxBCdt.shape[0])
        y_BSE = kernels.mamba_split_conv1d_scan_combined(
            zxBCdt.transpose(0, 1),
            self.conv1d.weight.squeeze(1),
            self.conv1d.bias,
            self.dt_bias.float(),
            -torch.exp(self.A_log.float()),
            self.D.float(),
            self.chunk_size,
            seq_idx=seq_idx,
            activation=self.activation,
            rmsnorm_weight=self.norm.weight,
            rmsnorm_eps=self.norm.eps,
            headdim=self.headdim,
            ngroups=self.ngroups_local_tp,
            norm_before_gate=False,
        )
        assert isinstance(y_BSE, Tensor)
        return y_BSE.transpose(0, 1)


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


class LocalSelfAttention(SelfAttention):
    """Megatron's self-attention for training, with one pass from projection to attention.

    Megatron splits, rotates and lays out queries and keys in a dozen passes over memory.
    """

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        assert attention_mask is None
        assert rotary_pos_emb is not None
        mixed_SBF, _ = self.linear_qkv(hidden_states)
        angles_SR = rotary_pos_emb[:, 0, 0, : rotary_pos_emb.size(-1) // 2]  # [angles | angles]
        ends = None
        if packed_seq_params is not None:
            ends = packed_seq_params.cu_seqlens_q.tolist()
            angles_SR = torch.cat([angles_SR[: b - a] for a, b in itertools.pairwise(ends)])
        q_BHSP, k_BHSP, v_BHSP = kernels.rotary_qkv(
            mixed_SBF,
            angles_SR[: mixed_SBF.size(0)].cos(),
            angles_SR[: mixed_SBF.size(0)].sin(),
            self.num_query_groups_per_partition,
        )
        output_SBE = self.core_attention(q_BHSP, k_BHSP, v_BHSP, ends)
        output, bias = self.linear_proj(output_SBE)
        return output, bias


class LocalCausalAttention(MegatronModule):
    """Causal attention through our kernel; packed documents attend to themselves.

    Megatron's own local attention materialises all scores and refuses packed input.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any):
        super().__init__(config=config)
        self.softmax_scale = softmax_scale

    def forward(
        self, q_BHSP: Tensor, k_BGSP: Tensor, v_BGSP: Tensor, ends: list[int] | None = None
    ) -> Tensor:
        """Return the attended values (S, B, H * P).

        Args:
            ends: where packed documents begin and end: 0, ..., S.
        """
        if ends is None:
            output_BHSP = kernels.causal_attention(q_BHSP, k_BGSP, v_BGSP, self.softmax_scale)
        else:
            parts = [
                kernels.causal_attention(
                    q_BHSP[:, :, a:b], k_BGSP[:, :, a:b], v_BGSP[:, :, a:b], self.softmax_scale
                )
                for a, b in itertools.pairwise(ends)
            ]
            output_BHSP = torch.cat(parts, dim=2)
        return output_BHSP.permute(2, 0, 1, 3).flatten(2)
