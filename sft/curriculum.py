"""How large the tool pools may be at each step: fixed, a ramp, or gated on measured success.

Levels double from the first size to the largest (1, 2, 4, 8, 16, 24).  A ramp gives each level
the same share of steps.  A gated curriculum goes up one level when the right tool is called
often enough at the present one; the idea is from "Anatomy of Associative Recall in Fixed-State
Recurrences", where a ramp that waited for success reached lengths that a ramp by the clock did
not.
"""

from __future__ import annotations

from sft.recipes import TrainConfig


def levels(first: int, largest: int) -> list[int]:
    """Return the pool sizes of a curriculum: doubled from `first`, ending at `largest`."""
    sizes = []
    size = min(first, largest)
    while size < largest:
        sizes.append(size)
        size *= 2
    return [*sizes, largest]


class PoolCurriculum:
    """The largest pool size in use, over the steps of a run.

    Args:
        config: names the curriculum and its settings.
        steps: optimizer steps of the whole run.
        largest: the largest pool size of the data.
    """

    def __init__(self, config: TrainConfig, steps: int, largest: int) -> None:
        self.kind = config.curriculum
        self.levels = [largest]
        if self.kind != "fixed":
            self.levels = levels(config.start_pool_size, largest)
        self.ramp_steps = max(round(config.ramp_share * steps), 1)
        self.threshold = config.gate_threshold
        self.level = 0

    def at(self, step: int) -> int:
        """Return the largest pool size at a step (from 0)."""
        if self.kind == "ramp":
            rising = len(self.levels) - 1
            self.level = min(step * rising // self.ramp_steps, rising)
        return self.levels[self.level]

    def report(self, accuracy: float) -> bool:
        """Take in the right-tool accuracy measured at the present size; say whether it rose."""
        if self.kind != "gated" or accuracy < self.threshold:
            return False
        if self.level + 1 == len(self.levels):
            return False
        self.level += 1
        return True
