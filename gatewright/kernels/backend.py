"""Which implementation runs: mamba_ssm's CUDA kernels, our C++ ones, or plain PyTorch."""

from __future__ import annotations

import functools
import importlib
import os
from types import ModuleType

import torch

from gatewright.errors import UserError

CHOICES = ("auto", "cpp", "torch")


def requested() -> str:
    """Return the value of GATEWRIGHT_KERNELS: auto (default), cpp or torch.

    Raises:
        UserError: it holds anything else.
    """
    choice = os.environ.get("GATEWRIGHT_KERNELS", "auto").strip().lower() or "auto"
    if choice not in CHOICES:
        raise UserError(f"GATEWRIGHT_KERNELS={choice}: choose one of {', '.join(CHOICES)}")
    return choice


@functools.cache
def cuda_module(name: str) -> ModuleType | None:
    """Return an optional CUDA kernel module (of mamba_ssm or causal_conv1d), None if absent."""
    if not torch.cuda.is_available():
        return None
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def active_backend() -> str:
    """Return what the kernels run on here: "cuda", "cpp" or "torch".

    "cuda" means that tensors on a CUDA device go to mamba_ssm; CPU tensors still use one of
    the others.
    """
    if requested() != "torch" and cuda_module("mamba_ssm.ops.triton.ssd_combined") is not None:
        return "cuda"
    return "torch"
