"""The four panels' settings, the paper's unless said otherwise.

Appendix "Theoretical validation experiments": SGD, batch 128, learning rate 0.1 (0.3 in b).
The paper leaves the sweeps' values and seeds open; eps = 1/2 and P = infinity in c and d.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from synthetic.theory import short_context

BATCH = 128
NOISE = 0.1
POINTS = 32
TASK_A = short_context.Task(dim=512, points=POINTS, length=8, distance=4, noise=NOISE)
TASK_B = short_context.Task(dim=512, points=POINTS, length=4, distance=1, noise=NOISE)
LONG_DIM = 128
LENGTH_C, LENGTH_D = 1024, 512
# Of alpha0.  In b the flows must escape by their horizon (a frozen gate takes 1 / alpha0^2), and
# memorisation must lead at first (below proposition 1's root, 0.188).
ALPHA0_RANGE = {"a": (1e-12, 1.0), "b": (1e-5, 0.18)}
MOST_SEEDS = 100_000
LR = {"a": 0.1, "b": 0.3, "c": 0.1, "d": 0.1}
GATES = ("trained", "frozen")
# An escape time's fit depends on its range, so both of these are always stated.
FIT_RANGES = ((1.5e-4, 0.05), (5e-4, 0.05))
# At this error the boundary is tau/2 log(d/tau) with no further constant (c_delta = sqrt 2
# cancels S_2 = tau/2), so that a one-parameter fit tests the law and its slope, 1/2.
CONTOUR_ERROR = 0.0786


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a panel varies: its sweep values, seeds, steps and evaluation size."""

    values: tuple[float, ...]
    seeds: int
    steps: int
    eval_examples: int = 0

    def __post_init__(self) -> None:
        if not self.values or self.seeds < 1 or self.steps < 1:
            raise ValueError("a panel needs at least one value, one seed and one step")


DEFAULTS = {
    "a": Settings(tuple(float(x) for x in np.round(np.geomspace(0.02, 0.8, 25), 5)), 40, 25),
    "b": Settings(
        (1.5e-4, 2.9e-4, 5e-4, 1.04e-3, 2e-3, 3.8e-3, 7e-3, 0.013, 0.025, 0.05), 5, 20_000
    ),
    "c": Settings((1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1e3, 1e4, 1e5), 5, 10_000, 100_000),
    "d": Settings((2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0), 1, 10_000, 100_000),
}
DISTANCES_D = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def both_gates(
    values: Sequence[float],
) -> tuple[torch.Tensor, torch.Tensor, list[tuple[float, str]]]:
    """Return values and train flags of every (value, gate) pair, and the pairs."""
    pairs = [(v, gate) for gate in GATES for v in values]
    flags = torch.tensor([gate == "trained" for _, gate in pairs])
    return torch.tensor([v for v, _ in pairs], dtype=torch.float64), flags, pairs
