"""Noticing a loss that is not finite or jumps, and writing down which documents it saw."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

FILE = "unhealthy.jsonl"
_MEMORY_STEPS = 100
_SETTLED_STEPS = 20
_LASTING_STEPS = 10  # spikes in a row that are no spike but a new level


@dataclasses.dataclass(frozen=True)
class Trouble:
    """What was wrong with one step."""

    kind: Literal["not_finite", "spike"]
    reproduced: bool
    """The same batch gave the same result again: data or model, not the hardware."""


class LossHealth:
    """Judges each step's loss by the steps before it.

    Args:
        spike_factor: losses above this multiple of the running mean (over about 100 steps)
            are spikes; 0 only looks for values that are not finite.  After 10 spikes in a row
            the mean starts anew: a jump that lasts would else be reported, and its step run
            twice, until the run ends.
    """

    def __init__(self, spike_factor: float) -> None:
        self._factor = spike_factor
        self._mean = 0.0
        self._steps = 0
        self._spikes_in_a_row = 0

    def judge(self, loss: float, grad_norm: float) -> Literal["not_finite", "spike"] | None:
        """Return what is wrong with a step; a healthy loss joins the running mean."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return "not_finite"
        settled = self._steps >= _SETTLED_STEPS
        if self._factor and settled and loss > self._factor * self._mean:
            self._spikes_in_a_row += 1
            if self._spikes_in_a_row == _LASTING_STEPS:
                self._steps = self._spikes_in_a_row = 0
            return "spike"
        self._spikes_in_a_row = 0
        self._steps += 1
        weight = 1 / min(self._steps, _MEMORY_STEPS)
        self._mean += weight * (loss - self._mean)
        return None

    def replay(self, rows: Iterable[Mapping[str, Any]], until_step: int) -> None:
        """Judge the losses that a run wrote down, each for the steps since the one before.

        Args:
            rows: lines of metrics.jsonl, in order.
            until_step: the last step that counts.
        """
        done = 0
        for row in rows:
            if row["step"] > until_step:
                return
            for _ in range(row["step"] - done):
                if self.judge(row["loss"], row["grad_norm"]) is not None:
                    break  # of one step, not of all those that were not written down
            done = row["step"]


def record(
    out: Path,
    *,
    step: int,
    loss: float,
    grad_norm: float,
    trouble: Trouble,
    documents: list[dict[str, Any]],
) -> None:
    """Append a line to `unhealthy.jsonl`: the step, what was wrong, and its documents."""
    row = {
        "step": step,
        "time": round(time.time(), 3),
        "kind": trouble.kind,
        "loss": repr(loss),  # JSON has no nan
        "grad_norm": repr(grad_norm),
        "reproduced": trouble.reproduced,
        "documents": documents,
    }
    with open(Path(out) / FILE, "a", encoding="utf-8") as f:
        f.write(json.dumps(row) + "\n")
