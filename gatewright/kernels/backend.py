"""Which implementation runs: mamba_ssm's CUDA kernels, our C++ ones, or plain PyTorch."""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
from types import ModuleType

import torch
from torch import Tensor

from gatewright.errors import UserError
from gatewright.kernels.native import (
    attention,
    build,
    conv,
    gemm,
    loss,
    norm,
    rank_one,
    recall_cell,
    rotary,
    small_mlp,
    ssd,
    step,
)
from gatewright.kernels.native.build import BuildError

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


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    try:
        library = build.load_library()
        for name, block in (
            ("ssd", ssd.SsdArgs),
            ("conv", conv.ConvArgs),
            ("norm", norm.NormArgs),
            ("loss", loss.LossArgs),
            ("gemm", gemm.GemmArgs),
            ("attention", attention.AttentionArgs),
            ("rotary", rotary.RotaryArgs),
            ("step", step.StepArgs),
            ("state_step", step.StateStepArgs),
            ("rank_one", rank_one.RankOneArgs),
            ("recall_cell", recall_cell.RecallCellArgs),
            ("small_mlp", small_mlp.SmallMlpArgs),
        ):
            size = getattr(library, f"{name}_args_size")
            size.restype = ctypes.c_int64
            if size() != ctypes.sizeof(block):
                raise BuildError(f"{name}: C++ and Python disagree on the argument block")
    except BuildError as e:
        return None, str(e)
    return library, library._name


def native_library() -> ctypes.CDLL | None:
    """Return the C++ kernels, compiled on first use; None where PyTorch takes their place.

    Raises:
        UserError: GATEWRIGHT_KERNELS=cpp asks for them and they cannot be had.
    """
    choice = requested()
    if choice == "torch":
        return None
    library, reason = _load()
    if library is None and choice == "cpp":
        raise UserError(f"GATEWRIGHT_KERNELS=cpp, but {reason}; unset it to use plain PyTorch")
    return library


def native_for(*tensors: Tensor | None) -> ctypes.CDLL | None:
    """Return the C++ kernels if they take these tensors: on CPU, fp32, bf16 or fp16."""
    for t in tensors:
        if t is None:
            continue
        if t.device.type != "cpu" or not t.dtype.is_floating_point or t.dtype == torch.float64:
            return None
    return native_library()


def active_backend() -> str:
    """Return what the kernels run on here: "cuda", "cpp" or "torch".

    "cuda" means that tensors on a CUDA device go to mamba_ssm; CPU tensors still use one of
    the others.
    """
    if requested() != "torch" and cuda_module("mamba_ssm.ops.triton.ssd_combined") is not None:
        return "cuda"
    return "torch" if native_library() is None else "cpp"


def why() -> str:
    """Say in one line what `active_backend` chose and why."""
    backend = active_backend()
    if backend == "cuda":
        return "CUDA tensors run on mamba_ssm's kernels"
    if backend == "cpp":
        return f"C++ kernels, {_load()[1]}"
    if requested() == "torch":
        return "plain PyTorch, because GATEWRIGHT_KERNELS=torch"
    return f"plain PyTorch, because {_load()[1]}"
