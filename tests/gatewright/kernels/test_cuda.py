"""CUDA tensors: mamba_ssm's kernels when installed, else plain PyTorch, against float64."""

import importlib.util
from typing import Any

import pytest
import torch

from gatewright.kernels import (
    active_backend,
    causal_conv1d,
    causal_conv1d_reference,
    mamba_split_conv1d_scan_combined,
    ssd_reference,
    ssd_scan,
)
from tests.gatewright.kernels.oracle import outputs_and_gradients, relative_error
from tests.gatewright.kernels.test_combined import P, mixer_inputs, mixer_reference
from tests.gatewright.kernels.test_ssd import inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
# mamba_ssm multiplies fp32 in TF32 on CUDA; plain PyTorch does not
TOLERANCE = 2e-2


@pytest.mark.parametrize("packed", [False, True])
def test_scan(packed: bool) -> None:
    t, seq_idx = inputs(b=2, l=150, h=4, p=32, n=32, extras=("D", "seq_idx") if packed else ("D",))
    options: dict[str, Any] = {"dt_softplus": True, "chunk_size": 64}
    truth = outputs_and_gradients(ssd_reference, t, torch.float64, seq_idx=seq_idx, **options)
    on_device = {k: v.cuda() for k, v in t.items()}
    seq_idx = None if seq_idx is None else seq_idx.cuda()
    leaves = {k: v.requires_grad_() for k, v in on_device.items()}
    y = ssd_scan(**leaves, seq_idx=seq_idx, **options)
    assert isinstance(y, torch.Tensor)
    assert y.is_cuda
    assert relative_error(y.detach().cpu(), truth["out0"]) < TOLERANCE
    installed = importlib.util.find_spec("mamba_ssm") is not None
    assert (active_backend() == "cuda") == installed


def test_convolution() -> None:
    torch.manual_seed(0)
    x, w, b = torch.randn(2, 32, 40), torch.randn(32, 4), torch.randn(32)
    truth = causal_conv1d_reference(x.double(), w.double(), b.double(), "silu")
    y = causal_conv1d(x.cuda(), w.cuda(), b.cuda(), "silu")
    assert isinstance(y, torch.Tensor)
    assert isinstance(truth, torch.Tensor)
    assert relative_error(y.cpu(), truth) < TOLERANCE


def test_mixer() -> None:
    t = mixer_inputs(2, 70, True, per_channel_D=False)
    truth = mixer_reference(
        **{k: v.double() for k, v in t.items()},
        ngroups=2,
        seq_idx=None,
        dt_limit=(0.0, float("inf")),
    )
    y = mamba_split_conv1d_scan_combined(
        **{k: v.cuda() for k, v in t.items()},
        chunk_size=64,
        headdim=P,
        ngroups=2,
        norm_before_gate=False,
    )
    assert isinstance(y, torch.Tensor)
    assert relative_error(y.cpu(), truth) < TOLERANCE
