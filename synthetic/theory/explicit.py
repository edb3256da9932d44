"""The simplified SSM exactly as section 2.2 writes it: the slow reference for the tests."""

from __future__ import annotations

import torch
from torch import Tensor


def hidden_state(x: Tensor, y: Tensor, x_q: Tensor, lam: Tensor) -> Tensor:
    """Return `h = x~_q + sum_t exp(-e^lam (l - t + 1)) (x~_q . x~_t) x~_t`.

    Args:
        x: context vectors (batch, l, d), oldest first.
        y: context labels +-1 (batch, l).
        x_q: query vectors (batch, d); the query's label coordinate is 0.
        lam: log decay rate, a scalar.

    Returns:
        (batch, d + 1): the token part and, last, the label coordinate.
    """
    length = x.shape[1]
    h = torch.cat([x_q, torch.zeros_like(x_q[:, :1])], dim=1)
    query = h
    for t in range(1, length + 1):
        token = torch.cat([x[:, t - 1], y[:, t - 1, None]], dim=1)
        decay = torch.exp(-torch.exp(lam) * (length - t + 1))
        h = h + decay * (query * token).sum(1, keepdim=True) * token
    return h


def output(w: Tensor, v: Tensor, lam: Tensor, x: Tensor, y: Tensor, x_q: Tensor) -> Tensor:
    """Return `f = (w, v) . h` (batch,), for readout `w` (d,), label weight `v` and decay `lam`."""
    h = hidden_state(x, y, x_q, lam)
    return h[:, :-1] @ w + h[:, -1] * v


def logistic_loss(f: Tensor, target: Tensor) -> Tensor:
    """Return the mean of `log(1 + exp(-target f))`."""
    return torch.nn.functional.softplus(-target * f).mean()
