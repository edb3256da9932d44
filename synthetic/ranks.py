"""Several processes on one run: each takes a part of every batch, gradients are summed.

Started by torchrun, one process a GPU; without it there is one process and nothing happens.
Every process builds the same model and draws the same batches, so only gradients travel.
The first process, the lead, owns the results folder and decides what is left to do.

Small models gain nothing from that: there, several processes do a whole run each (`side_by_side`).
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed as dist
from torch import nn

from synthetic.sequences import Batch
from synthetic.side_by_side import side_by_side
from synthetic.sweep import Row, Sweep, by_run

T = TypeVar("T")

# Settings that only say which runs to do; a sweep may be continued with others.
WHICH = ("orders", "parts", "models", "offsets", "seeds")


class Diverged(ArithmeticError):
    """A run's loss is not finite: no weights are left to measure."""


class Ranks:
    """This process's place among those of the run.

    Args:
        device: `cpu` (gloo) or `cuda` (nccl, one GPU a process).
    """

    def __init__(self, device: str = "cpu") -> None:
        self.count = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        local = int(os.environ.get("LOCAL_RANK", "0"))
        self.device = f"cuda:{local}" if device == "cuda" else device
        if device == "cuda":
            torch.cuda.set_device(local)
        if self.count > 1:
            dist.init_process_group("nccl" if device == "cuda" else "gloo")

    @property
    def lead(self) -> bool:
        return self.rank == 0

    def part(self, batch: Batch) -> Batch:
        """Return this process's rows of a batch; it must have at least one row for each."""
        if self.count == 1:
            return batch
        return batch.rows(torch.arange(self.rank, len(batch), self.count))

    def sum_gradients(self, model: nn.Module) -> None:
        """Add up every process's gradients in place."""
        if self.count == 1:
            return
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)

    def total(self, value: float) -> float:
        """Return the sum of every process's value."""
        if self.count == 1:
            return value
        held = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(held)
        return float(held)

    def agree(self, value: T) -> T:
        """Return the lead's value in every process."""
        if self.count == 1:
            return value
        held: list[Any] = [value if self.lead else None]
        dist.broadcast_object_list(held)
        found: T = held[0]
        return found

    def close(self) -> None:
        if self.count > 1:
            dist.destroy_process_group()


def fill(
    out: Path,
    experiment: str,
    config: Mapping[str, Any],
    runs: Iterable[Any],
    execute: Callable[[Any, Ranks], Row],
    finish: Callable[[Sweep], None],
    device: str,
    *,
    processes: int = 1,
    partial: Path | None = None,
) -> None:
    """Do the runs that a results folder lacks, then finish it.

    A run whose training diverges has a row too, with `failed` and no measures: the sweep can
    be finished, and started again it would diverge again.

    Args:
        runs: objects with a `key()`, the fields of their rows that name them, and a `label()`.
        execute: picklable where `processes` is above 1.
        finish: writes summary and figure; called in the lead alone.
        processes: runs at a time, each in a process with as many threads as this one.
        partial: where `execute` keeps an unfinished run; removed once the run's row is on disk.

    Raises:
        UserError: the folder cannot be continued, or one of several processes was killed.
    """
    runs, ranks = list(runs), Ranks(device)
    try:
        sweep = Sweep(out, experiment, config, free=WHICH) if ranks.lead else None
        with sweep or contextlib.nullcontext():
            if sweep is not None and runs:
                by_run(sweep.rows, list(runs[0].key()), sweep.path)
            missing = [r for r in runs if not (sweep and sweep.has(**r.key()))]
            if sweep is not None and min(processes, len(missing)) > 1:
                one = functools.partial(_in_worker, execute, device)
                side_by_side(one, missing, sweep.add, sweep, processes=processes)
            else:
                for run in ranks.agree(missing):
                    row = _execute(execute, run, ranks)
                    if sweep is not None:
                        sweep.add(row)
                        _remove(partial)
            if sweep is not None:
                _remove(partial)
                finish(sweep)
    finally:
        ranks.close()


def _remove(partial: Path | None) -> None:
    if partial is not None:
        partial.unlink(missing_ok=True)


def _execute(execute: Callable[[Any, Ranks], Row], run: Any, ranks: Ranks) -> Row:
    try:
        return execute(run, ranks)
    except Diverged as e:
        return {**run.key(), "failed": str(e)}


def _in_worker(execute: Callable[[Any, Ranks], Row], device: str, run: Any) -> Row:
    return _execute(execute, run, Ranks(device))
