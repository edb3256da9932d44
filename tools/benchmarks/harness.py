"""How benchmarks measure: both sides in turn, warm-up apart, medians, memory by high-water mark."""

from __future__ import annotations

import ctypes
import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Options:
    """The settings of this process; they are facts about it, not wishes."""

    threads: int
    allocator: str
    repeats: int


@dataclasses.dataclass(frozen=True)
class Result:
    """One comparison: `ratio` above 1 means that ours is better."""

    name: str
    ours: float
    peer: float | None
    ratio: float | None
    unit: str
    threads: int
    allocator: str
    repeats: int
    peer_name: str | None = None
    of_sgemm_peak: float | None = None
    """Multiply-adds done per second over those of a large sgemm, where that makes sense."""


def result(
    options: Options,
    name: str,
    ours: float,
    peer: float | None,
    unit: str,
    peer_name: str | None = None,
    *,
    more_is_better: bool = False,
    of_sgemm_peak: float | None = None,
) -> Result:
    """Build a Result; the ratio follows from which direction is better."""
    ratio = None
    if peer is not None:
        ratio = ours / peer if more_is_better else peer / ours
    return Result(
        name,
        ours,
        peer,
        ratio,
        unit,
        options.threads,
        options.allocator,
        options.repeats,
        peer_name,
        of_sgemm_peak,
    )


def seconds(f: Callable[[], object]) -> float:
    """Return how long one call takes."""
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


def in_turn(repeats: int, *sides: Callable[[], object]) -> list[float]:
    """Return the median seconds of each side, measured alternately after a warm-up each.

    A machine that slows down for a while then slows all sides alike.
    """
    for side in sides:
        side()
    times: list[list[float]] = [[] for _ in sides]
    for _ in range(repeats):
        for side, kept in zip(sides, times, strict=True):
            kept.append(seconds(side))
    return [statistics.median(kept) for kept in times]


def sgemm(n: int = 2048) -> tuple[Callable[[], object], float]:
    """Return a large fp32 matrix product to time beside others, and its operations.

    The output is kept: with glibc's default allocator its pages would be faulted in every time.
    """
    import torch

    a, b, c = torch.randn(n, n), torch.randn(n, n), torch.empty(n, n)
    return lambda: torch.mm(a, b, out=c), 2.0 * n**3


def peak_bytes(f: Callable[[], object]) -> int | None:
    """Return how far the process's resident memory rose above its start while `f` ran.

    Linux with glibc only (None elsewhere): memory that the allocator keeps after earlier work
    is given back and the kernel's high-water mark is reset first.
    """
    clear, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    try:
        ctypes.CDLL(None).malloc_trim(0)
        clear.write_text("5")
    except (OSError, AttributeError):
        return None

    def field(name: str) -> int:
        line = next(x for x in status.read_text().splitlines() if x.startswith(name))
        return int(line.split()[1]) * 1024

    start = field("VmRSS")
    f()
    return field("VmHWM") - start
