"""One decoding step of a Mamba-2 mixer, batch 16, and its cost after a long context.

The mixer has H=8, P=64, N=64; both sides run transformers' own module, with and without our
kernels.  `context` compares a whole model's step after 65536 tokens with one after 1024: the
peer there is ourselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tools.benchmarks.harness import Options, Result, in_turn, result
from tools.benchmarks.small_model import PEER, bound, mamba2

STEPS = 50


def _steps(model: Any, cache: Any, token: torch.Tensor) -> Callable[[], object]:
    @torch.inference_mode()
    def run() -> None:
        for _ in range(STEPS):
            model(input_ids=token, cache=cache, use_cache=True)

    return run


@torch.inference_mode()
def _mixer_steps(mixer: Any, cache: Any, hidden: torch.Tensor) -> None:
    for _ in range(STEPS):
        mixer(hidden, cache=cache)


@torch.inference_mode()
def _prefill(model: Any, rows: int, length: int) -> Any:
    from gatewright.kernels import bind_transformers

    ids = torch.randint(1, 8192, (rows, length))
    with bind_transformers():
        return model(input_ids=ids, use_cache=True, logits_to_keep=1).cache


def run(options: Options) -> Iterator[Result]:
    model = mamba2().eval()
    mixer = model.backbone.layers[0].mixer
    cache, hidden = _prefill(model, 16, 8), torch.randn(16, 1, 256)
    theirs: Callable[[], object] = lambda: _mixer_steps(mixer, cache, hidden)  # noqa: E731
    ours, peer = (t / STEPS * 1e6 for t in in_turn(options.repeats, bound(theirs), theirs))
    yield result(options, "mixer step, batch 16", ours, peer, "us", PEER)

    token = torch.ones(16, 1, dtype=torch.long)
    theirs = _steps(model, cache, token)
    ours, peer = (16 * STEPS / t for t in in_turn(options.repeats, bound(theirs), theirs))
    name = "model step, batch 16"
    yield result(options, name, ours, peer, "tokens/s", PEER, more_is_better=True)

    caches = {n: _prefill(model, 1, n) for n in (65536, 1024)}
    sides = [bound(_steps(model, c, token[:1])) for c in caches.values()]
    far, near = (t / STEPS * 1e6 for t in in_turn(options.repeats, *sides))
    yield result(options, "step after 64K context", far, near, "us", "ours, after 1K context")
