"""Cross-entropy over a vocabulary without keeping the logits.

`linear_cross_entropy` takes the hidden states and the output layer's weight: a few hundred
rows of logits exist at a time, and become their own gradient in place.  Logits, log-softmax
and their gradients, which otherwise are the largest tensors of a small model's training step,
never exist as a whole.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from gatewright.kernels import backend
from gatewright.kernels.linear import matmul
from gatewright.kernels.native import loss as native

_BYTES_AT_ONCE = 16 << 20  # of logits: stays in a server CPU's last-level cache
IGNORE = -100


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weights: Tensor | None = None,
    ignore_index: int = IGNORE,
) -> Tensor:
    """Return sum_i w_i * -log softmax(hidden_i weight^T)[labels_i], a scalar in nats.

    The gradients are computed together with the loss, as they only depend on its factor.

    Args:
        hidden: (t, d), in the order of `labels` (already shifted).
        weight: (v, d), the output layer's.
        labels: (t,) int64; rows with `ignore_index` count nothing.
        token_weights: (t,) w_i, without a gradient; 1 when None.

    Raises:
        ValueError: shapes that do not fit together, or labels of another type.
        IndexError: a label outside the vocabulary (on CPU).
    """
    t, d = hidden.shape
    if weight.shape[1] != d or labels.shape != (t,):
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and labels "
            f"{tuple(labels.shape)} do not fit together"
        )
    if token_weights is not None and token_weights.shape != (t,):
        raise ValueError(f"token_weights {tuple(token_weights.shape)} are not one per token of {t}")
    _require_int64(labels)
    if not torch.is_grad_enabled():  # a Function is told that leaves need gradients even then
        hidden, weight = hidden.detach(), weight.detach()
    return _LinearCrossEntropy.apply(hidden, weight, labels, token_weights, ignore_index)


def token_losses(logits: Tensor, labels: Tensor, ignore_index: int = IGNORE) -> Tensor:
    """Return -log softmax(logits_i)[labels_i] per token, fp32, shape of `labels`.

    The logits (..., v) are overwritten by their gradient in the backward pass, so nothing else
    may use them; that saves three passes over the largest tensor there is.
    """
    _require_int64(labels)
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)} do not fit together"
        )
    rows = logits.reshape(-1, logits.shape[-1])
    return _TokenLosses.apply(rows, labels.reshape(-1), ignore_index).view(labels.shape)


def _require_int64(labels: Tensor) -> None:
    if labels.dtype != torch.int64:
        raise ValueError(f"labels are {labels.dtype}, not torch.int64")


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        token_weights: Tensor | None,
        ignore: int,
    ) -> Tensor:
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        labels = labels.contiguous()
        factors = None if token_weights is None else token_weights.detach().float().contiguous()
        dhidden = torch.empty_like(hidden) if need_hidden else None
        dweight = torch.empty_like(weight) if need_weight else None
        if dweight is not None and not len(hidden):
            dweight.zero_()
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        step = max(16, _BYTES_AT_ONCE // (4 * weight.shape[0]))
        for start in range(0, hidden.shape[0], step):
            part = slice(start, start + step)
            logits = matmul(hidden[part], weight.t()).float()
            some = None if factors is None else factors[part]
            losses, lse = _losses(logits, labels[part], ignore)
            total += (losses if some is None else losses * some).sum(dtype=torch.float64)
            if not (need_hidden or need_weight):
                continue
            _write_gradient(logits, labels[part], ignore, lse, some)
            gradient = logits.to(hidden.dtype)
            if dhidden is not None:
                matmul(gradient, weight, out=dhidden[part])
            if dweight is not None:
                matmul(gradient.t(), hidden[part], out=dweight, add=start > 0)
        ctx.save_for_backward(dhidden, dweight)
        return total.float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        gradients = ctx.saved_tensors
        if grads[0].is_cuda or grads[0] != 1:  # a factor of 1 is common, and these are large
            gradients = [None if t is None else t * grads[0].to(t.dtype) for t in gradients]
        return *gradients, None, None, None


class _TokenLosses(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignore: int) -> Tensor:  # type: ignore[override]
        labels = labels.contiguous()
        rows = logits.float()  # the same memory for fp32
        losses, lse = _losses(rows, labels, ignore)
        ctx.save_for_backward(logits, labels, lse)
        ctx.ignore = ignore
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        logits, labels, lse = ctx.saved_tensors
        rows = logits.detach().float()
        _write_gradient(rows, labels, ctx.ignore, lse, grads[0].float().contiguous())
        return rows.to(logits.dtype), None, None


def _losses(logits: Tensor, labels: Tensor, ignore: int) -> tuple[Tensor, Tensor]:
    library = backend.native_for(logits)
    if library is not None and logits.stride(-1) == 1:
        return native.losses(library, logits, labels, ignore)
    lse = torch.logsumexp(logits, dim=-1)
    kept = labels != ignore
    picked = logits.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    return torch.where(kept, lse - picked, lse.new_zeros(())), lse


def _write_gradient(
    logits: Tensor, labels: Tensor, ignore: int, lse: Tensor, weights: Tensor | None
) -> None:
    library = backend.native_for(logits)
    if library is not None and logits.stride(-1) == 1:
        native.write_gradient(library, logits, labels, ignore, lse, weights)
        return
    factor = (labels != ignore).to(logits.dtype)
    if weights is not None:
        factor = factor * weights
    logits.sub_(lse[:, None]).exp_()
    logits.scatter_add_(1, labels.clamp(min=0)[:, None], logits.new_full((len(labels), 1), -1.0))
    logits.mul_(factor[:, None])


def cross_entropy_reference(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weights: Tensor | None = None,
    ignore_index: int = IGNORE,
) -> Tensor:
    """The same sum by torch's own cross-entropy over all logits."""
    losses = F.cross_entropy(
        hidden @ weight.t(), labels, reduction="none", ignore_index=ignore_index
    )
    return (losses if token_weights is None else losses * token_weights).sum()
