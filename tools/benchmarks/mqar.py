"""Training the recall harness at MQAR K = 32, seconds a seed, against one seed at a time.

Ours is what `python -m synthetic.recall table` does: five seeds in one process on the C++
kernels.  Peers are the same harness training one seed, on the kernels and in plain PyTorch.
A few steps are timed in one process, after a warm-up, and counted up to the whole run of the
table (2,000 steps for the delta family, 5,000 for Mamba-2, batches of 128); the evaluation
at its end is not in it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.benchmarks.harness import Options, Result, result

ALLOCATORS = ("tuned",)
THREADS = (1,)
PAIRS, SEEDS, STEPS = 32, 5, 12
CELLS = (("gated_deltanet", "delta family (gated DeltaNet)"), ("mamba2", "diagonal (Mamba-2)"))


def run(options: Options) -> Iterator[Result]:
    root = Path(__file__).resolve().parents[2]
    for cell, name in CELLS:
        command = [
            *(sys.executable, "-m", "synthetic.recall.timing", "--cell", cell),
            *("--pairs", str(PAIRS), "--seeds", str(SEEDS), "--steps", str(STEPS)),
            *("--repeats", str(options.repeats), "--threads", str(options.threads)),
        ]
        done = subprocess.run(command, cwd=root, check=True, stdout=subprocess.PIPE, text=True)
        took = json.loads(done.stdout.splitlines()[-1])
        up = took["steps"] / STEPS
        for side, label in (("alone", "C++ kernels"), ("plain", "plain PyTorch")):
            yield result(
                options,
                f"{name}, MQAR K = {PAIRS}, {took['steps']} steps, {SEEDS} seeds together",
                took["together"] * up / SEEDS,
                took[side] * up,
                "s a seed",
                f"one seed at a time, {label}",
            )
