"""What this machine's processor can do, where the CPU's paths depend on it."""

from __future__ import annotations

import functools
import platform
import sys
from pathlib import Path


@functools.cache
def features() -> str:
    """Return the CPU's model and instruction set flags, as the kernel reports them."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    wanted = ("model name", "flags", "Features")
    lines = {line.split(":", 1)[0].strip(): line for line in text.splitlines() if ":" in line}
    return "\n".join(lines[key] for key in wanted if key in lines)


def bf16_is_slow() -> bool:
    """Return whether torch multiplies bf16 matrices in scalar loops here.

    On x86, torch hands bf16 products to oneDNN only where AVX-512 is; without it pretraining in
    bf16 was measured at a ninth of fp32's speed (docs/DECISIONS.md, Models and kernels).  False
    where that is not known: other architectures, no /proc.
    """
    words = set(features().split())
    return "avx2" in words and "avx512bw" not in words


def warn_of_slow_bf16(flag: str, device: str) -> None:
    """Say in one line on standard error that bf16 is the slow way on this CPU, if it is.

    Args:
        flag: what turns it off, as it is typed.
        device: cpu, or where else the products run.
    """
    if device == "cpu" and bf16_is_slow():
        print(
            "warning: this processor has no AVX-512, so torch multiplies bf16 matrices many times "
            f"slower than fp32; {flag} is the fast way here",
            file=sys.stderr,
        )
