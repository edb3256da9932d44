"""What a process of a multi-process test does: `python -m ...worker FOLDER` under torchrun."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gatewright.megatron import checkpoints, distributed, loop
from gatewright.megatron import signals as leaving
from gatewright.megatron.data import Corpus
from tests.gatewright.megatron import tiny


@contextlib.contextmanager
def opened(case: dict[str, Any]) -> Iterator[loop.Run]:
    """Yield the case's run, at the checkpoint that it names."""
    config = tiny.config(case["family"], **case.get("changes", {}))
    corpus = Corpus.of_folder(Path(case["corpus"]), tiny.EOD)
    out = Path(case["out"])
    if distributed.is_main():
        out.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    with distributed.processes(config.parallel, seed=1) as data_parallel:
        run = loop.Run(config, corpus, out, data_parallel)
        if "load" in case:
            run.step, run.consumed_samples = checkpoints.load(
                Path(case["load"]), run.model, run.optimizer, run.schedule
            )
        with run:
            yield run


def steps(case: dict[str, Any]) -> list[list[float]]:
    """Take `steps` optimizer steps; returns loss and gradient norm of each.

    Optional: `load` a checkpoint folder first, `save` a checkpoint into `out` afterwards.
    """
    found = []
    with opened(case) as run:
        for _ in range(case["steps"]):
            step = run.forward_backward()
            run.update_weights(step)
            found.append([step.loss, step.grad_norm])
        if case.get("save"):
            run.save()
    return found


def gates(case: dict[str, Any]) -> dict[str, float]:
    """Return the gate statistics of one step."""
    with opened(case) as run:
        run.forward_backward()
        return run.gate_metrics


def signals(case: dict[str, Any]) -> list[str | None]:
    """Return what rank 0 hears before and after rank 1 gets a signal, and at a time limit."""
    with leaving.LeaveRequests() as requests:
        heard = [requests.reason()]
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        heard += [requests.reason(), requests.reason()]
    only_late = 0.0 if dist.get_rank() == 1 else None
    with leaving.LeaveRequests(only_late) as requests:
        return [*heard, requests.reason()]


def main(folder: Path) -> None:
    cases = json.loads((folder / "cases.json").read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = []
    for case in cases:
        start = time.perf_counter()
        results.append(globals()[case["do"]](case))
        if dist.get_rank() == 0:
            print(f"{time.perf_counter() - start:6.2f} s  {case['out']}", flush=True)
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
