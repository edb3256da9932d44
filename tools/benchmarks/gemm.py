"""Large fp32 matrix products, ours against the library that torch calls.

The shapes are those of a debug Mamba-2's training step of 2048 tokens: the input and output
projections of a mixer, and 512 rows of logits over a vocabulary of 8192.  Each is measured as
the forward product and as the two of the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gatewright.kernels import matmul
from tools.benchmarks.harness import Options, Result, in_turn, result

ALLOCATORS = ("tuned",)
SHAPES = {"in_proj": (2048, 256, 1288), "out_proj": (2048, 512, 256), "logits": (512, 256, 8192)}
TIMES = 5  # products per measurement


def run(options: Options) -> Iterator[Result]:
    for name, (rows, d_in, d_out) in SHAPES.items():
        x, weight, dy = (torch.randn(*s) for s in ((rows, d_in), (d_out, d_in), (rows, d_out)))
        for what, a, b in (
            ("y = x W^T", x, weight.t()),
            ("dx = dy W", dy, weight),
            ("dW = dy^T x", dy.t(), x),
        ):
            out = torch.empty(a.shape[0], b.shape[1])

            def ours(a: torch.Tensor = a, b: torch.Tensor = b, out: torch.Tensor = out) -> None:
                for _ in range(TIMES):
                    matmul(a, b, out=out)

            def peer(a: torch.Tensor = a, b: torch.Tensor = b, out: torch.Tensor = out) -> None:
                for _ in range(TIMES):
                    torch.mm(a, b, out=out)

            flops = 2e-9 * TIMES * rows * d_in * d_out
            mine, theirs = (flops / t for t in in_turn(options.repeats, ours, peer))
            yield result(
                options, f"{name}: {what}", mine, theirs, "GFLOP/s", "torch.mm", more_is_better=True
            )
