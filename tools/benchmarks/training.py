"""Mamba-2 training step on transformers' model, with and without us: speed and peak memory.

Forward, backward and AdamW on 8 x 512 tokens, one model.  Ours: our kernels bound and our
cross-entropy over the vocabulary.  The peer: transformers as it comes (chunk 256, its loss).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch

from gatewright.kernels import linear_cross_entropy
from tools.benchmarks.harness import Options, Result, in_turn, peak_bytes, result
from tools.benchmarks.small_model import PEER, bound, mamba2

ROWS, LENGTH = 8, 512


def run(options: Options) -> Iterator[Result]:
    model = mamba2().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(1, 8192, (ROWS, LENGTH))

    def theirs() -> None:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()

    @bound
    def mine() -> None:
        optimizer.zero_grad()
        hidden = model.backbone(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        labels = ids[:, 1:].reshape(-1)
        loss = linear_cross_entropy(hidden.flatten(0, 1), model.lm_head.weight, labels)
        (loss / labels.numel()).backward()
        optimizer.step()

    ours, peer = (ROWS * LENGTH / t for t in in_turn(options.repeats, mine, theirs))
    name = f"training step {ROWS} x {LENGTH}"
    yield result(options, name, ours, peer, "tokens/s", PEER, more_is_better=True)
    if options.allocator == "tuned":
        return  # it keeps freed memory on purpose, so a high-water mark says nothing
    peaks = []
    for f in (mine, theirs):
        gc.collect()
        peaks.append(peak_bytes(f))
    if None not in peaks:
        ours, peer = (p / 2**20 for p in peaks if p is not None)
        yield result(options, "peak memory of a step", ours, peer, "MiB", PEER)
