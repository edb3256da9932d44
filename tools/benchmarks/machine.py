"""The machine's own limits: fp32 and bf16 matrix products, and copying memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from tools.benchmarks.harness import Options, Result, in_turn, result, seconds

ALLOCATORS = ("default",)


def size_within(limit_s: float, dtype: torch.dtype, most: int = 2048) -> int:
    """Return the largest power of two up to `most` whose square product takes about `limit_s`.

    Processors without bf16 instructions multiply at a hundredth of the speed of those with.
    """
    n = min(256, most)
    while n < most:
        a = torch.randn(n, n).to(dtype)
        if 8 * seconds(partial(torch.mm, a, a)) > limit_s:  # twice n, eight times the work
            break
        n *= 2
    return n


def run(options: Options) -> Iterator[Result]:
    n = 2048
    a, b = torch.randn(n, n), torch.randn(n, n)
    m = size_within(2.0, torch.bfloat16)
    ah, bh = a[:m, :m].bfloat16(), b[:m, :m].bfloat16()
    big = torch.randn(64 << 20)  # 256 MB, beyond every cache
    copy = torch.empty_like(big)
    sgemm, bf16, copying = in_turn(
        options.repeats, lambda: a @ b, lambda: ah @ bh, lambda: copy.copy_(big)
    )
    yield result(options, "sgemm", 2e-9 * n**3 / sgemm, None, "GFLOP/s")
    name = "bf16 matrix product" if m == n else f"bf16 matrix product, {m} x {m}"
    yield result(options, name, 2e-9 * m**3 / bf16, None, "GFLOP/s")
    yield result(options, "copy (read + write)", 2 * big.nbytes / copying / 1e9, None, "GB/s")
