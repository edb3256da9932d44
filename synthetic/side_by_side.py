"""Whole runs side by side, each in a process of its own; what ends is kept at once."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from types import FrameType
from typing import TypeVar

import torch

from gatewright.errors import UserError
from gatewright.runlog import progress
from synthetic.sweep import Sweep

Run = TypeVar("Run")
Result = TypeVar("Result")


def side_by_side(
    execute: Callable[[Run], Result],
    runs: Sequence[Run],
    keep: Callable[[Result], None],
    sweep: Sweep,
    *,
    processes: int,
    unit: str = "run",
) -> None:
    """Do the runs, `processes` at a time, begun in their order and kept as they end.

    After a run that fails no other is begun, those that go on are kept, and then the failure
    is raised.

    Args:
        execute: picklable; its processes have as many threads as this one.
        keep: brings a result to the sweep's disk; called in this process.
        sweep: where results go; for the progress bar and the message.

    Raises:
        UserError: one of the processes was killed, or could not start.
    """
    pool = futures.ProcessPoolExecutor(
        min(processes, len(runs)),
        mp_context=multiprocessing.get_context("spawn"),  # torch's threads do not survive a fork
        initializer=_start_worker,
        initargs=(torch.get_num_threads(),),
    )
    others = set(multiprocessing.active_children())
    try:
        with _sigterm_raises():
            waiting = [pool.submit(execute, run) for run in runs]
            _keep_all(waiting, keep, sweep.experiment, unit)
    except futures.BrokenExecutor as e:
        raise UserError(
            f"--processes {processes}: one ended before its {unit} did (killed, perhaps for lack "
            f"of memory, or it could not start: see above); {len(sweep.rows)} rows are in --out "
            f"{sweep.out}: start again to go on from there"
        ) from e
    except (KeyboardInterrupt, SystemExit):  # whoever stops us does not wait for runs to end
        for worker in set(multiprocessing.active_children()) - others:
            worker.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _keep_all(
    waiting: Sequence[futures.Future[Result]],
    keep: Callable[[Result], None],
    desc: str,
    unit: str,
) -> None:
    """Keep every result; after a run that fails start no other, but keep what still ends well."""
    failed: BaseException | None = None
    ended = futures.as_completed(waiting)
    for one in progress(ended, desc=desc, unit=unit, total=len(waiting)):
        if one.cancelled():
            continue
        error = one.exception()
        if error is None:
            keep(one.result())
        elif failed is None:
            failed = error
            for other in waiting:
                other.cancel()
    if failed is not None:
        raise failed


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Let SIGTERM (a scheduler's time limit) end the block like Ctrl-C, so that it is left."""

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _start_worker(threads: int) -> None:
    os.environ["GATEWRIGHT_QUIET"] = "1"  # one bar counts the runs; theirs would mix with it
    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the parent ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker when its parent is gone, also by kill -9: nobody would keep its row."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)
