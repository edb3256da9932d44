"""Running one command: its output on the terminal and in a log, its memory, and its end.

The command gets a terminal of its own when this process has one, so that progress bars redraw;
the log keeps each bar's last state only.  Whatever a command leaves running is ended with it,
and it is told to stop should this process die, however it dies.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SAMPLE_SECONDS = 0.5
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Za-z0-9]")


class LogWriter:
    """Writes a command's output as text lines, each progress bar as its last state."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._pending = ""

    def write(self, data: bytes, final: bool = False) -> None:
        *lines, self._pending = (self._pending + self._decode(data, final)).split("\n")
        for line in lines:
            self._file.write(self._last_state(line) + "\n")
        if final and self._pending:
            self._file.write(self._last_state(self._pending) + "\n")
            self._pending = ""
        elif len(self._pending) > 65536:  # a bar without end of line: keep only what shows
            self._pending = self._pending[-4096:]
        self._file.flush()

    @staticmethod
    def _last_state(line: str) -> str:
        states = [s for s in _ESCAPES.sub("", line).split("\r") if s.strip()]
        return states[-1].rstrip() if states else ""


def memory_bytes(pid: int) -> int:
    """Return the memory of a process and its descendants, shared pages counted once."""
    total = 0
    with contextlib.suppress(psutil.Error):
        top = psutil.Process(pid)
        for process in [top, *top.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                try:
                    total += process.memory_full_info().pss
                except psutil.AccessDenied:
                    total += process.memory_info().rss
    return total


def adopt_orphans() -> None:
    """Make descendants whose parent dies children of this process, so that they can be found."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(grace_seconds: float = 5.0) -> None:
    """End every process below this one: SIGTERM, then SIGKILL."""
    left = psutil.Process().children(recursive=True)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _, left = psutil.wait_procs(left, timeout=grace_seconds)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=grace_seconds)


class Child:
    """One running command.

    Args:
        argv: its words.
        log: file to which its output is appended.
        echo: also show the output on this process's stdout.
        keep_fd: a file descriptor that the command inherits (a lock that it holds, too).
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        cwd: Path,
        env: dict[str, str],
        log: Path,
        echo: bool = True,
        keep_fd: int | None = None,
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.peak_memory_bytes = 0
        self.cpu_seconds = 0.0
        self._echo = echo
        self._file = open(log, "a", encoding="utf-8")  # noqa: SIM115
        self._log = LogWriter(self._file)
        on_terminal = echo and sys.stdout.isatty()
        if on_terminal:
            self._fd, there = pty.openpty()
            _copy_window_size(there)
            _plain_newlines(there)
        else:
            self._fd, there = os.pipe()
        libc = ctypes.CDLL(None)  # looked up before the fork
        parent = os.getpid()

        def in_child() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            if os.getppid() != parent:  # it died between fork and prctl
                os._exit(1)

        self._process = subprocess.Popen(
            list(argv),
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=there,
            stderr=there,
            start_new_session=True,  # Ctrl-C reaches this process alone, which passes it on
            pass_fds=() if keep_fd is None else (keep_fd,),
            preexec_fn=in_child,
        )
        os.close(there)
        self.pid = self._process.pid

    def wait(self, on_tick: Callable[[], None] = lambda: None) -> int:
        """Pass output on until the command ends; return its exit code (128 + n for signal n)."""
        next_sample = 0.0
        status: int | None = None
        while status is None:
            self._pump(0.1)
            on_tick()
            if time.monotonic() >= next_sample:
                self.peak_memory_bytes = max(self.peak_memory_bytes, memory_bytes(self.pid))
                next_sample = time.monotonic() + _SAMPLE_SECONDS
            pid, wait_status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                status = os.waitstatus_to_exitcode(wait_status)
                self._process.returncode = status
                # Linux gives kilobytes; a short peak between two samples shows here.
                self.peak_memory_bytes = max(self.peak_memory_bytes, usage.ru_maxrss * 1024)
                self.cpu_seconds = usage.ru_utime + usage.ru_stime
        while self._pump(0.0):
            pass
        self._log.write(b"", final=True)
        self._file.close()
        os.close(self._fd)
        return status if status >= 0 else 128 - status

    def signal(self, number: int) -> None:
        """Send a signal to the command itself (which tells its own processes)."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def _pump(self, timeout: float) -> bool:
        """Pass waiting output on; return whether there was any."""
        try:
            ready, _, _ = select.select([self._fd], [], [], timeout)
            data = os.read(self._fd, 65536) if ready else b""
        except OSError:  # a pty whose other end is closed
            ready, data = [self._fd], b""
        if ready and not data and timeout:
            time.sleep(timeout)  # end of output, but the command still runs
        if data:
            self._log.write(data)
            if self._echo:
                with contextlib.suppress(BrokenPipeError):
                    sys.stdout.buffer.write(data)
                    sys.stdout.buffer.flush()
        return bool(data)


def _copy_window_size(fd: int) -> None:
    size = b""
    with contextlib.suppress(OSError):
        size = fcntl.ioctl(sys.stdout.fileno(), termios.TIOCGWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
    if not any(size):  # a terminal that does not say; bars of width 0 would not show
        size = struct.pack("HHHH", 24, 80, 0, 0)
    fcntl.ioctl(fd, termios.TIOCSWINSZ, size)


def _plain_newlines(fd: int) -> None:
    """Keep the command's line ends as they are: the real terminal adds the carriage return."""
    attributes = termios.tcgetattr(fd)
    attributes[1] &= ~termios.ONLCR
    termios.tcsetattr(fd, termios.TCSANOW, attributes)
