"""Compares a fast kernel with its float64 reference: outputs and the gradient of every input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def relative_error(found: Tensor, truth: Tensor) -> float:
    """Return the largest error over the largest true value."""
    if not truth.numel():
        assert found.shape == truth.shape
        return 0.0
    scale = truth.abs().max().clamp_min(1e-300)
    return float((found.double() - truth).abs().max() / scale)


def outputs_and_gradients(
    f: Callable[..., Any],
    tensors: dict[str, Tensor],
    dtype: torch.dtype,
    dtypes: dict[str, torch.dtype] | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Run `f` with `tensors` in `dtype`, and backward from random weights of its outputs."""
    leaves = {
        k: v.to((dtypes or {}).get(k, dtype)).detach().clone().requires_grad_()
        for k, v in tensors.items()
    }
    out = f(**leaves, **options)
    outs = [o for o in (out if isinstance(out, tuple) else (out,)) if o is not None]
    generator = torch.Generator().manual_seed(11)
    total = torch.zeros((), dtype=torch.float64)
    for o in outs:
        w = torch.randn(o.shape, generator=generator, dtype=torch.float64)
        total = total + (o.double() * w).sum()
    found = {f"out{i}": o.detach() for i, o in enumerate(outs)}
    if total.requires_grad:
        grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        for name, g in zip(leaves, grads, strict=True):
            found[f"d{name}"] = torch.zeros_like(leaves[name]) if g is None else g
    return found


def worst(found: dict[str, Tensor], truth: dict[str, Tensor]) -> tuple[float, str]:
    """Return the largest relative error and the name of the tensor that has it."""
    assert found.keys() == truth.keys()
    return max((relative_error(found[k], truth[k]), k) for k in truth)
