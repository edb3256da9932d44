"""SSD scan, forward and backward, against transformers' chunk scan at its default chunk.

B=4, L=2048, H=16, P=64, G=1, fp32.  `cpp` are the C++ kernels, `torch` what a machine without a
compiler gets.  The peer is `mamba2_chunk_scan` of transformers with chunk_size 256.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import torch

from gatewright.kernels import backend, ssd_scan
from tools.benchmarks.harness import Options, Result, in_turn, result, sgemm

BATCH, LENGTH, HEADS, HEAD_DIM = 4, 2048, 16, 64
PEER = "transformers, chunk 256"


def flops(d_state: int, chunk: int = 64, block: int = 16) -> float:
    """Multiply-adds, as two operations, of the C++ kernels forward and backward.

    Per token and head: two products with the state forward and five backward (2 P N each), one
    and two within the chunk (2 P times half the chunk, up to the diagonal block).
    """
    inside = (chunk + block) / 2
    tokens = BATCH * LENGTH * HEADS
    return tokens * 2.0 * HEAD_DIM * (7 * d_state + 3 * inside)


def run(options: Options) -> Iterator[Result]:
    from transformers.models.mamba2 import modeling_mamba2
    from transformers.utils import logging

    logging.set_verbosity_error()
    # timed in turn with the scan: at a process's start it came out anything from a third up
    product, product_flops = sgemm()
    for d_state in (64, 128):
        steps = _sides(d_state, modeling_mamba2.mamba2_chunk_scan)
        names = ["cpp", "torch"] if backend.native_library() is not None else ["torch"]
        sides = [*(steps[n] for n in names), steps["peer"], product]
        *ours, peer, multiplied = in_turn(options.repeats, *sides)
        peak = product_flops / multiplied
        for name, took in zip(names, ours, strict=True):
            yield result(
                options,
                f"ssd f+b N={d_state} {name}",
                took * 1e3,
                peer * 1e3,
                "ms",
                PEER,
                of_sgemm_peak=flops(d_state) / took / peak if name == "cpp" else None,
            )


def _sides(d_state: int, peer: Callable[..., torch.Tensor]) -> dict[str, Callable[[], None]]:
    r = torch.Generator().manual_seed(0)
    b, l, h, p, n = BATCH, LENGTH, HEADS, HEAD_DIM, d_state
    inputs = {
        "hidden_states": torch.randn(b, l, h, p, generator=r),
        "dt": torch.randn(b, l, h, generator=r),
        "A": -1 - 15 * torch.rand(h, generator=r),
        "B": torch.randn(b, l, 1, n, generator=r),
        "C": torch.randn(b, l, 1, n, generator=r),
        "D": torch.ones(h),
        "dt_bias": torch.rand(h, generator=r) - 4,
    }
    for t in inputs.values():
        t.requires_grad_()
    gradient = torch.randn(b, l, h, p, generator=r)

    def step(f: Callable[..., torch.Tensor], kernels: str, chunk: int) -> None:
        before = os.environ.get("GATEWRIGHT_KERNELS")
        os.environ["GATEWRIGHT_KERNELS"] = kernels
        try:
            y = f(*inputs.values(), chunk)
            torch.autograd.grad(y, list(inputs.values()), gradient)
        finally:
            if before is None:
                del os.environ["GATEWRIGHT_KERNELS"]
            else:
                os.environ["GATEWRIGHT_KERNELS"] = before

    def ours(x, dt, A, B, C, D, bias, chunk):  # type: ignore[no-untyped-def]
        return ssd_scan(x, dt, A, B, C, chunk, D=D, dt_bias=bias, dt_softplus=True)

    def theirs(x, dt, A, B, C, D, bias, chunk):  # type: ignore[no-untyped-def]
        return peer(x, dt, A, B, C, chunk, D=D, dt_bias=bias, dt_softplus=True)

    return {
        "cpp": lambda: step(ours, "auto", 64),
        "torch": lambda: step(ours, "torch", 64),
        "peer": lambda: step(theirs, "auto", 256),
    }
