"""The C++ cross-entropy: losses of rows of logits, and gradients written over them."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

_I64, _PTR = ctypes.c_int64, ctypes.c_void_p


class LossArgs(ctypes.Structure):
    """Mirror of `LossArgs` in loss.cpp."""

    _fields_ = (
        *((n, _I64) for n in ("rows", "vocab", "ignore", "threads")),
        *(("logits", _PTR), ("stride", _I64), ("labels", _PTR)),
        *((n, _PTR) for n in ("losses", "lse", "weights")),
    )


def _arguments(logits: Tensor, labels: Tensor, ignore: int, lse: Tensor) -> LossArgs:
    args = LossArgs(*logits.shape, ignore, torch.get_num_threads())
    args.logits, args.stride = logits.data_ptr(), logits.stride(0)
    args.labels, args.lse = labels.data_ptr(), lse.data_ptr()
    return args


def losses(
    library: ctypes.CDLL, logits: Tensor, labels: Tensor, ignore: int
) -> tuple[Tensor, Tensor]:
    """Return -log p(label) and the log of the sum of exponentials, (rows,) each.

    logits (rows, vocab) fp32 with contiguous rows; labels (rows,) int64, contiguous.

    Raises:
        IndexError: a label outside the vocabulary.
    """
    vocab = logits.shape[1]
    wrong = ((labels < 0) | (labels >= vocab)) & (labels != ignore)
    if wrong.any():
        raise IndexError(f"label {int(labels[wrong][0])} of a vocabulary of {vocab}")
    out, lse = torch.empty(logits.shape[0]), torch.empty(logits.shape[0])
    args = _arguments(logits, labels, ignore, lse)
    args.losses = out.data_ptr()
    library.loss_forward(ctypes.byref(args))
    return out, lse


def write_gradient(
    library: ctypes.CDLL,
    logits: Tensor,
    labels: Tensor,
    ignore: int,
    lse: Tensor,
    weights: Tensor | None,
) -> None:
    """Replace the logits by weights * (softmax - onehot); weights (rows,) fp32 or None for 1."""
    args = _arguments(logits, labels, ignore, lse)
    args.weights = None if weights is None else weights.data_ptr()
    library.loss_backward(ctypes.byref(args))
    torch.autograd.graph.increment_version(logits)  # so that a second backward pass is refused
