"""Training the recall harness at MQAR K = 32, seconds a seed, against one seed at a time.

Ours is what `python -m synthetic.recall table` does: five seeds in one process on the C++
kernels.  Peers are the same harness training one seed, on the kernels and in plain PyTorch.
A few steps are timed in one process, after a warm-up, and counted up to the whole run of the
table (2,000 steps for the delta family, 5,000 for Mamba-2, batches of 128); the evaluation
at its end is not in it.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator
from unittest import mock

import torch

from synthetic.recall import arms, runs
from tools.benchmarks.harness import Options, Result, in_turn, result

ALLOCATORS = ("tuned",)
THREADS = (1,)
PAIRS, SEEDS, STEPS = 32, 5, 12
CELLS = (("gated_deltanet", "delta family (gated DeltaNet)"), ("mamba2", "diagonal (Mamba-2)"))


def _train(arm: runs.Arm, seeds: int, kernels: str) -> None:
    with mock.patch.dict(os.environ, GATEWRIGHT_KERNELS=kernels, GATEWRIGHT_QUIET="1"):
        runs.train(arm, list(range(seeds)), "mqar")


def run(options: Options) -> Iterator[Result]:
    torch.set_num_threads(options.threads)
    for cell, name in CELLS:
        whole = arms.mqar(cell, True, PAIRS)  # type: ignore[arg-type]
        few = dataclasses.replace(whole, steps=STEPS)
        sides = [
            functools.partial(_train, few, seeds, kernels)
            for seeds, kernels in ((SEEDS, "auto"), (1, "auto"), (1, "torch"))
        ]
        ours, alone, plain = in_turn(options.repeats, *sides)
        up = whole.steps / STEPS
        for peer, label in ((alone, "C++ kernels"), (plain, "plain PyTorch")):
            yield result(
                options,
                f"{name}, MQAR K = {PAIRS}, {whole.steps} steps, {SEEDS} seeds together",
                ours * up / SEEDS,
                peer * up,
                "s a seed",
                f"one seed at a time, {label}",
            )
