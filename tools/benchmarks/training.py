"""Mamba-2 training step in transformers with and without our kernels: speed and peak memory.

Forward, backward and AdamW on 8 x 512 tokens; the same model code on both sides.  The peer
computes at transformers' default chunk of 256.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch

from tools.benchmarks.harness import Options, Result, in_turn, peak_bytes, result
from tools.benchmarks.small_model import PEER, bound, mamba2

ROWS, LENGTH = 8, 512


def run(options: Options) -> Iterator[Result]:
    model = mamba2().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(1, 8192, (ROWS, LENGTH))

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()

    ours, peer = (ROWS * LENGTH / t for t in in_turn(options.repeats, bound(step), step))
    name = f"training step {ROWS} x {LENGTH}"
    yield result(options, name, ours, peer, "tokens/s", PEER, more_is_better=True)
    if options.allocator == "tuned":
        return  # it keeps freed memory on purpose, so a high-water mark says nothing
    peaks = []
    for f in (bound(step), step):
        gc.collect()
        peaks.append(peak_bytes(f))
    if None not in peaks:
        mine, theirs = (p / 2**20 for p in peaks if p is not None)
        yield result(options, "peak memory of a step", mine, theirs, "MiB", PEER)
