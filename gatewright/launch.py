"""The environment in which our launchers start computing processes, and the cores for them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

# glibc gives large blocks back to the kernel at once, and every tensor then pays for page
# faults again: up to half of a CPU training step.  These settings keep freed memory and use
# huge pages.  They are read once, when a process starts.
_MALLOC = {
    "glibc.malloc.mmap_threshold": "8000000000",
    "glibc.malloc.trim_threshold": "16000000000",
    "glibc.malloc.hugetlb": "1",
}


def tuned_env(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return `base` (os.environ) with glibc's allocator tuned for CPU tensors.

    Tunables that the user set already are kept.  Off Linux, or with GATEWRIGHT_MALLOC=default,
    the environment comes back unchanged.
    """
    env = dict(os.environ if base is None else base)
    if env.get("GATEWRIGHT_MALLOC") == "default" or not sys.platform.startswith("linux"):
        return env
    given = [item for item in env.get("GLIBC_TUNABLES", "").split(":") if item]
    names = {item.split("=", 1)[0] for item in given}
    added = [f"{name}={value}" for name, value in _MALLOC.items() if name not in names]
    env["GLIBC_TUNABLES"] = ":".join(given + added)
    return env


def allocator(env: Mapping[str, str] | None = None) -> str:
    """Return "tuned" when this process was started under `tuned_env`, else "default"."""
    tunables = (os.environ if env is None else env).get("GLIBC_TUNABLES", "")
    set_names = {item.split("=", 1)[0] for item in tunables.split(":")}
    return "tuned" if set_names.issuperset(_MALLOC) else "default"


def retune() -> None:
    """Start this program again under `tuned_env` if it is not; for `__main__` blocks only.

    Does nothing under a launcher that already did, and inside multi-process jobs' workers
    only costs one exec each.
    """
    env = tuned_env()
    if env.get("GLIBC_TUNABLES") == os.environ.get("GLIBC_TUNABLES"):
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], env)


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
