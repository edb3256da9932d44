"""The launcher on each node of a job: srun starts one of these a node.

A step with `processes` runs under torchrun, whose rendezvous takes node rank, master address
and port from Slurm's variables.  torchrun forwards no SIGUSR1 and hides its workers' exit codes;
this launcher tells the workers that the job must leave, and returns their code, so that "saved,
run me again" (75) and "bad input" (2) reach the job.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil

from gatewright import cli
from gatewright.errors import UserError
from slurm import plan, submission
from slurm.environment import environment
from slurm.site import Site
from slurm.spec import Task

_LOOK_SECONDS = 1.0
_OTHERS_SECONDS = 10
_FIRST_PORT, _PORTS = 20_000, 12_000  # below the range that Linux gives to clients


def master_port(env: Mapping[str, str]) -> int:
    """Return the rendezvous port of a job step: reserved by Slurm, or else from its ids.

    Every node computes the same; jobs that share a node, and a job's own restarts, differ.
    """
    reserved = env.get("SLURM_STEP_RESV_PORTS", "")
    if reserved:
        return int(reserved.split(",")[0].split("-")[0])
    job, step = int(env["SLURM_JOB_ID"]), int(env.get("SLURM_STEP_ID", "0"))
    restart = int(env.get("SLURM_RESTART_COUNT", "0"))
    return _FIRST_PORT + (job * 31 + restart * 7 + step) % _PORTS


def rendezvous(nodes: int, env: Mapping[str, str]) -> list[str]:
    """Return torchrun's flags for how the nodes of a job find each other."""
    if nodes == 1:  # any free port will do, and nobody else needs to know it
        return ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    return [
        f"--node-rank={env['SLURM_NODEID']}",
        # srun runs on the first node of the allocation, which has SLURM_NODEID 0.
        f"--master-addr={env['SLURM_LAUNCH_NODE_IPADDR']}",
        f"--master-port={master_port(env)}",
    ]


def run_command(argv: list[str], env: dict[str, str], requests: LeaveRequests) -> int:
    """Run one command on this node and return its exit code."""
    process = subprocess.Popen(argv, env=env)
    with requests.watched(lambda: [psutil.Process(process.pid)]):
        code = process.wait()
    return code if code >= 0 else 128 - code


def run_torchrun(
    task: Task, argv: list[str], env: Mapping[str, str], requests: LeaveRequests
) -> int:
    """Run a command under torchrun; return 0 or its workers' exit code (75 if any says so)."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    nodes = task.step.resources.nodes
    flags = [f"--nnodes={nodes}", f"--nproc-per-node={task.step.processes}"]
    flags += rendezvous(nodes, env)
    try:
        with requests.watched(_rank_0):
            torchrun.run(torchrun.parse_args([*flags, *argv[1:]]))
    except ChildFailedError as e:
        codes = [failure.exitcode for failure in e.failures.values()]
        if plan.EXIT_RUN_AGAIN in codes:
            return plan.EXIT_RUN_AGAIN
        print(str(e), file=sys.stderr)
        first = e.get_first_failure()[1].exitcode
        return first if first >= 0 else 128 - first
    return 0


def _rank_0() -> list[psutil.Process]:
    """Return the worker that hears requests to leave, on the node that has it.

    Training processes agree on leaving, so one is enough; a second one that heard of it later
    could be on its way out already, with its signal handler gone, and die while it saves.
    """
    found = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("RANK") == "0":
                found.append(process)
    return found


class LeaveRequests:
    """Passes a job's request to leave on to a command on this node, once."""

    def __init__(self, run: Path, task: Task, job: str) -> None:
        self._run, self._task, self._job = run, task, job

    @contextlib.contextmanager
    def watched(self, processes: Callable[[], list[psutil.Process]]) -> Iterator[None]:
        """Look for a request while the block runs; then send SIGUSR1 to `processes()`."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(_LOOK_SECONDS):
                if plan.asked_to_leave(self._run, self._task, self._job):
                    for process in processes():
                        with contextlib.suppress(psutil.Error):
                            process.send_signal(signal.SIGUSR1)
                    return

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def leave_together(code: int, nodes: int) -> int:
    """Return the exit code; on several nodes wait for the others that saved, too.

    srun ends the other launchers as soon as one fails, and then reports 143 for them.  So a
    launcher that has its code keeps it to the last: Python's own way out would restore the
    default action of SIGTERM first.
    """
    if code == plan.EXIT_RUN_AGAIN and nodes > 1:
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(code))
        time.sleep(_OTHERS_SECONDS)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def launch(task: Task, site: Site, run: Path) -> int:
    """Start a task's command on this node and return its exit code."""
    argv = task.argv(str(run))
    env = environment(task, site.env)
    requests = LeaveRequests(run, task, env["SLURM_JOB_ID"])
    if argv[0] == "python":
        argv[0] = sys.executable
        if task.step.processes:
            os.environ.update(env)
            code = run_torchrun(task, argv, env, requests)
            return leave_together(code, task.step.resources.nodes)
    return run_command(argv, env, requests)


def main(args: submission.TaskArgs) -> int:
    """Run a task's command on this node (srun starts one of these on each)."""
    if "SLURM_JOB_ID" not in os.environ:
        raise UserError("runs inside a Slurm job only; python -m slurm.pipeline submits one")
    _, site, task = args.load()
    return launch(task, site, args.submission.parents[2])


if __name__ == "__main__":
    cli.run(main, submission.TaskArgs, prog="python -m slurm.node")
