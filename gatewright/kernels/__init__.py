"""Mamba-2's kernels: the SSD scan, its convolution, one-token steps and the gated RMSNorm.

Every fast operation has a slow, obvious reference beside it (`*_reference`).  On CUDA the
functions hand over to mamba_ssm and causal_conv1d when those are installed; on CPU they run
our C++ kernels, or plain PyTorch where there is no compiler or GATEWRIGHT_KERNELS=torch.
`python -m tools.doctor` says which and why.
"""

from gatewright.kernels.attention import causal_attention, causal_attention_reference
from gatewright.kernels.backend import active_backend
from gatewright.kernels.combined import (
    causal_conv1d_fn,
    causal_conv1d_update,
    mamba_chunk_scan_combined,
    mamba_split_conv1d_scan_combined,
    selective_state_update,
)
from gatewright.kernels.conv import causal_conv1d, conv1d_step
from gatewright.kernels.cross_entropy import (
    cross_entropy_reference,
    linear_cross_entropy,
    token_losses,
)
from gatewright.kernels.linear import linear, matmul
from gatewright.kernels.norm import gated_rms_norm, swiglu
from gatewright.kernels.reference import (
    causal_conv1d_reference,
    conv1d_step_reference,
    gated_rms_norm_reference,
    ssd_reference,
    state_step_reference,
)
from gatewright.kernels.rotary import rotary_qkv, rotary_reference
from gatewright.kernels.ssd import ssd_scan
from gatewright.kernels.step import state_step
from gatewright.kernels.transformers_binding import bind_transformers

__all__ = [
    "active_backend",
    "bind_transformers",
    "causal_attention",
    "causal_attention_reference",
    "causal_conv1d",
    "causal_conv1d_fn",
    "causal_conv1d_reference",
    "causal_conv1d_update",
    "conv1d_step",
    "conv1d_step_reference",
    "cross_entropy_reference",
    "gated_rms_norm",
    "gated_rms_norm_reference",
    "linear",
    "linear_cross_entropy",
    "mamba_chunk_scan_combined",
    "mamba_split_conv1d_scan_combined",
    "matmul",
    "rotary_qkv",
    "rotary_reference",
    "selective_state_update",
    "ssd_reference",
    "ssd_scan",
    "state_step",
    "state_step_reference",
    "swiglu",
    "token_losses",
]
