"""Can a state outgrow the type that stores it once its gate hardly decays?

A head's state follows S_t = alpha_t S_{t-1} + u_t with u_t = dt_t * x_t B_t.  Over L tokens its
entries are at most max|u| * (1 - alpha^L) / (1 - alpha), which tends to max|u| * L without
decay.  max|u| is measured on a text (`calibrate`), or taken as 1 where nothing was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from gatewright.errors import UserError
from gatewright.gates import definitions
from gatewright.gates.edits import Plan
from gatewright.gates.find import Gates

if TYPE_CHECKING:
    from gatewright.gates.calibrate import Measured

LIMITS = {"float16": 65504.0, "bfloat16": 3.3895e38, "float32": 3.4028e38}
"""Largest finite value of each type."""

MAX_CONTEXT = 1 << 40

PRECISION = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
"""Half the spacing of numbers just above 1: smaller updates, relative to the state, are lost."""


def check_context(length: int) -> int:
    """Return a context length if it is one.

    Raises:
        UserError: it is not positive, or beyond what counts tokens.
    """
    if not 0 < length <= MAX_CONTEXT:
        raise UserError(
            f"--context-length {str(length)[:40]}: give a number of tokens from 1 to {MAX_CONTEXT}"
        )
    return length


def growth(alpha: np.ndarray, length: int) -> np.ndarray:
    """Return (1 - alpha^L) / (1 - alpha): how many tokens' worth of input a state can hold."""
    rate = -np.log(np.maximum(alpha, 1e-300))
    with np.errstate(divide="ignore", invalid="ignore"):
        held = np.expm1(-rate * length) / np.expm1(-rate)
    return np.where(rate < 1e-15, float(length), held)


def stored_type(config: Mapping[str, object]) -> str:
    """Return the type in which the model (and so its cached state) is stored."""
    named = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return named.removeprefix("torch.") if named.removeprefix("torch.") in LIMITS else "float32"


def warnings(plan: Plan, gates: Gates, context_length: int, measured: Measured | None) -> list[str]:
    """Return what may go wrong with the states of edited heads over a context length.

    Raises:
        UserError: the context length is none.
    """
    check_context(context_length)
    kind = stored_type(gates.checkpoint.config)
    overflowing, stuck, heads = 0, 0, 0
    worst = 0.0
    for gate in gates.gates:
        offset = plan.offsets[gate.layer]
        values = gate.values(gates.checkpoint) + offset[:, None]
        dt = gate.dt(gates.checkpoint, gates.dt_limit)
        update = np.ones(gate.n_heads)
        if measured is not None and gate.layer in measured.dt:
            dt = measured.dt[gate.layer].reshape(gate.n_heads, -1)
            update = measured.update.get(gate.layer, update)
        held = growth(definitions.alpha(values, dt), context_length).max(axis=1)
        state = held * update
        worst = max(worst, float(state.max()))
        heads += gate.n_heads
        overflowing += int((state > LIMITS[kind]).sum())
        stuck += int((held * PRECISION[kind] > 1).sum())
    basis = "measured updates" if measured is not None and measured.update else "updates of size 1"
    found = []
    if overflowing:
        found.append(
            f"{overflowing} of {heads} heads can reach states of {worst:.3g} within "
            f"{context_length} tokens ({basis}), more than {kind} holds ({LIMITS[kind]:.3g})"
        )
    if stuck:
        found.append(
            f"{stuck} of {heads} heads keep so many of {context_length} tokens that {kind} rounds "
            "a new one away; keep the state in fp32"
        )
    return found
