"""Training and measuring one arm: a cell on a task, its seeds together.

Defaults are the small ones (learning rate 3e-3, batch 128): with the authors' (1e-3, batch
256, 2,000 + 125 K steps) the same cells need several times the work.  A run measures
accuracy, the rebinding score and the floors, and marks what bound nothing.

Accuracy, always on fresh sequences in the layout that the arm was trained with and at the full
gap: MQAR, all queries; S5, all prefix depths; haystack and collision, the LAST query, which
stands farthest from the table.  Arms trained with several queries are also measured with one
(`accuracy_one_query`), a layout whose positions they have never seen.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from synthetic import ensemble
from synthetic.ensemble import Parameters
from synthetic.recall import cells, curriculum, model, tasks
from synthetic.recall.tasks import Batch, Task
from synthetic.sweep import Row

EVAL_CHUNK = 256
CURVE_STEPS = 50  # a point of the learning curve is the mean of so many steps
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
        if t.queries_after_gap:
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


@dataclasses.dataclass
class Trained:
    """What training leaves.

    Attributes:
        parameters: of all members, (E, ...).
        opened: the share of the full gap that each member's gate has reached.
        curve: each member's mean training accuracy over every CURVE_STEPS steps.
        diverged: member -> the step at which its loss was seen not to be finite.
    """

    parameters: Parameters
    opened: list[float]
    curve: list[list[float]]
    diverged: dict[int, int]


def train(arm: Arm, seeds: list[int], desc: str) -> Trained:
    """Train all seeds of an arm together; each as if alone."""
    p = model.initial(arm.size, seeds)
    streams = ensemble.generators(seeds, stream=1)
    full = arm.task.max_gap if arm.task.queries_after_gap else 0
    course = curriculum.Curriculum(arm.curriculum, full, arm.steps, len(seeds))
    seen: list[list[float]] = []

    def losses(step: int) -> Tensor:
        batch = _stack(
            [
                tasks.sample(arm.task, arm.batch, g, cap=course.cap(step, m))
                for m, g in enumerate(streams)
            ]
        )
        loss, accuracy = _scored(p, arm, batch)
        seen.append(accuracy.tolist())
        course.observe(seen[-1])
        return loss

    optimizer = ensemble.AdamW(lr=arm.lr, weight_decay=0.01, clip_norm=1.0)
    schedule = ensemble.Schedule(arm.steps, floor=0.1)
    diverged = ensemble.train(p, losses, optimizer, schedule, desc=desc, tolerant=True)
    windows = [seen[i : i + CURVE_STEPS] for i in range(0, len(seen), CURVE_STEPS)]
    return Trained(
        p,
        [course.opened(m) for m in range(len(seeds))],
        [[round(sum(x[m] for x in w) / len(w), 4) for w in windows] for m in range(len(seeds))],
        diverged,
    )


@torch.no_grad()
def measure(
    p: Parameters, arm: Arm, sequences: int, *, rebind: bool = False, task: Task | None = None
) -> Tensor:
    """Return each member's accuracy at each query (E, Q), over the same fresh sequences.

    Args:
        sequences: how many, exactly.
        rebind: with deranged bindings and the original values as answers.
        task: another layout than the arm was trained with.
    """
    task = task or arm.task
    g = ensemble.generators([0], stream=3 if rebind else 2)[0]
    members = len(p["embedding"])
    right = torch.zeros(members, task.queries)
    for start in range(0, sequences, EVAL_CHUNK):
        one = tasks.sample(task, min(EVAL_CHUNK, sequences - start), g, rebind=rebind)
        batch = _stack([one] * members)
        out = model.logits(p, arm.size, batch.tokens, batch.positions)
        right += (out.argmax(-1) == batch.answers).sum(1)
    return right / sequences


def nothing_bound(accuracy: float, rebinding: float, answers: int) -> bool:
    """Return whether a rebinding score is as good as the accuracy, within two standard errors.

    Such a run answers the same with the bindings deranged: whatever it scores, it does not
    score by reading them.

    Args:
        answers: how many scored answers each of the two is the mean of.
    """
    spread = math.sqrt((accuracy * (1 - accuracy) + rebinding * (1 - rebinding)) / answers)
    return accuracy - rebinding <= 2 * spread


def run(arm: Arm, seeds: Sequence[int], sequences: int, desc: str) -> list[Row]:
    """Train and measure an arm; return a row per seed.

    A seed that diverged has `failed`, the reason, instead of measures.
    """
    done = train(arm, list(seeds), desc)
    p, task = done.parameters, arm.task
    counted = slice(-1, None) if task.queries_after_gap else slice(None)
    by_query = measure(p, arm, sequences)
    by = by_query[:, counted]
    accuracy = by.mean(1).tolist()
    rebinding = one_query = None
    if task.name != "s5":
        rebinding = measure(p, arm, sequences, rebind=True)[:, counted].mean(1).tolist()
    if task.queries_after_gap and task.dense > 1:
        one = dataclasses.replace(task, dense=1)
        one_query = measure(p, arm, sequences, task=one).mean(1).tolist()
    fixed = {
        "floor": tasks.floors(task)["floor"],
        "parameters": model.parameter_count(arm.size),
        "state_elements": arm.cell.state_elements,
    }
    rows = []
    for m, seed in enumerate(seeds):
        row: Row = {**arm.settings(), "seed": seed, **fixed, "curve": done.curve[m]}
        rows.append(row)
        if m in done.diverged:
            row["failed"] = f"{desc}, seed {seed}: not finite at step {done.diverged[m]}"
            continue
        row["accuracy"] = accuracy[m]
        if rebinding is not None:
            answers = sequences * by.shape[1]
            row["rebinding"] = rebinding[m]
            row["nothing_bound"] = nothing_bound(accuracy[m], rebinding[m], answers)
        if one_query is not None:
            row["accuracy_one_query"] = one_query[m]
        if task.name == "s5":
            row["by_depth"] = by_query[m].tolist()
        if arm.curriculum == "gated":
            row["gate_opened"] = done.opened[m]
    return rows


def execute(sequences: int, deadline: float | None, job: tuple[str, Arm, list[int]]) -> list[Row]:
    """Train an arm's seeds: their rows, or none past a deadline.

    A row's `seconds` and `cpu_seconds` are the seed's share of the arm's.

    Args:
        deadline: seconds since the epoch after which no arm is begun.
        job: the arm's name, the arm, and the seeds that are missing.
    """
    name, arm, seeds = job
    if deadline is not None and time.time() >= deadline:
        return []
    start, cpu = time.monotonic(), time.process_time()
    rows = run(arm, seeds, sequences, name)
    cost = {
        "seconds": round((time.monotonic() - start) / len(seeds), 2),
        "cpu_seconds": round((time.process_time() - cpu) / len(seeds), 2),
    }
    return [{"arm": name, **row, **cost} for row in rows]
