"""Causal convolution with SiLU, forward and backward, against transformers' torch path.

B=4, L=2048, d=1152 channels (x, B and C of a mixer with d_inner 1024), width 4, fp32.  The
input lies as a mixer's projection gives it: channels contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from gatewright.kernels import causal_conv1d
from tools.benchmarks.harness import Options, Result, in_turn, result

PEER = "transformers' conv1d"


def run(options: Options) -> Iterator[Result]:
    from transformers.models.mamba2.modeling_mamba2 import causal_conv1d_fn
    from transformers.utils import logging

    logging.set_verbosity_error()
    rows = torch.randn(4, 2048, 1152, requires_grad=True)
    weight, bias = torch.randn(1152, 4, requires_grad=True), torch.randn(1152, requires_grad=True)
    gradient = torch.randn(4, 2048, 1152)

    def step(f: Callable[..., torch.Tensor]) -> None:
        y = f(rows.transpose(1, 2), weight, bias, activation="silu").transpose(1, 2)
        torch.autograd.grad(y, [rows, weight, bias], gradient)

    ours, peer = in_turn(
        options.repeats, lambda: step(causal_conv1d), lambda: step(causal_conv1d_fn)
    )
    yield result(options, "conv1d + SiLU f+b", ours * 1e3, peer * 1e3, "ms", PEER)
