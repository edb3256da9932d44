"""Leaving in order: a signal or a time limit ends the run at the next step, after a save."""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

from gatewright.megatron import distributed

EXIT_RUN_AGAIN = 75
"""Exit code of a run that saved and left before its end: start it again to go on.

(EX_TEMPFAIL of sysexits.h.)  The Slurm pipeline requeues a job that leaves with it.
"""

EXIT_BAD_LOSS = 3
"""Exit code of a run that stopped at a loss or gradient that is not finite."""

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class LeaveRequests:
    """Collects SIGTERM, SIGUSR1 and a time limit; all processes agree on the answer.

    Args:
        minutes: leave after this long, counted from the construction; None never.
    """

    def __init__(self, minutes: float | None = None) -> None:
        self._deadline = None if minutes is None else time.monotonic() + 60 * minutes
        self._received: int | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> LeaveRequests:
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = number

    def reason(self) -> str | None:
        """Return why any process wants to leave, or None.  All processes must call this."""
        late = self._deadline is not None and time.monotonic() >= self._deadline
        code = self._received or (-1 if late else 0)
        # The largest magnitude wins; signals are positive, the time limit is -1.
        answer = torch.tensor([max(code, 0), int(late)], device=distributed.device())
        dist.all_reduce(answer, op=dist.ReduceOp.MAX)
        number, any_late = answer.tolist()
        if number:
            return signal.Signals(number).name
        return "the time limit" if any_late else None
