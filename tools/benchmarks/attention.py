"""Causal attention forward and backward, ours against torch's fused kernel.

4 x 512 tokens, 4 heads of 64 (a debug Llama's layer), and 1 x 4096 tokens, fp32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from gatewright.kernels import causal_attention
from tools.benchmarks.harness import Options, Result, in_turn, result

PEER = "scaled_dot_product_attention"


def run(options: Options) -> Iterator[Result]:
    for batch, length in ((4, 512), (1, 4096)):
        q, k, v = (torch.randn(batch, 4, length, 64, requires_grad=True) for _ in range(3))
        gradient = torch.randn(batch, 4, length, 64)

        def step(
            f: Callable[..., torch.Tensor],
            inputs: tuple[torch.Tensor, ...] = (q, k, v),
            gradient: torch.Tensor = gradient,
        ) -> None:
            torch.autograd.grad(f(*inputs), inputs, gradient)

        def theirs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        ours, peer = in_turn(
            options.repeats,
            functools.partial(step, causal_attention),
            functools.partial(step, theirs),
        )
        name = f"attention f+b {batch} x {length}"
        yield result(options, name, ours * 1e3, peer * 1e3, "ms", PEER)
