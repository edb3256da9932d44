"""Distance curricula: how far the table may stand from the query while training.

| name | the cap on the gap |
|---|---|
| `none` | none: always the full gap (the naive training that hits the wall) |
| `uniform` | gaps uniform up to the full one from the first step |
| `ramp` | the cap grows linearly with time and is full at 80% of the steps |
| `gated` | the cap grows by 1/40 whenever 25 steps' mean training accuracy is at least 0.6 |

A gated cap belongs to one member: seeds that train together open their own gates.
"""

from __future__ import annotations

from typing import Literal

Name = Literal["none", "uniform", "ramp", "gated"]
RAMP_END, GATE_ACCURACY, GATE_WINDOW, GATE_STEP = 0.8, 0.6, 25, 1 / 40


class Curriculum:
    """The cap of each member over a run.

    Args:
        full: the full gap in tokens.
        steps: training steps of the run.
        members: how many runs train together.
    """

    def __init__(self, name: Name, full: int, steps: int, members: int) -> None:
        self.name, self.full, self.steps = name, full, steps
        self._share = [GATE_STEP] * members
        self._window: list[list[float]] = [[] for _ in range(members)]

    def cap(self, step: int, member: int) -> int | None:
        """Return the largest gap at a step; None: always exactly the full gap."""
        if self.name == "none":
            return None
        if self.name == "uniform":
            return self.full
        if self.name == "ramp":
            return round(self.full * min(1.0, step / (RAMP_END * self.steps)))
        return round(self.full * self._share[member])

    def observe(self, accuracies: list[float]) -> None:
        """Tell the gate each member's accuracy on the step's training batch."""
        if self.name != "gated":
            return
        for member, accuracy in enumerate(accuracies):
            window = self._window[member]
            window.append(accuracy)
            if len(window) == GATE_WINDOW:
                if sum(window) / GATE_WINDOW >= GATE_ACCURACY:
                    self._share[member] = min(1.0, self._share[member] + GATE_STEP)
                window.clear()

    def opened(self, member: int) -> float:
        """Return the share of the full gap that a gated member has reached."""
        return self._share[member] if self.name == "gated" else 1.0
