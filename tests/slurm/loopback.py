"""A throw-away Slurm on loopback (cluster.sh), as the tests use it."""

import contextlib
import datetime
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).parent / "cluster.sh"
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun")


def missing() -> str | None:
    """Return why there can be no cluster on this machine, or None."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"Slurm is not installed here ({', '.join(absent)} missing)"
    return None if os.geteuid() == 0 else "a throw-away Slurm needs root"


def pids_of(*argv: str) -> list[int]:
    return [p.pid for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == [*argv]]


class Cluster:
    """A running cluster and a folder for runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self.site = folder / "site.toml"
        self.site.write_text('account = ""\npartition = "gpu"\nsave_seconds = 60\n')

    def call(self, *argv: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            argv, cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == code, f"{argv}\n{done.stdout}{done.stderr}"
        return done

    def module(self, name: str, *args: str | Path, code: int = 0) -> str:
        done = self.call(sys.executable, "-m", name, *map(str, args), code=code)
        return done.stdout + done.stderr

    def submit(
        self, pipeline: Path, run: Path, *more: str, site: Path | None = None, code: int = 0
    ) -> str:
        args = [pipeline, "--submit", "--site", site or self.site, "--run", run, *more]
        return self.module("slurm.pipeline", *args, code=code)

    def status(self, run: Path) -> dict[str, dict[str, str]]:
        rows = json.loads(self.module("slurm.status", run, "--json"))
        return {row["task"]: row for row in rows}

    def skip_requeue_hold(self) -> None:
        """Start requeued jobs soon; Slurm holds them back for two minutes.

        Not at once: a node refuses a job that comes back within the second in which it left
        ("Job credential revoked"), and Slurm then ends it.
        """
        queue = self.call("squeue", "-h", "-r", "-t", "PD", "-o", "%i|%r|%S").stdout
        for line in queue.splitlines():
            job, reason, start = line.split("|")
            if reason != "BeginTime" or start == "N/A":
                continue
            held = datetime.datetime.fromisoformat(start) - datetime.datetime.now()
            if held.total_seconds() > 10:
                argv = ["scontrol", "update", f"JobId={job}", "StartTime=now+3"]
                subprocess.run(argv, env=self.env, capture_output=True, timeout=30)

    def kill_node(self, node: str, run: Path) -> None:
        """End a node's daemon and all that it runs for `run`, as a loss of power would."""
        doomed = [psutil.Process(int((self.folder / f"slurmd-{node}.pid").read_text()))]
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if {"slurm.job", "slurm.node"} & set(words) and any(str(run) in w for w in words):
                step = process.parent()  # slurmstepd
                doomed += [step, *step.children(recursive=True)] if step else [process]
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def start_node(self, node: str) -> None:
        self.call("slurmd", "-f", str(self.folder / "slurm.conf"), "-N", node)

    def wait(
        self, condition: Callable[[], object], seconds: float, run: Path, every: float = 0.1
    ) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                logs = [
                    f"== {p}\n{p.read_text(errors='replace')[-2000:]}" for p in run.rglob("*.log")
                ]
                raise AssertionError(self.module("slurm.status", run) + "\n".join(logs))
            time.sleep(every)

    def finish(self, run: Path, seconds: float) -> None:
        """Wait until nothing of the run waits or runs."""

        def quiet() -> bool:
            self.skip_requeue_hold()
            states = {row["state"] for row in self.status(run).values()}
            return not states & {"waits", "running"}

        self.wait(quiet, seconds, run, every=1)  # each look starts processes
