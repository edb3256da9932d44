"""One `ModelConfig` becomes a Megatron-Core model: MambaModel or GPTModel.

On CUDA with Transformer Engine the layers are its own, and the scan is mamba_ssm's; elsewhere
they are Megatron's local layers with our norms, attention and SSD kernels (which hand over to
mamba_ssm on CUDA if it is there).  Both write the same checkpoint keys.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from gatewright.errors import UserError
from gatewright.megatron import cpu
from gatewright.megatron.config import ParallelConfig
from gatewright.models import ModelConfig

GATE_PARAMETERS = ("A_log", "D", "dt_bias")
"""The per-head parameters of a Mamba-2 mixer that decide what it forgets."""


def fused() -> bool:
    """Tell whether models are built of Transformer Engine's layers."""
    return cpu.present() and importlib.util.find_spec("transformer_engine") is not None


def is_gate(name: str) -> bool:
    """Tell whether a parameter's dotted name is one of a mixer's gate parameters."""
    return name.rpartition(".")[2] in GATE_PARAMETERS and ".mixer." in f".{name}"


def transformer_config(
    model: ModelConfig,
    *,
    dtype: torch.dtype,
    parallel: ParallelConfig,
    init_std: float = 0.02,
    perform_initialization: bool = True,
) -> Any:
    """Return Megatron's TransformerConfig of `model`."""
    from megatron.core.transformer import TransformerConfig

    sizes: dict[str, Any]
    if model.family == "mamba2":
        sizes = {
            "num_attention_heads": model.n_ssm_heads,
            "mamba_num_heads": model.n_ssm_heads,
            "mamba_head_dim": model.head_dim,
            "mamba_state_dim": model.d_state,
            "mamba_num_groups": model.ngroups,
        }
    else:
        sizes = {
            "num_attention_heads": model.n_heads,
            "num_query_groups": model.n_kv_heads,
            "kv_channels": model.head_dim,
            "ffn_hidden_size": model.ffn_dim,
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "bias_activation_fusion": True,  # by Transformer Engine or by our kernel
            "apply_rope_fusion": fused(),
        }
    return TransformerConfig(
        num_layers=model.n_layers,
        hidden_size=model.d_model,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=fused(),
        cross_entropy_loss_fusion=cpu.present(),
        init_method_std=init_std,
        perform_initialization=perform_initialization,
        params_dtype=torch.float32,  # initialised in full precision; build_model lowers it
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        context_parallel_size=parallel.context,
        sequence_parallel=parallel.sequence,
        gradient_accumulation_fusion=False,
        calculate_per_token_loss=True,
        attention_softmax_in_fp32=True,
        batch_p2p_comm=cpu.present(),
        **sizes,
    )


def build_model(
    model: ModelConfig,
    *,
    dtype: torch.dtype = torch.float32,
    parallel: ParallelConfig | None = None,
    fp32_gates: bool = True,
    init_std: float = 0.02,
    init_gate_offset: float = 0.0,
    recompute: str = "none",
    meta: bool = False,
) -> nn.Module:
    """Return this process's part of a Megatron-Core model.

    Process groups must exist (`distributed.processes`).

    Args:
        model: sizes.
        dtype: precision of the weights; norms follow it, gates do not if `fp32_gates`.
        parallel: how the model is spread; must match the process groups.
        fp32_gates: keep A_log, D and dt_bias in fp32 whatever `dtype` is.
        init_gate_offset: added to every initial A_log.
        recompute: "full" recomputes each layer's activations in the backward pass.
        meta: build on the meta device, without memory (for counting).

    Raises:
        UserError: the layout cannot hold the model.
    """
    parallel = parallel or ParallelConfig()
    parallel.check(model, model.max_seq_len_tokens)
    config = transformer_config(
        model,
        dtype=dtype,
        parallel=parallel,
        init_std=init_std,
        perform_initialization=not meta,
    )
    if not cpu.present():
        from gatewright.megatron.local_layers import bind_kernels

        bind_kernels()
    with cpu.redirect(), _on_meta() if meta else contextlib.nullcontext():
        built = _mamba(model, config) if model.family == "mamba2" else _llama(model, config)
        if not meta:
            _finish_gates(built, init_gate_offset)
            _set_precision(built, dtype, fp32_gates)
            config.params_dtype = dtype
    if parallel.tensor == 1 and not cpu.present() and built.post_process:
        from gatewright.megatron.local_layers import SummedLoss

        SummedLoss(built)
    if recompute == "full":
        _recompute_layers(built)
    return built


@contextlib.contextmanager
def _on_meta() -> Iterator[None]:
    """Allocate nothing: Megatron asks for the current device, so the answer is `meta`."""
    before = torch.cuda.current_device
    torch.cuda.current_device = lambda: torch.device("meta")  # type: ignore[assignment,return-value]
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.cuda.current_device = before


def _stages() -> dict[str, bool]:
    from megatron.core import parallel_state

    return {
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
    }


def _mamba(model: ModelConfig, config: Any) -> nn.Module:
    from megatron.core.models.mamba import MambaModel

    built = MambaModel(
        config=config,
        mamba_stack_spec=_mamba_stack(model),
        vocab_size=model.vocab_size,
        max_sequence_length=model.max_seq_len_tokens,
        share_embeddings_and_output_weights=model.tie_embeddings,
        position_embedding_type="none",
        **_stages(),
    )
    for module in built.modules():  # the mixer hard-codes 1e-5
        if type(module).__name__ in ("LocalGatedRMSNorm", "ExtendedRMSNorm"):
            module.eps = model.norm_eps
    return built


def _mamba_stack(model: ModelConfig) -> Any:
    """Return the layer specification of a plain Mamba-2 stack."""
    _bind_mixer_to_our_kernels()
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    from gatewright.megatron.local_layers import LocalMambaMixer, LocalRMSNorm

    if fused():
        from megatron.core.extensions.transformer_engine import (
            TELayerNormColumnParallelLinear,
            TERowParallelLinear,
        )

        projections: dict[str, Any] = {
            "in_proj": TELayerNormColumnParallelLinear,
            "out_proj": TERowParallelLinear,
        }
        norm: dict[str, Any] = {}
    else:
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

        projections = {"in_proj": ColumnParallelLinear, "out_proj": RowParallelLinear}
        # Transformer Engine fuses the norm into in_proj; the map gives ours the same key.
        norm = {
            "norm": LocalRMSNorm,
            "sharded_state_dict_keys_map": {"norm.": "mixer.in_proj.layer_norm_"},
        }
    mixer = ModuleSpec(
        module=MambaMixer if fused() else LocalMambaMixer,
        params={"d_conv": model.d_conv, "chunk_size": model.chunk_size, "expand": model.expand},
        submodules=MambaMixerSubmodules(**projections),
    )
    layer = ModuleSpec(
        module=MambaLayer,
        submodules=MambaLayerSubmodules(mixer=mixer, mamba_bda=get_bias_dropout_add, **norm),
    )
    return ModuleSpec(module=MambaStack, submodules=MambaStackSubmodules(mamba_layer=layer))


def _bind_mixer_to_our_kernels() -> None:
    """Give Megatron's mixer, which imports mamba_ssm and norms by name, ours where they lack."""
    from megatron.core.ssm import mamba_block, mamba_mixer

    from gatewright import kernels
    from gatewright.megatron.local_layers import LocalGatedRMSNorm, LocalRMSNorm

    if not fused():
        mamba_block.TENorm = LocalRMSNorm
    if mamba_mixer.HAVE_MAMBA_SSM and cpu.present():
        return
    mamba_mixer.HAVE_MAMBA_SSM = True
    mamba_mixer.ExtendedRMSNorm = LocalGatedRMSNorm
    mamba_mixer.mamba_split_conv1d_scan_combined = kernels.mamba_split_conv1d_scan_combined
    mamba_mixer.mamba_chunk_scan_combined = kernels.mamba_chunk_scan_combined
    mamba_mixer._check_mamba_sequence_packing_support = lambda **_: (True, None)


def _llama(model: ModelConfig, config: Any) -> nn.Module:
    from megatron.core.models.gpt import GPTModel

    return GPTModel(
        config=config,
        transformer_layer_spec=_llama_layer(config),
        vocab_size=model.vocab_size,
        max_sequence_length=model.max_seq_len_tokens,
        share_embeddings_and_output_weights=model.tie_embeddings,
        position_embedding_type="rope",
        rotary_base=int(model.rope_theta),
        **_stages(),
    )


def _llama_layer(config: Any) -> Any:
    """Return the layer specification of a Llama block."""
    from megatron.core.models.gpt import gpt_layer_specs

    if fused():
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    if config.context_parallel_size > 1:  # each process would attend to its own tokens only
        raise UserError(
            f"--parallel.context {config.context_parallel_size}: a llama's attention can be split "
            "over tokens by Transformer Engine only, which is not here; leave it at 1"
        )
    from megatron.core.transformer.transformer_block import (
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )

    from gatewright.megatron.local_layers import (
        LocalCausalAttention,
        LocalRMSNorm,
        LocalSelfAttention,
    )

    layer = gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.input_layernorm = LocalRMSNorm
    layer.submodules.pre_mlp_layernorm = LocalRMSNorm
    layer.submodules.self_attention.module = LocalSelfAttention
    layer.submodules.self_attention.submodules.core_attention = LocalCausalAttention
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=LocalRMSNorm
    )


def _recompute_layers(model: nn.Module) -> None:
    """Keep only each layer's input for the backward pass, and run the layer again there.

    Megatron's own setting is read by its Transformer block but not by its Mamba stack, so
    both families are wrapped here, in the same way.
    """
    from torch.utils.checkpoint import checkpoint

    for layer in model.decoder.layers:
        layer.forward = functools.partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )


@torch.no_grad()
def _finish_gates(model: nn.Module, offset: float) -> None:
    """Shift every initial A_log by the papers' additive offset (gating paper, section 3)."""
    for name, parameter in model.named_parameters():
        if name.endswith(".A_log"):
            parameter.add_(offset)


@torch.no_grad()
def _set_precision(model: nn.Module, dtype: torch.dtype, fp32_gates: bool) -> None:
    for name, parameter in model.named_parameters():
        keep = fp32_gates and is_gate(name)
        parameter.data = parameter.data.to(torch.float32 if keep else dtype)
