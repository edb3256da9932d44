"""The machine's own limits: fp32 and bf16 matrix products, and copying memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tools.benchmarks.harness import Options, Result, in_turn, result

ALLOCATORS = ("default",)


def run(options: Options) -> Iterator[Result]:
    n = 2048
    a, b = torch.randn(n, n), torch.randn(n, n)
    ah, bh = a.bfloat16(), b.bfloat16()
    big = torch.randn(64 << 20)  # 256 MB, beyond every cache
    copy = torch.empty_like(big)
    sgemm, bf16, copying = in_turn(
        options.repeats, lambda: a @ b, lambda: ah @ bh, lambda: copy.copy_(big)
    )
    yield result(options, "sgemm", 2e-9 * n**3 / sgemm, None, "GFLOP/s")
    yield result(options, "bf16 matrix product", 2e-9 * n**3 / bf16, None, "GFLOP/s")
    yield result(options, "copy (read + write)", 2 * big.nbytes / copying / 1e9, None, "GB/s")
