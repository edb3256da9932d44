"""Mamba-2 greedy generation, batch 16, 1024 prompt and 128 new tokens, against transformers.

Both sides run `model.generate` of transformers; ours with our kernels bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tools.benchmarks.harness import Options, Result, in_turn, result
from tools.benchmarks.small_model import PEER, bound, mamba2

ROWS, PROMPT, NEW = 16, 1024, 128


def run(options: Options) -> Iterator[Result]:
    model = mamba2().eval()
    ids = torch.randint(1, 8192, (ROWS, PROMPT))
    prefill_options: dict[str, Any] = {"use_cache": True, "logits_to_keep": 1}

    @torch.inference_mode()
    def prefill() -> None:
        model(input_ids=ids, **prefill_options)

    def generate() -> None:
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
        )

    for name, f, tokens in (
        ("prefill 16 x 1024", prefill, ROWS * PROMPT),
        ("generate 16 x (1024 + 128)", generate, ROWS * NEW),
    ):
        ours, peer = in_turn(options.repeats, bound(f), f)
        yield result(
            options, name, tokens / ours, tokens / peer, "tokens/s", PEER, more_is_better=True
        )
