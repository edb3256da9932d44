"""Training and measuring one arm: a cell on a task, its seeds together.

Defaults are the small ones (learning rate 3e-3, batch 128): with the authors' (1e-3, batch
256, 2,000 + 125 K steps) the same cells need several times the work.  A run measures
accuracy, the rebinding score and the floors, and marks what bound nothing.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from synthetic import ensemble
from synthetic.ensemble import Parameters
from synthetic.recall import cells, curriculum, model, tasks
from synthetic.recall.tasks import Batch, Task
from synthetic.sweep import Row

LOSS_SCALE = 2.0  # the authors' loss is twice the cross-entropy of the masked answer


@dataclasses.dataclass(frozen=True)
class Arm:
    """One setting of the factorial; seeds are its replicates.

    Attributes:
        steps, batch, lr: training sequences and peak learning rate (cosine to a tenth).
    """

    task: Task
    cell: cells.Cell
    layers: int = 1
    bidirectional: bool = True
    curriculum: curriculum.Name = "none"
    steps: int = 2000
    batch: int = 128
    lr: float = 3e-3

    @property
    def size(self) -> model.Size:
        return model.Size(
            self.cell, self.task.vocab, self.task.tokens, self.layers, self.bidirectional
        )

    def settings(self) -> Row:
        """Return the arm as flat fields of a result row."""
        t = self.task
        row: Row = {
            "task": t.name,
            "cell": self.cell.name,
            "conv": self.cell.conv,
            "width": self.cell.width,
            "layers": self.layers,
            "bidirectional": self.bidirectional,
            "curriculum": self.curriculum,
            "steps": self.steps,
            "batch": self.batch,
            "lr": self.lr,
        }
        if t.name == "mqar":
            row |= {"pairs": t.pairs, "layout": t.layout}
        else:
            row |= {"length": t.length}
        if t.name in ("haystack", "collision"):
            row |= {"dense": t.dense}
        return row


def _stack(batches: list[Batch]) -> Batch:
    return Batch(
        torch.stack([b.tokens for b in batches]),
        torch.stack([b.positions for b in batches]),
        torch.stack([b.answers for b in batches]),
    )


def _scored(p: Parameters, arm: Arm, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return each member's loss and training accuracy (E,) on its batch."""
    out = model.logits(p, arm.size, batch.tokens, batch.positions)
    loss = torch.nn.functional.cross_entropy(
        out.flatten(0, -2), batch.answers.flatten(), reduction="none"
    )
    hits = (out.detach().argmax(-1) == batch.answers).float()
    return LOSS_SCALE * loss.view(len(out), -1).mean(1), hits.flatten(1).mean(1)


def train(arm: Arm, seeds: list[int], desc: str) -> tuple[Parameters, list[float]]:
    """Train all seeds of an arm; return parameters and the share of the gap each gate opened."""
    p = model.initial(arm.size, seeds)
    streams = ensemble.generators(seeds, stream=1)
    full = arm.task.max_gap if arm.task.name in ("haystack", "collision") else 0
    course = curriculum.Curriculum(arm.curriculum, full, arm.steps, len(seeds))

    def losses(step: int) -> Tensor:
        batch = _stack(
            [
                tasks.sample(arm.task, arm.batch, g, cap=course.cap(step, m))
                for m, g in enumerate(streams)
            ]
        )
        loss, accuracy = _scored(p, arm, batch)
        course.observe(accuracy.tolist())
        return loss

    optimizer = ensemble.AdamW(
        lr=arm.lr, weight_decay=0.01, clip_norm=1.0, no_decay=("A_log", "dt_bias", "skip")
    )
    ensemble.train(p, losses, optimizer, ensemble.Schedule(arm.steps, floor=0.1), desc=desc)
    return p, [course.opened(m) for m in range(len(seeds))]


@torch.no_grad()
def measure(
    p: Parameters, arm: Arm, sequences: int, *, rebind: bool = False, by_query: bool = False
) -> list[float] | Tensor:
    """Return each member's accuracy over the same fresh sequences, at the full gap.

    Haystack and collision are measured with one query whatever they were trained with.

    Args:
        rebind: with deranged bindings and the original values as answers.
        by_query: return (E, Q) accuracies instead (S5: one per prefix depth).
    """
    task = arm.task
    if task.name in ("haystack", "collision"):
        task = dataclasses.replace(task, dense=1)
    g = ensemble.generators([0], stream=3 if rebind else 2)[0]
    members = len(p["embedding"])
    right = torch.zeros(members, 1 if task.name in ("haystack", "collision") else task.queries)
    chunk, total = 256, 0
    for _ in range(math.ceil(sequences / chunk)):
        one = tasks.sample(task, chunk, g, rebind=rebind)
        batch = _stack([one] * members)
        out = model.logits(p, arm.size, batch.tokens, batch.positions)
        right += (out.argmax(-1) == batch.answers).sum(1)
        total += chunk
    by = right / total
    return by if by_query else by.mean(1).tolist()


def nothing_bound(accuracy: float, rebinding: float, sequences: int) -> bool:
    """Return whether a rebinding score is as good as the accuracy, within two standard errors.

    Such a run answers the same with the bindings deranged: whatever it scores, it does not
    score by reading them.
    """
    spread = math.sqrt(
        (accuracy * (1 - accuracy) + rebinding * (1 - rebinding)) / max(1, sequences)
    )
    return accuracy - rebinding <= 2 * spread


def run(arm: Arm, seeds: list[int], sequences: int, desc: str) -> list[Row]:
    """Train and measure an arm; return a row per seed."""
    p, opened = train(arm, seeds, desc)
    accuracy = measure(p, arm, sequences)
    assert isinstance(accuracy, list)
    floor = tasks.floors(arm.task)["floor"]
    rows = []
    rebinding = None if arm.task.name == "s5" else measure(p, arm, sequences, rebind=True)
    depths = measure(p, arm, sequences, by_query=True) if arm.task.name == "s5" else None
    for m, seed in enumerate(seeds):
        row: Row = {
            **arm.settings(),
            "seed": seed,
            "accuracy": accuracy[m],
            "floor": floor,
            "parameters": model.parameter_count(arm.size),
            "state_elements": arm.cell.state_elements,
        }
        if rebinding is not None:
            row["rebinding"] = float(rebinding[m])
            row["nothing_bound"] = nothing_bound(accuracy[m], row["rebinding"], sequences)
        if depths is not None:
            assert isinstance(depths, Tensor)
            row["by_depth"] = depths[m].tolist()
        if arm.curriculum == "gated":
            row["gate_opened"] = opened[m]
        rows.append(row)
    return rows
