"""What a process of a multi-process test does: `python -m ...worker FOLDER` under torchrun."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gatewright.megatron import checkpoints, distributed, loop
from gatewright.megatron.data import Corpus
from tests.gatewright.megatron import tiny


def steps(case: dict[str, Any]) -> list[list[float]]:
    """Take `steps` optimizer steps; returns loss and gradient norm of each.

    Optional: `load` a checkpoint folder first, `save` a checkpoint into `out` afterwards.
    """
    config = tiny.config(case["family"], **case.get("changes", {}))
    corpus = Corpus.of_folder(Path(case["corpus"]), tiny.EOD)
    out = Path(case["out"])
    if distributed.is_main():
        out.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    found = []
    with distributed.processes(config.parallel, seed=1) as data_parallel:
        run = loop.Run(config, corpus, out, data_parallel)
        if "load" in case:
            run.step, run.consumed_samples = checkpoints.load(
                Path(case["load"]), run.model, run.optimizer, run.schedule
            )
        with run:
            for _ in range(case["steps"]):
                step = run.forward_backward()
                run.update_weights(step)
                found.append([step.loss, step.grad_norm])
            if case.get("save"):
                run.save()
    return found


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
