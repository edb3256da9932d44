"""Training runs of a sweep, each in a process of its own, without starting Python each time.

Importing torch, transformers and DeepSpeed and starting up takes longer than anything else in a
small run.  On CPU the sweep imports them once and forks, so a run that dies, or that DeepSpeed
leaves in a strange state, still ends with its process.  CUDA does not survive a fork: there
each run is started anew.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any

from gatewright import cli
from gatewright.errors import UserError


def start_method() -> str:
    """Return `fork` after importing what every run needs, `spawn` if torch can use CUDA."""
    import torch

    if torch.backends.cuda.is_built():
        return "spawn"
    os.environ["DS_ACCELERATOR"] = "cpu"
    import logging

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    import deepspeed  # noqa: F401
    import transformers  # noqa: F401

    return "fork"


def _child(work: Callable[..., int | None], arguments: tuple[Any, ...]) -> None:
    try:
        code = work(*arguments)
    except UserError as e:
        cli.fail(e)
    sys.exit(code)


def in_child(method: str, work: Callable[..., int | None], *arguments: Any) -> int:
    """Run `work(*arguments)` in a process of its own; return its exit code.

    A UserError ends it with its one line and exit code 2, as a command would.

    Args:
        method: fork or spawn (see `start_method`).
        work: a function of a module, for spawn's sake; what it returns is the exit code.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    process = multiprocessing.get_context(method).Process(  # type: ignore[attr-defined]
        target=_child, args=(work, arguments)
    )
    process.start()
    process.join()
    return int(process.exitcode)
