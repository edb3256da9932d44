"""The local executor: skips what is finished, continues after any death, leaves nothing behind."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]

WORKER = '''
"""worker.py OUT TEXT [--sleep S] [--read DIR] [--fail] [--resume] [--count FILE]"""
import argparse, os, signal, sys, time
from pathlib import Path
from gatewright import artifact
from gatewright.runlog import progress
p = argparse.ArgumentParser()
p.add_argument("out", type=Path); p.add_argument("text")
p.add_argument("--sleep", type=float, default=0); p.add_argument("--read", type=Path, nargs="*")
p.add_argument("--fail", action="store_true"); p.add_argument("--resume", action="store_true")
p.add_argument("--code", type=int, default=9)
p.add_argument("--count", type=Path); p.add_argument("--gb", type=float, default=0)
a = p.parse_args()
with open(a.count, "a") as f:
    f.write(a.text + chr(10))
if a.sleep:
    print("pid", os.getpid(), flush=True)
block = b"x" * int(a.gb * 2**30)
for _ in progress(range(10), desc=a.text):
    time.sleep(a.sleep / 10)
if a.fail:
    print("the reason", file=sys.stderr); sys.exit(3)
if a.resume:
    a.out.mkdir(exist_ok=True)
    with open(a.out / "steps", "a") as f:
        f.write("x")
    if len((a.out / "steps").read_text()) < 2:
        sys.exit(a.code)
    artifact.finish(a.out, kind="note")
else:
    parents = {str(i): r for i, r in enumerate(a.read or [])}
    with artifact.create(a.out, kind="note", parents=parents) as tmp:
        (tmp / "x").write_text(a.text)
print("made", a.text)
'''

PIPELINE = """
name = "t"
[params]
first = "one"
sleep = 0
more = ""
[step.a]
command = "python {worker} {{out}} {{first}} --count {count}"
out = "a"
[step.b]
command = "python {worker} {{out}} two-{{s}} --read {{a}} --sleep {{sleep}} --count {count} {more}"
needs = "a"
out = "b/{{s}}"
matrix = {{ s = [1, 2] }}
{extra}
[step.c]
command = "python {worker} {{out}} three --read {{b}} --count {count}"
needs = "b"
out = "c"
"""


class Bench:
    """A pipeline of small tasks in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.run_dir, self.count = folder / "run", folder / "count"
        self.file, self.worker = folder / "t.toml", folder / "worker.py"
        self.worker.write_text(WORKER)
        self.write()

    def write(self, more: str = "", extra: str = "") -> None:
        self.file.write_text(
            PIPELINE.format(worker=self.worker, count=self.count, more=more, extra=extra)
        )

    def argv(self, *flags: str) -> list[str]:
        args = [str(self.file), "--local", "--run", str(self.run_dir), *flags]
        return [sys.executable, "-m", "slurm.pipeline", *args]

    def run(self, *flags: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.argv(*flags), cwd=ROOT, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done

    def start(self, *flags: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(self.argv(*flags), cwd=ROOT, stdout=subprocess.PIPE, text=True)

    def ran(self) -> list[str]:
        """Return the tasks that ran since the last call, in order."""
        text = self.count.read_text().split() if self.count.exists() else []
        self.count.unlink(missing_ok=True)
        return text

    def worker_pids(self) -> list[int]:
        found = []
        for process in psutil.process_iter(["cmdline"]):
            if str(self.worker) in (process.info["cmdline"] or []):
                found.append(process.pid)
        return found


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def wait_for(condition: Callable[[], object], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def test_a_second_run_does_nothing_and_a_changed_one_only_what_follows(bench: Bench) -> None:
    first = bench.run()
    assert bench.ran() == ["one", "two-1", "two-2", "three"]
    assert "total" in first.stdout
    second = bench.run()
    assert bench.ran() == []
    assert second.stdout.count("finished before") == 4
    assert "made three" in second.stdout  # the last step's output is shown again
    bench.write(more="--gb 0.001")  # another command for b, same output: c's inputs are equal
    bench.run()
    assert bench.ran() == ["two-1", "two-2"]
    bench.run("--set", "first=uno")
    assert bench.ran() == ["uno", "two-1", "two-2"]
    assert not list(bench.run_dir.rglob("*.stale"))


def test_from_runs_again_and_only_runs_alone(bench: Bench) -> None:
    bench.run("--only", "c", code=2)
    assert bench.ran() == []
    bench.run("--only", "a")
    assert bench.ran() == ["one"]
    bench.run()
    bench.ran()
    bench.run("--from", "b")
    assert bench.ran() == ["two-1", "two-2", "three"]
    dry = bench.run("--from", "c", "--dry-run")
    assert bench.ran() == []
    assert "1 of 4 would run" in dry.stdout


def test_damage_to_an_output_is_noticed(bench: Bench) -> None:
    bench.run()
    bench.ran()
    manifest = bench.run_dir / "b" / "2" / "manifest.json"
    changed = {**json.loads(manifest.read_text()), "content_hash": "0"}
    manifest.write_text(json.dumps(changed))
    (bench.run_dir / "a" / "manifest.json").unlink()
    bench.run()
    assert bench.ran() == ["one", "two-2"]  # a came out equal, so b/1 and c stand


def test_a_failure_names_step_command_log_and_the_way_on(bench: Bench) -> None:
    bench.write(more="--fail")
    failed = bench.run(code=1)
    for part in ("step 'b[s=1]' failed: exit code 3", "worker.py", "| the reason"):
        assert part in failed.stderr
    assert "to continue: python -m slurm.pipeline" in failed.stdout
    assert bench.ran() == ["one", "two-1"]
    record = json.loads((bench.run_dir / "pipeline" / "tasks" / "b.s=1.json").read_text())
    assert (record["state"], record["exit_code"]) == ("failed", 3)
    assert "the reason" in (bench.run_dir / record["log"]).read_text()
    bench.write()
    bench.run()
    assert bench.ran() == ["two-1", "two-2", "three"]


def test_a_command_that_leaves_no_output_has_failed(bench: Bench) -> None:
    bench.file.write_text('name = "t"\n[step.a]\ncommand = "true"\nout = "a"\n')
    assert "left no finished output" in bench.run(code=1).stderr


def test_a_step_that_resumes_keeps_its_folder(bench: Bench) -> None:
    bench.write(more="--resume", extra="resumes = true")
    bench.run(code=1)  # the first attempt stops half way with exit code 9
    bench.run(code=1)  # it carries on and finishes; b/2 now stops half way
    bench.run()
    assert (bench.run_dir / "b" / "1" / "steps").read_text() == "xx"
    bench.ran()
    bench.write(more="--resume --gb 0.001", extra="resumes = true")
    bench.run(code=1)  # another command: the old folder is set aside, not carried on
    assert (bench.run_dir / "b" / "1" / "steps").read_text() == "x"
    assert (bench.run_dir / "b" / "1.stale" / "steps").read_text() == "xx"


def test_a_command_that_saved_and_asks_for_more_is_run_again(bench: Bench) -> None:
    bench.write(more="--resume --code 75", extra="resumes = true")
    done = bench.run()
    assert bench.ran() == ["one", "two-1", "two-1", "two-2", "two-2", "three"]
    assert done.stdout.count("asks to be run again") == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_killed_run_leaves_no_process_and_continues(bench: Bench, number: int) -> None:
    process = bench.start("--set", "sleep=30")
    wait_for(lambda: bench.count.exists() and "two-1" in bench.count.read_text())
    process.send_signal(number)
    code = process.wait(timeout=120)
    assert code == (-9 if number == signal.SIGKILL else 128 + number)
    wait_for(lambda: not bench.worker_pids(), 60)
    bench.ran()
    bench.run("--set", "sleep=0")
    assert bench.ran() == ["two-1", "two-2", "three"]


def test_two_runs_do_not_share_a_folder(bench: Bench) -> None:
    process = bench.start("--set", "sleep=30")
    wait_for(bench.worker_pids)
    refused = bench.run(code=2)
    assert "another pipeline works in this folder" in refused.stderr
    process.terminate()
    process.wait(timeout=120)


def test_the_progress_bar_redraws_on_a_terminal_and_the_log_stays_readable(bench: Bench) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        bench.argv("--set", "sleep=1"), cwd=ROOT, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:
            break
        if not data:
            break
        seen += data
    assert process.wait(timeout=120) == 0
    assert seen.count(b"\rtwo-1:") > 3, seen
    log = (bench.run_dir / "pipeline" / "logs" / "b.s=1.log").read_text()
    bars = [line for line in log.splitlines() if line.startswith("two-1:")]
    assert len(bars) == 1
    assert "100%" in bars[0]
    assert "\r" not in log


def test_peak_memory_is_recorded(bench: Bench) -> None:
    bench.write(more="--gb 0.3")
    bench.run()
    record = json.loads((bench.run_dir / "pipeline" / "tasks" / "b.s=1.json").read_text())
    assert 0.3 < record["peak_memory_bytes"] / 2**30 < 0.6
