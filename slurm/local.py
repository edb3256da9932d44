"""The executor for this machine: one task after another, each skipped if it is finished."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from gatewright import artifact
from gatewright.errors import UserError
from slurm import child, plan
from slurm.environment import environment
from slurm.spec import Pipeline, Task

CODE = Path(__file__).resolve().parent.parent
"""The checkout that the commands run in."""
_STOP_SECONDS = 60.0  # for a stopped command to save and leave
_TAIL_LINES = 20


class _Stop:
    """Remembers that this process was asked to stop, and how often."""

    def __init__(self) -> None:
        self.number = 0
        self.count = 0
        self.since = 0.0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.number, self.count = number, self.count + 1
        self.since = self.since or time.monotonic()


@contextlib.contextmanager
def stoppable() -> Iterator[_Stop]:
    """Let requests to stop (SIGINT, SIGTERM, SIGHUP) be remembered instead of obeyed."""
    stop = _Stop()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, stop) for number in numbers]
    try:
        yield stop
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@contextlib.contextmanager
def locked(run: Path) -> Iterator[int]:
    """Hold the run folder for this process and its commands; yield the lock's descriptor.

    Raises:
        UserError: another pipeline works in it, or it cannot be written.
    """
    folder = run / plan.RECORDS
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as e:
        raise UserError(
            f"--run {run}: cannot be made or written ({e.strerror}); choose another folder"
        ) from e
    try:
        # A pipeline that was killed leaves a command that is still saving: wait for it.
        deadline = time.monotonic() + _STOP_SECONDS
        said = False
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                owner = os.pread(fd, 32, 0).decode().strip()
                alive = owner.isdigit() and Path(f"/proc/{owner}").exists()
                if alive or time.monotonic() > deadline:
                    raise UserError(
                        f"{run}: another pipeline works in this folder (process {owner}); "
                        "wait for it, stop it, or choose another --run"
                    ) from None
                if not said:
                    print("waiting for the commands of an interrupted run to end", flush=True)
                    said = True
                time.sleep(0.2)
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        yield fd
    finally:
        os.close(fd)


def command_line(task: Task, run: Path) -> list[str]:
    """Return the words that run a task on this machine: torchrun where it takes processes."""
    argv = task.argv(str(run))
    processes = task.step.processes or 1
    if argv[0] == "python":
        argv[0] = sys.executable
        if processes > 1:
            torchrun = ["-m", "torch.distributed.run", "--standalone"]
            argv[1:1] = [*torchrun, f"--nproc-per-node={processes}"]
    return argv


def shown(argv: list[str]) -> str:
    """Return a command as people would type it in the checkout."""
    words = ["python" if w == sys.executable else w.replace(f"{CODE}/", "") for w in argv]
    return shlex.join(words)


def clock(seconds: float) -> str:
    """Return a duration as m:ss or h:mm:ss."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


def tail(path: Path, lines: int = _TAIL_LINES) -> list[str]:
    """Return the last lines of a log, of a long one without reading all."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as f:
        f.seek(max(0, f.seek(0, os.SEEK_END) - 65536))
        return f.read().decode(errors="replace").splitlines()[-lines:]
    return []


def reasons(
    pipeline: Pipeline, run: Path, chosen: list[Task], forced: set[str]
) -> dict[str, str | None]:
    """Return task name -> why it will run (None: it is finished), without running anything."""
    found: dict[str, str | None] = {}
    for task in pipeline.tasks:
        if task not in chosen:
            continue
        waits = [p.name for p in pipeline.parents(task) if found.get(p.name) is not None]
        if waits:
            found[task.name] = f"after {waits[0]}"
        elif task.step.name in forced:
            found[task.name] = "asked for"
        else:
            found[task.name] = plan.why_run(pipeline, run, task)
    return found


def check_parents(pipeline: Pipeline, run: Path, chosen: list[Task]) -> None:
    """Refuse to run a task alone whose parents are not finished."""
    for task in chosen:
        for parent in pipeline.parents(task):
            if parent not in chosen and not plan.has_manifests(run, parent):
                raise UserError(
                    f"step {task.name!r} needs {parent.name!r}, which is not finished: "
                    "run it first, or leave --only out"
                )


def dry_run(pipeline: Pipeline, run: Path, chosen: list[Task], forced: set[str]) -> int:
    """Print what a run would do."""
    why = reasons(pipeline, run, chosen, forced)
    width = max(len(t.name) for t in chosen)
    for number, task in enumerate(chosen, 1):
        reason = why[task.name]
        state = f"run: {reason}" if reason else "finished"
        print(f"[{number:2}/{len(chosen)}] {task.name:<{width}}  {state}")
        print(f"        {shown(command_line(task, run))}")
    todo = sum(r is not None for r in why.values())
    print(f"{todo} of {len(chosen)} would run in {run}; nothing was started (--dry-run)")
    return 0


def check_nodes(chosen: list[Task]) -> None:
    """Refuse what one machine cannot run."""
    for task in chosen:
        if task.step.resources.nodes > 1:
            raise UserError(
                f"step {task.name!r} takes {task.step.resources.nodes} nodes: use --submit"
            )


def execute(
    pipeline: Pipeline,
    run: Path,
    chosen: list[Task],
    forced: set[str],
    again: str,
    lock_fd: int,
) -> int:
    """Run the chosen tasks in order, skipping finished ones; return the exit code.

    Args:
        forced: names of steps that run although finished.
        again: the command line that continues this run, for messages.
        lock_fd: the run's lock, which the commands inherit.
    """
    began = time.monotonic()
    child.adopt_orphans()
    with stoppable() as stop:
        why = reasons(pipeline, run, chosen, forced)
        todo = [t for t in chosen if why[t.name] is not None]
        print(
            f"{pipeline.name}: {len(chosen)} steps, {len(chosen) - len(todo)} finished, "
            f"{len(todo)} to run; folder {run}",
            flush=True,
        )
        states: dict[str, str] = {}
        code = 0
        for number, task in enumerate(chosen, 1):
            reason = "asked for" if task.step.name in forced else plan.why_run(pipeline, run, task)
            if reason is None:
                plan.adopt(run, task)
                states[task.name] = "finished before"
                continue
            elapsed = clock(time.monotonic() - began)
            print(f"\n[{number}/{len(chosen)}] {task.name}  ({reason}; {elapsed} so far)")
            code = _run_one(pipeline, run, task, lock_fd, stop, task.step.name in forced)
            record = plan.read_record(run, task)
            assert record is not None
            states[task.name] = record.state
            if code:
                break
        last_is_old = bool(chosen) and states.get(chosen[-1].name) == "finished before"
        if last_is_old and not code:
            print("\n" + "\n".join(tail(plan.log_path(run, chosen[-1]), 60)))
        _print_summary(run, chosen, states, time.monotonic() - began)
        if code:
            print(f"to continue: {again}   (finished steps are skipped)", flush=True)
        return code


def _run_one(
    pipeline: Pipeline, run: Path, task: Task, lock_fd: int, stop: _Stop, anew: bool
) -> int:
    """Run one task and record it; return 0, or the exit code to leave with."""
    argv = command_line(task, run)
    print(f"$ {shown(argv)}", flush=True)
    log = plan.log_path(run, task)
    log.parent.mkdir(parents=True, exist_ok=True)
    if task.step.resumes and log.exists():
        with open(log, "a", encoding="utf-8") as f:
            f.write(f"\n--- again, {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    else:
        log.write_text("")
    record = plan.begin(pipeline, run, task, argv, log, anew=anew)
    while True:
        mark = plan.progress_mark(run, task)
        running = child.Child(argv, cwd=CODE, env=environment(task), log=log, keep_fd=lock_fd)
        exit_code = _wait(running, stop)
        record.peak_memory_bytes = max(record.peak_memory_bytes, running.peak_memory_bytes)
        record.cpu_seconds += running.cpu_seconds
        if exit_code != plan.EXIT_RUN_AGAIN or stop.count:
            break
        if plan.progress_mark(run, task) == mark:
            print("the command asks to be run again but got nowhere", flush=True)
            break
        print("the command saved and asks to be run again", flush=True)
    record = plan.end(run, task, record, exit_code, stopped=bool(stop.count))
    memory = record.peak_memory_bytes / 2**30
    spent = time.time() - record.started
    print(f"[{task.name}] {record.state} in {spent:.1f} s, peak memory {memory:.2f} GB", flush=True)
    if stop.count:
        # If the command finished all the same, what follows it is still left to do.
        return 128 + stop.number
    if record.state == "done":
        return 0
    what = f"exit code {exit_code}" if exit_code else "left no finished output (manifest.json)"
    print(f"\nstep {task.name!r} failed: {what}", file=sys.stderr)
    print(f"  command: {shown(argv)}", file=sys.stderr)
    print(f"  log:     {log}", file=sys.stderr)
    for line in tail(log):
        print(f"  | {line}", file=sys.stderr)
    sys.stderr.flush()
    return 1


def _wait(running: child.Child, stop: _Stop) -> int:
    """Wait for a command; pass a request to stop on to it, and end it if it does not leave."""
    told = 0

    def on_tick() -> None:
        nonlocal told
        if stop.count > told:
            told = stop.count
            if told == 1:
                print("\nstopping: the command may save first; again to end it at once", flush=True)
                running.signal(signal.SIGTERM)
            else:
                child.end_descendants(0.5)
        elif stop.count and time.monotonic() - stop.since > _STOP_SECONDS:
            child.end_descendants(0.5)

    try:
        return running.wait(on_tick)
    finally:
        child.end_descendants()


def _print_summary(run: Path, chosen: list[Task], states: dict[str, str], wall: float) -> None:
    width = max((len(t.name) for t in chosen), default=0)
    total, peak = 0.0, 0
    cpu = 0.0
    print(f"\n{'step':<{width}}  {'status':<15}  {'time':>7}  {'CPU time':>8}  peak memory")
    for task in chosen:
        state = states.get(task.name, "waits")
        record = plan.read_record(run, task) if state != "waits" else None
        if record is None:
            print(f"{task.name:<{width}}  {state:<15}")
            continue
        total += record.seconds
        cpu += record.cpu_seconds
        peak = max(peak, record.peak_memory_bytes)
        memory = f"{record.peak_memory_bytes / 2**30:.2f} GB"
        times = f"{clock(record.seconds):>7}  {clock(record.cpu_seconds):>8}"
        print(f"{task.name:<{width}}  {state:<15}  {times}  {memory:>8}")
    print(
        f"{'total':<{width}}  {'':<15}  {clock(total):>7}  {clock(cpu):>8}  {peak / 2**30:5.2f} GB "
        f"(this time {clock(wall)})",
        flush=True,
    )


def keep_pipeline_file(pipeline: Pipeline, run: Path, overrides: dict[str, str]) -> None:
    """Copy the pipeline file into the run, for status and for whoever reads the run later."""
    folder = run / plan.RECORDS
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(pipeline.path, folder / "pipeline.toml")
    artifact.write_json(folder / "settings.json", overrides)
