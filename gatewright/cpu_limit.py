"""A limit on the CPU time of one call into code that is not ours.

bfcl_eval's converters of Java and JavaScript literals run regular expressions that take
exponential time on some texts.  Python looks for signals while a regular expression runs, so a
timer of the process's own CPU time ends it; a busy machine changes no verdict.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class CPUTimeError(Exception):
    """The call used up its CPU time."""


def within(seconds: float, call: Callable[[], T]) -> T:
    """Return what `call()` returns, if it needs at most so much CPU time.

    The alarm repeats, so that a bare `except` inside the call cannot swallow it for good, and a
    call that was interrupted counts as stopped even if it returned.

    Raises:
        CPUTimeError: it needed more.
        RuntimeError: outside the main thread, where Python handles no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("a limit on CPU time works in the main thread only")
    rang = False

    def ring(*_: Any) -> None:
        nonlocal rang
        rang = True
        raise CPUTimeError(f"needs more than {seconds:g} s of CPU time")

    before = signal.signal(signal.SIGVTALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds / 4)
        try:
            answer = call()
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except Exception:
        if rang:
            ring()
        raise
    finally:
        signal.signal(signal.SIGVTALRM, before)
    if rang:
        ring()
    return answer
