import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

TASKS = Path("/proc/self/task")


@pytest.fixture(autouse=True)
def groups_end() -> Iterator[None]:
    """Collect the process groups that earlier tests' models still hold in cycles.

    Each gloo group keeps a thread that wakes a hundred times a second: hundreds of them took a
    quarter of both cores.  A collection costs half a second, so it waits until there are many.
    """
    yield
    if TASKS.is_dir() and sum(1 for _ in TASKS.iterdir()) > 60:
        gc.collect()
