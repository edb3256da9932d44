"""Runs side by side: the same rows as one after the other, and what a killed process leaves."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from gatewright import artifact
from gatewright.errors import UserError
from synthetic.arguments import GatedRunArgs, one_at_a_time
from synthetic.ranks import Diverged, Ranks, fill
from synthetic.sweep import Sweep


@dataclasses.dataclass(frozen=True)
class Run:
    number: int

    def key(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def execute(run: Run, ranks: Ranks) -> dict[str, Any]:
    value = torch.randn(3, generator=torch.Generator().manual_seed(run.number)).sum()
    return {**run.key(), "value": float(value), "process": os.getpid(), "rank": ranks.rank}


def wait_for(mark: Path) -> None:
    deadline = time.monotonic() + 600
    while not mark.exists():
        assert time.monotonic() < deadline, f"no {mark.name} within 600 s"
        time.sleep(0.01)


def meet(run: Run, ranks: Ranks) -> dict[str, Any]:
    """Runs 0 and 1 wait for each other: no process can do both, however late the other starts."""
    if run.number < 2:
        (Path(os.environ["MARKS"]) / str(run.number)).touch()
        wait_for(Path(os.environ["MARKS"]) / str(1 - run.number))
    return execute(run, ranks)


def die_at_two(run: Run, ranks: Ranks) -> dict[str, Any]:
    if run.number == 2:
        os._exit(9)
    return execute(run, ranks)


def finish(sweep: Sweep) -> None:
    sweep.finish({"runs": len(sweep.rows)})


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def test_two_processes_give_the_rows_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARKS", str(tmp_path))
    runs = [Run(i) for i in range(5)]
    for out, function, count in (("one", execute, 1), ("two", meet, 2)):
        fill(tmp_path / out, "n", {}, runs, function, finish, "cpu", processes=count)
    one, two = rows(tmp_path / "one"), rows(tmp_path / "two")
    assert [r["number"] for r in one] == list(range(5))
    values = [sorted((r["number"], r["value"]) for r in found) for found in (one, two)]
    assert values[0] == values[1]  # side by side in the order in which they ended
    assert {r["process"] for r in one} == {os.getpid()}
    assert len({r["process"] for r in two} | {os.getpid()}) == 3


def test_a_killed_process_ends_the_sweep_which_then_goes_on(tmp_path: Path) -> None:
    runs, out = [Run(i) for i in range(4)], tmp_path / "out"
    with pytest.raises(
        UserError, match=r"--processes 2: one ended before its run did.*again"
    ) as caught:
        fill(out, "n", {}, runs, die_at_two, finish, "cpu", processes=2)
    assert "\n" not in str(caught.value)
    assert not (out / artifact.MANIFEST).exists()
    fill(out, "n", {}, runs, execute, finish, "cpu", processes=2)
    assert sorted(r["number"] for r in rows(out)) == [0, 1, 2, 3]


def fail_at_zero_late(run: Run, ranks: Ranks) -> dict[str, Any]:
    if run.number == 0:
        wait_for(Path(os.environ["MARKS"]) / "1")
        raise ZeroDivisionError("run 0")
    (Path(os.environ["MARKS"]) / str(run.number)).touch()
    time.sleep(0.2 * run.number)  # run 2 still goes on when run 0 has failed
    return execute(run, ranks)


def test_a_failed_run_loses_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARKS", str(tmp_path))
    out = tmp_path / "out"
    with pytest.raises(ZeroDivisionError, match="run 0"):
        fill(out, "n", {}, map(Run, range(40)), fail_at_zero_late, finish, "cpu", processes=2)
    found = {r["number"] for r in rows(out)}
    assert {1, 2} <= found  # what ended before it, and what ran beside it
    assert 0 not in found
    assert len(found) < 10  # and no other was started


def diverge_at_one(run: Run, ranks: Ranks) -> dict[str, Any]:
    if run.number == 1:
        raise Diverged("run 1: the loss is not finite before step 7")
    return execute(run, ranks)


def test_a_diverged_run_is_a_row_of_its_own_kind(tmp_path: Path) -> None:
    out, runs = tmp_path / "out", [Run(i) for i in range(3)]
    partial = out / "partial.pt"

    def execute_one(run: Run, ranks: Ranks) -> dict[str, Any]:
        partial.touch()
        return diverge_at_one(run, ranks)

    fill(out, "n", {}, runs, execute_one, finish, "cpu", partial=partial)
    assert rows(out)[1] == {"number": 1, "failed": "run 1: the loss is not finite before step 7"}
    assert json.loads((out / "summary.json").read_text()) == {"runs": 3}
    assert not partial.exists()


def test_a_kept_run_is_removed_only_once_its_row_is_on_disk(tmp_path: Path) -> None:
    out = tmp_path / "out"
    partial = out / "partial.pt"

    def execute_one(run: Run, ranks: Ranks) -> dict[str, Any]:
        assert len(rows(out)) == run.number
        assert not partial.exists()
        partial.touch()
        if run.number == 2:
            raise KeyboardInterrupt
        return execute(run, ranks)

    with pytest.raises(KeyboardInterrupt):
        fill(out, "n", {}, map(Run, range(3)), execute_one, finish, "cpu", partial=partial)
    assert partial.exists()
    with (out / "results.jsonl").open("a") as f:
        f.write('{"number": 1}\n')
    with pytest.raises(UserError, match="line 3 repeats the run 1"):
        fill(out, "n", {}, map(Run, range(3)), execute_one, finish, "cpu", partial=partial)


SLOW = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
import {module} as t
from synthetic.ranks import fill

def execute(run, ranks):
    (Path(sys.argv[1]) / f"worker-{{os.getpid()}}").touch()
    time.sleep(600)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
    runs = [t.Run(i) for i in range(4)]
    fill(Path(sys.argv[1]) / "out", "n", {{}}, runs, execute, t.finish, "cpu", processes=2)
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_worker_outlives_its_parent(tmp_path: Path, sent: signal.Signals) -> None:
    script = tmp_path / "slow.py"
    here = Path(__file__)
    script.write_text(SLOW.format(tests=str(here.parent), module=here.stem))
    parent = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        cwd=here.parents[2],
        env={**os.environ, "PYTHONPATH": str(here.parents[2]), "GATEWRIGHT_QUIET": "1"},
        stderr=subprocess.PIPE,
    )
    workers: list[int] = []
    while len(workers) < 2:
        assert parent.poll() is None
        time.sleep(0.05)
        workers = [int(p.name.split("-")[1]) for p in tmp_path.glob("worker-*")]
    parent.send_signal(sent)
    assert parent.wait(timeout=120) != 0
    for _ in range(1200):
        if not any(_alive(w) for w in workers):
            break
        time.sleep(0.05)
    assert not any(_alive(w) for w in workers)


def _alive(process: int) -> bool:
    try:
        return "(python" in (text := Path(f"/proc/{process}/stat").read_text()) and (
            text.rpartition(")")[2].split()[0] != "Z"
        )
    except FileNotFoundError:
        return False


def test_the_cores_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    args = GatedRunArgs(Path("out"), threads=3)
    assert args.runs_at_a_time() == 2
    assert dataclasses.replace(args, threads=9).runs_at_a_time() == 1
    assert dataclasses.replace(args, device="cuda").runs_at_a_time() == 1
    assert dataclasses.replace(args, processes=5).runs_at_a_time() == 5
    assert one_at_a_time(args) == one_at_a_time(dataclasses.replace(args, processes=1)) == 1
    with pytest.raises(UserError, match="--processes 5: .*one after the other"):
        one_at_a_time(dataclasses.replace(args, processes=5))
    monkeypatch.delattr(os, "sched_getaffinity")  # macOS has none
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert args.runs_at_a_time() == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert args.runs_at_a_time() == 1
    with pytest.raises(UserError, match="--processes 5"):
        dataclasses.replace(args, processes=5).runs_at_a_time()
