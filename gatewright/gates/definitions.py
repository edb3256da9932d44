"""What a gate is: the one place where decay, effective length and gate scaling are defined.

A head of a gated state space model multiplies its state at token t by

    alpha_t = exp(-dt_t * exp(A_log)),   dt_t = softplus(dt_raw_t + dt_bias), clamped to dt_limit

`A_log` is the paper's lambda and `exp(A_log)` its decay rate ("On the Importance of Gating",
section 2.2 and appendix "Gate scaling").  The effective length of a head is
tau = -1 / log(alpha) = 1 / (dt * exp(A_log)), in tokens.  Scaling by s multiplies the decay
rate: A_log += log(s); s > 1 gates more strongly and forgets sooner.

Every function takes numpy arrays or torch tensors and answers with the same; none of them
imports torch.
"""

from __future__ import annotations

import math
import sys
from typing import Any, TypeVar

import numpy as np

from gatewright.errors import UserError

Array = TypeVar("Array")  # np.ndarray or torch.Tensor

A_INIT_RANGE = (1.0, 16.0)
"""Mamba-2 draws exp(A_log) uniformly from this range (the paper's appendix, Mamba-2)."""

DT_INIT_RANGE = (1e-3, 1e-1)
"""Mamba-2 draws softplus(dt_bias) log-uniformly from this range."""

UNLIMITED = (0.0, math.inf)


def _library(x: Any) -> Any:
    """Return the module whose functions apply to `x`: torch for its tensors, else numpy."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(x, torch.Tensor) else np


def check_scale(s: float) -> float:
    """Return `s` if it is a gate scale.

    Raises:
        UserError: `s` is not positive and finite.
    """
    if not (math.isfinite(s) and s > 0):
        raise UserError(f"--scale {s:g}: a gate scale is a positive, finite number")
    return float(s)


def offset_of_scale(s: float) -> float:
    """Return the additive offset log(s) that scaling the decay rate by `s` means."""
    return math.log(check_scale(s))


def scale(A_log: Array, s: float) -> Array:
    """Return A_log with its decay rate multiplied by `s`: A_log + log(s).

    Raises:
        UserError: `s` is not positive and finite.
    """
    return A_log + offset_of_scale(s)  # type: ignore


def softplus(x: Array) -> Array:
    """Return log(1 + exp(x)), accurately at both ends."""
    library = _library(x)
    return library.logaddexp(x, library.zeros_like(x))  # type: ignore[no-any-return]


def dt_from_weights(dt_bias: Array, dt_limit: tuple[float, float] = UNLIMITED) -> Array:
    """Return the step size that a zero input would give: softplus(dt_bias), clamped."""
    return softplus(dt_bias).clip(*dt_limit)  # type: ignore[attr-defined,no-any-return]


def alpha(A_log: Array, dt: Array) -> Array:
    """Return the decay per token, exp(-dt * exp(A_log)), in (0, 1)."""
    library = _library(A_log)
    with np.errstate(over="ignore"):  # a rate of inf is a decay of 0
        return library.exp(-dt * library.exp(A_log))  # type: ignore[no-any-return,operator]


def tau_from_dt(A_log: Array, dt: Array) -> Array:
    """Return the effective length tau = 1 / (dt * exp(A_log)) in tokens.

    `dt` is the measured mean step of each head: "tau from data".  It is 0 or inf where the rate
    is beyond what floats hold.
    """
    with np.errstate(over="ignore", divide="ignore"):
        return 1.0 / (dt * _library(A_log).exp(A_log))  # type: ignore[no-any-return,operator]


def tau_from_weights(
    A_log: Array, dt_bias: Array, dt_limit: tuple[float, float] = UNLIMITED
) -> Array:
    """Return the effective length in tokens with dt = softplus(dt_bias): "tau from weights".

    Args:
        A_log: (H,) for Mamba-2; any shape that broadcasts with `dt_bias` otherwise.
        dt_bias: (H,).
    """
    return tau_from_dt(A_log, dt_from_weights(dt_bias, dt_limit))


def initial_A_log(shape: tuple[int, ...], *, offset: float = 0.0, generator: Any) -> Any:
    """Draw A_log as the paper does: log U(1, 16) per head, plus one additive offset for all.

    An offset of -10 is practically no decay; +2 is very strong gating.

    Args:
        generator: `np.random.Generator` (answers a float64 array) or `torch.Generator`
            (answers a float32 tensor on the generator's device).
    """
    low, high = A_INIT_RANGE
    if isinstance(generator, np.random.Generator):
        return np.log(generator.uniform(low, high, size=shape)) + offset
    torch = sys.modules["torch"]
    uniform = torch.rand(shape, generator=generator, device=generator.device)
    return (low + (high - low) * uniform).log() + offset
