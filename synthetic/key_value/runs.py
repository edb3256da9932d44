"""One run of the key-value experiment: a model, an offset, an order of queries, a seed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from synthetic import sequence_models, sequences, trainer
from synthetic.key_value import settings as sizes
from synthetic.key_value import task as tasks
from synthetic.key_value.settings import Settings
from synthetic.ranks import Ranks
from synthetic.sequences import Batch
from synthetic.sweep import Row


@dataclasses.dataclass(frozen=True)
class Run:
    """What tells one run from the others."""

    order: tasks.Order
    model: str
    offset: float | None
    seed: int

    def key(self) -> Row:
        """Return the run as the fields of its result row."""
        return dataclasses.asdict(self)

    def label(self) -> str:
        gate = "" if self.offset is None else f" {self.offset:+g}"
        return f"{self.order} {self.model}{gate} seed {self.seed}"


def plan(s: Settings, orders: list[tasks.Order], models: list[str]) -> list[Run]:
    """Return every run, seed by seed, so that an early look has all settings."""
    return [
        Run(order, model, offset, seed)
        for order in orders
        for seed in s.seeds
        for model in models
        for offset in (s.offsets[order] if model == "mamba2" else (None,))
    ]


def build(s: Settings, run: Run) -> torch.nn.Module:
    """Return the run's fresh model; a seed starts from the same weights at every offset."""
    longest = dataclasses.replace(s.task, pairs=max(s.lengths)).tokens(max(s.lengths))
    return sequence_models.build(
        s.sizes[run.model], s.task.vocab, longest, seed=run.seed, offset=run.offset or 0.0
    )


def evaluation_set(
    task: tasks.Task, entries: torch.Tensor, n: int, count: int, queries: int | None = None
) -> Batch:
    """Return test sequences of n pairs each, the same for every model of the seed."""
    g = torch.Generator().manual_seed(5_000_011 + n)

    def sample(size: int) -> Batch:
        return tasks.sample(task, entries, size, g, pairs=n, queries=queries)

    return sequences.draw(sample, count, test=True)


def execute(
    s: Settings, run: Run, ranks: Ranks | None = None, *, checkpoint: Path | None = None
) -> Row:
    """Train and measure one run; return its row."""
    ranks = ranks or Ranks()
    device = ranks.device
    task = dataclasses.replace(s.task, order=run.order)
    entries = tasks.dictionary(task, run.seed)
    model = build(s, run).to(device)

    def draw(step: int) -> Batch:
        g = torch.Generator().manual_seed(run.seed * 10_000_019 + step)

        def sample(size: int) -> Batch:
            return tasks.sample(task, entries, size, g)

        return sequences.draw(sample, s.recipe.batch, test=False).to(device)

    small = evaluation_set(task, entries, task.pairs, s.curve_sequences).to(device)
    before = sequence_models.gate_state(model, small) if run.model == "mamba2" else None

    def accuracy(batch: Batch) -> float:
        return float(sequence_models.right_answers(model, batch, s.eval_rows).float().mean())

    done = trainer.train(
        model,
        draw,
        s.recipe_of(run.model),
        lambda step: {"accuracy": accuracy(small)},
        stop=lambda metrics: bool(metrics["accuracy"] >= sizes.STOP),
        desc=run.label(),
        ranks=ranks,
        checkpoint=checkpoint,
        name=run.key(),
    )
    final = evaluation_set(task, entries, task.pairs, s.final_sequences).to(device)
    escaped = [c["step"] for c in done.curve if c["accuracy"] > sizes.ESCAPE]
    row: dict[str, Any] = {
        **run.key(),
        "accuracy": accuracy(final),
        "escape_step": escaped[0] if escaped else None,
        "steps": done.steps,
        "cap_steps": s.recipe.steps,
        "memory_accuracy": task.memory_accuracy(),
        "parameters": sequence_models.parameter_count(model),
        "cpu_seconds": round(done.cpu_seconds, 2),
        "data_seconds": round(done.data_seconds, 4),
        "curve": [[c["step"], round(c["accuracy"], 4), round(c["loss"], 4)] for c in done.curve],
    }
    if run.order == "best_last":
        row["lengths"] = list(s.lengths)
        # The task asks for a share of n.  With the training's number of queries the context
        # alone grows, and answers stay as near as they were.
        for key, queries in (
            ("length_accuracy", None),
            ("length_accuracy_same_queries", task.queries(task.pairs)),
        ):
            row[key] = [
                accuracy(evaluation_set(task, entries, n, s.length_sequences, queries).to(device))
                for n in s.lengths
            ]
    if before is not None:
        row |= sequence_models.drift(before, sequence_models.gate_state(model, small))
    return row
