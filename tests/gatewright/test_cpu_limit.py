import re
import signal
import threading
import time
from collections.abc import Callable

import pytest

from gatewright import cpu_limit

SLOW = re.compile(r"(a|a)*b")
"""Takes 2^n steps on n times a."""


def swallow() -> str:
    try:
        SLOW.match("a" * 60)
    except:  # noqa: E722 (as bfcl_eval's converters do)
        return "swallowed"
    return "done"


@pytest.mark.parametrize("call", [lambda: SLOW.match("a" * 60), swallow])
def test_an_endless_regular_expression_is_stopped(call: Callable[[], object]) -> None:
    handler = signal.getsignal(signal.SIGVTALRM)
    before = time.process_time()
    with pytest.raises(cpu_limit.CPUTimeError, match="more than 0.1 s of CPU time"):
        cpu_limit.within(0.1, call)
    assert time.process_time() - before < 1
    assert signal.getsignal(signal.SIGVTALRM) is handler
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)


def test_what_is_quick_returns_or_raises_as_it_does() -> None:
    assert cpu_limit.within(1, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        cpu_limit.within(1, lambda: 1 / 0)
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)


def test_a_thread_is_told_that_it_has_no_limit() -> None:
    said: list[str] = []

    def ask() -> None:
        try:
            cpu_limit.within(1, lambda: None)
        except RuntimeError as e:
            said.append(str(e))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert said == ["a limit on CPU time works in the main thread only"]
