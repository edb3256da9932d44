"""Mamba-2 of transformers on these kernels, bound in one place and undone cleanly.

Three methods of `transformers.models.mamba2.modeling_mamba2` are replaced while bound:

* `Mamba2Mixer.forward` runs training, prefill and cached decoding on our kernels.  Tensors on
  CUDA go to the original method, which picks mamba_ssm by itself; not packed samples where
  mamba_ssm or causal_conv1d is missing, because what it falls back to ignores `seq_idx`.
  Steps of cached decoding record no gradients.
* `Mamba2RMSNorm.forward` is the fused norm.
* `Mamba2ForCausalLM.forward` takes `seq_idx` (b, l), the number of the packed sample that
  each token belongs to: neither convolution nor state crosses from one sample to the next.
  (`Mamba2Model` takes it already; the causal model drops it on the way.)
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gatewright.kernels import backend
from gatewright.kernels.binding import Binding
from gatewright.kernels.combined import mamba_split_conv1d_scan_combined
from gatewright.kernels.conv import causal_conv1d, conv1d_step
from gatewright.kernels.linear import linear
from gatewright.kernels.native import step as native
from gatewright.kernels.norm import gated_rms_norm
from gatewright.kernels.ssd import ssd_scan
from gatewright.kernels.step import state_step

_seq_idx: contextvars.ContextVar[Tensor | None] = contextvars.ContextVar("seq_idx", default=None)
_active: Binding | None = None


def bind_transformers() -> Binding:
    """Run transformers' Mamba2 on these kernels from now on; idempotent.

    Example:
        with bind_transformers():
            loss = model(input_ids=ids, labels=labels, seq_idx=seq_idx).loss
    """
    global _active
    if _active is not None:
        return _active
    from transformers.models.mamba2 import modeling_mamba2 as m

    binding = Binding(_forget)
    binding.replace(m.Mamba2Mixer, "forward", _mixer_forward(m.Mamba2Mixer.forward))
    binding.replace(m.Mamba2RMSNorm, "forward", _norm_forward(m.Mamba2RMSNorm.forward))
    binding.replace(m.Mamba2ForCausalLM, "forward", _hold_seq_idx(m.Mamba2ForCausalLM.forward))
    binding.replace(m.Mamba2Model, "forward", _pass_seq_idx(m.Mamba2Model.forward))
    _active = binding
    return binding


def _forget() -> None:
    global _active
    _active = None


def _hold_seq_idx(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: Any, *args: Any, seq_idx: Tensor | None = None, **kwargs: Any) -> Any:
        token = _seq_idx.set(seq_idx)
        try:
            return original(self, *args, **kwargs)
        finally:
            _seq_idx.reset(token)

    return forward


def _pass_seq_idx(original: Callable[..., Any]) -> Callable[..., Any]:
    # As an argument of the blocks, not as a context, it survives gradient checkpointing.
    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        held = _seq_idx.get()
        if held is not None:
            kwargs.setdefault("seq_idx", held)
        return original(self, *args, **kwargs)

    return forward


def _norm_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        if hidden_states.is_cuda:
            return original(self, hidden_states)
        return gated_rms_norm(hidden_states, self.weight, self.variance_epsilon)

    return forward


def _mixer_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(
        self: Any,
        hidden_states: Tensor,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        seq_idx = kwargs.get("seq_idx")
        theirs = hidden_states.is_cuda and _keeps_apart_on_cuda(seq_idx)
        if theirs or self.activation not in ("silu", "swish"):
            return original(
                self, hidden_states, cache=cache, attention_mask=attention_mask, **kwargs
            )
        cache = kwargs.pop("cache_params", cache)
        if cache is None:
            return _without_cache(self, hidden_states, attention_mask, seq_idx)
        return _with_cache(self, hidden_states, cache, attention_mask, seq_idx)

    return forward


def _keeps_apart_on_cuda(seq_idx: Tensor | None) -> bool:
    """Tell whether transformers' own mixer heeds `seq_idx` on CUDA: only its kernels do."""
    needed = ("mamba_ssm.ops.triton.ssd_combined", "causal_conv1d")
    return seq_idx is None or all(backend.cuda_module(name) is not None for name in needed)


def _project(layer: Any, x: Tensor) -> Tensor:
    """Apply a projection; a plain linear layer that nobody listens to by our product."""
    hooked = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks
    if type(layer) is nn.Linear and layer.bias is None and not hooked:
        return linear(x, layer.weight)
    return layer(x)


def _masked(x: Tensor, attention_mask: Tensor | None) -> Tensor:
    return x if attention_mask is None else x * attention_mask[:, :, None].to(x.dtype)


def _without_cache(
    mixer: Any, hidden: Tensor, attention_mask: Tensor | None, seq_idx: Tensor | None
) -> Tensor:
    zxbcdt = _project(mixer.in_proj, _masked(hidden, attention_mask))
    if attention_mask is not None:
        # Padding must not enter the state, and the convolution's bias would: mask after it.
        y, _ = _scan(mixer, zxbcdt, attention_mask, seq_idx=seq_idx)
        return _project(mixer.out_proj, y.to(mixer.out_proj.weight.dtype))
    y = mamba_split_conv1d_scan_combined(
        zxbcdt,
        mixer.conv1d.weight.squeeze(1),
        mixer.conv1d.bias,
        mixer.dt_bias,
        -torch.exp(mixer.A_log.float()),
        mixer.D,
        mixer.chunk_size,
        seq_idx=seq_idx,
        dt_limit=mixer.time_step_limit,
        activation="silu",
        rmsnorm_weight=mixer.norm.weight,
        rmsnorm_eps=mixer.norm.variance_epsilon,
        headdim=mixer.head_dim,
        ngroups=mixer.n_groups,
        norm_before_gate=False,
    )
    assert isinstance(y, Tensor)
    return _project(mixer.out_proj, y)


def _split(mixer: Any, zxbcdt: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # zxBCdt: [z | x | B | C | dt]
    z, xBC, dt = zxbcdt.split([mixer.intermediate_size, mixer.conv_dim, mixer.num_heads], dim=-1)
    return z, xBC, dt


def _scan(
    mixer: Any,
    zxbcdt: Tensor,
    attention_mask: Tensor | None,
    *,
    cache: Any = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Convolution, scan and norm over whole sequences: (b, l, d_inner) and the final states."""
    l = zxbcdt.shape[1]
    z, xBC, dt = _split(mixer, zxbcdt)
    columns = xBC.transpose(1, 2)
    if cache is not None:
        columns = _remember(mixer, cache, columns, seq_idx)
    conv = causal_conv1d(
        columns, mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias, "silu", seq_idx
    )
    assert isinstance(conv, Tensor)
    xBC = _masked(conv[:, :, -l:].transpose(1, 2), attention_mask)
    gn = mixer.n_groups * mixer.ssm_state_size
    x, B, C = xBC.split([mixer.intermediate_size, gn, gn], dim=-1)
    y, final = ssd_scan(
        x.unflatten(-1, (mixer.num_heads, mixer.head_dim)),
        dt,
        -torch.exp(mixer.A_log.float()),
        B.unflatten(-1, (mixer.n_groups, mixer.ssm_state_size)),
        C.unflatten(-1, (mixer.n_groups, mixer.ssm_state_size)),
        mixer.chunk_size,
        D=mixer.D,
        dt_bias=mixer.dt_bias,
        initial_states=initial_states,
        seq_idx=seq_idx,
        dt_softplus=True,
        dt_limit=mixer.time_step_limit,
        return_final_states=True,
    )
    norm = mixer.norm
    y = gated_rms_norm(y.flatten(-2), norm.weight, norm.variance_epsilon, z, norm.group_size)
    return y, final


def _remember(mixer: Any, cache: Any, columns: Tensor, seq_idx: Tensor | None) -> Tensor:
    """Put the last inputs (b, d, l) into the cache; return what the convolution reads."""
    width = mixer.conv_kernel_size
    if seq_idx is None:
        return cache.update_conv_state(columns, mixer.layer_idx, conv_kernel_size=width)
    if cache.get_conv_state(mixer.layer_idx, state_idx=0) is not None:
        raise ValueError("seq_idx cannot continue a filled cache: packed samples start anew")
    last = (seq_idx == seq_idx[:, -1:])[:, None]  # later tokens belong to the last sample
    cache.update_conv_state(columns * last, mixer.layer_idx, conv_kernel_size=width)
    return columns


def _with_cache(
    mixer: Any,
    hidden: Tensor,
    cache: Any,
    attention_mask: Tensor | None,
    seq_idx: Tensor | None,
) -> Tensor:
    layer = mixer.layer_idx
    conv_state = cache.get_conv_state(layer, state_idx=0)
    recurrent = cache.get_recurrent_state(layer, state_idx=0)
    zxbcdt = _project(mixer.in_proj, _masked(hidden, attention_mask))
    one_token = hidden.shape[1] == 1 and conv_state is not None and recurrent is not None
    if not one_token or cache.is_recording_past(layer):
        y, final = _scan(
            mixer,
            zxbcdt,
            attention_mask,
            cache=cache,
            seq_idx=seq_idx,
            initial_states=recurrent,
        )
        cache.update_recurrent_state(final, layer_idx=layer)
        return _project(mixer.out_proj, y.to(mixer.out_proj.weight.dtype))
    library = backend.native_for(zxbcdt)
    fp32 = zxbcdt.dtype == recurrent.dtype == conv_state.dtype == torch.float32
    if library is not None and fp32 and recurrent.is_contiguous() and conv_state.is_contiguous():
        norm = mixer.norm
        y = native.mixer_step(
            library,
            zxbcdt[:, 0],
            conv_state,
            recurrent,
            mixer.conv1d.weight,
            mixer.conv1d.bias,
            mixer.dt_bias,
            mixer.A_log,
            mixer.D,
            norm.weight,
            norm.variance_epsilon,
            norm.group_size,
            mixer.n_groups,
            mixer.time_step_limit,
        )
        return mixer.out_proj(y[:, None])
    z, xBC, dt = _split(mixer, zxbcdt[:, 0])
    xBC = conv1d_step(xBC, conv_state, mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias, "silu")
    gn = mixer.n_groups * mixer.ssm_state_size
    x, B, C = xBC.split([mixer.intermediate_size, gn, gn], dim=-1)
    y = state_step(
        recurrent,
        x.unflatten(-1, (mixer.num_heads, mixer.head_dim)),
        dt,
        -torch.exp(mixer.A_log.float()),
        B.unflatten(-1, (mixer.n_groups, mixer.ssm_state_size)),
        C.unflatten(-1, (mixer.n_groups, mixer.ssm_state_size)),
        D=mixer.D,
        dt_bias=mixer.dt_bias,
        dt_softplus=True,
        dt_limit=mixer.time_step_limit,
    )
    norm = mixer.norm
    y = gated_rms_norm(y.flatten(-2), norm.weight, norm.variance_epsilon, z, norm.group_size)
    return mixer.out_proj(y[:, None].to(mixer.out_proj.weight.dtype))
