"""What a gate is, where a checkpoint keeps its gates, and how to scale them.

The definitions (decay, effective length, scaling, initialisation) are importable from here and
work on numpy arrays and torch tensors; nothing here imports torch.
"""

from gatewright.gates.definitions import (
    A_INIT_RANGE,
    DT_INIT_RANGE,
    UNLIMITED,
    alpha,
    dt_from_weights,
    initial_A_log,
    offset_of_scale,
    scale,
    softplus,
    tau_from_dt,
    tau_from_weights,
)
from gatewright.gates.find import find_gates

__all__ = [
    "A_INIT_RANGE",
    "DT_INIT_RANGE",
    "UNLIMITED",
    "alpha",
    "dt_from_weights",
    "find_gates",
    "initial_A_log",
    "offset_of_scale",
    "scale",
    "softplus",
    "tau_from_dt",
    "tau_from_weights",
]
