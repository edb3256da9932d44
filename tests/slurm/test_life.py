"""Jobs on a real Slurm through deaths of every kind: requeues, cancel, lost nodes, final errors."""

import os
import signal
from pathlib import Path

import pytest

from tests.slurm.loopback import Cluster, pids_of

pytestmark = [pytest.mark.slurm]

WORKER = '''
"""worker.py OUT STEPS: counts steps over all processes; saves and leaves on SIGUSR1."""
import os, signal, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from gatewright import artifact
out, steps = Path(sys.argv[1]), int(sys.argv[2])
leave = []
signal.signal(signal.SIGUSR1, lambda number, frame: leave.append(number))
dist.init_process_group("gloo")
rank = dist.get_rank()
print(f"rank {rank} of {dist.get_world_size()} on node {os.environ['SLURM_NODEID']}, "
      f"threads {os.environ['OMP_NUM_THREADS']}\\n", end="", flush=True)
out.mkdir(parents=True, exist_ok=True)
state = out / "state"
step = int(state.read_text()) if state.exists() else 0
print(f"begins at {step}\\n", end="", flush=True)  # one write: two nodes share the log
while step < steps:
    time.sleep(0.1)
    step += 1
    asked = torch.tensor([float(bool(leave))])
    dist.all_reduce(asked)
    if rank == 0 and (asked or step % 10 == 0):
        state.write_text(str(step))
    if asked:
        dist.barrier()
        sys.exit(75)
if rank == 0:
    artifact.finish(out, kind="note")
'''

DISTRIBUTED = """
name = "distributed"
[defaults]
time = "00:10:00"
[step.two-nodes]
command = "python {worker} {{out}} {steps}"
out = "two"
resumes = true
nodes = 2
processes = 1
cpus = 2
[step.after]
command = "cp -r {{two-nodes}} {{out}}"
needs = ["two-nodes"]
out = "after"
"""


def test_torchrun_over_two_nodes_saves_requeues_and_the_chain_goes_on(
    cluster: Cluster, tmp_path: Path
) -> None:
    worker, file, run = tmp_path / "worker.py", tmp_path / "d.toml", tmp_path / "run"
    worker.write_text(WORKER)
    file.write_text(DISTRIBUTED.format(worker=worker, steps=150))  # 15 s: room for a signal
    cluster.submit(file, run)
    state, log = run / "two" / "state", run / "pipeline" / "logs" / "two-nodes.log"
    job = cluster.status(run)["two-nodes"]["job"]
    cluster.wait(state.exists, 240, run)
    cluster.call("scancel", "--batch", "--signal=USR1", job)
    cluster.finish(run, 600)
    text = log.read_text()
    assert {row["state"] for row in cluster.status(run).values()} == {"finished"}, text
    for rank in range(2):
        assert f"rank {rank} of 2 on node {rank}, threads 2" in text
    assert "saved (exit code 75); back into the queue" in text
    begun = [int(line.split()[-1]) for line in text.splitlines() if line.startswith("begins at")]
    assert begun[0] == 0
    assert begun[-1] >= 10  # it went on from what it had saved


COUNTER = '''
"""counter.py OUT: counts until it is told to save; says where it began."""
import signal, sys, time
from pathlib import Path
out = Path(sys.argv[1])
leave = []
signal.signal(signal.SIGUSR1, lambda number, frame: leave.append(number))
out.mkdir(parents=True, exist_ok=True)
state = out / "state"
step = int(state.read_text()) if state.exists() else 0
print("begins at", step, flush=True)
while not leave:
    time.sleep(0.02)
    step += 1
state.write_text(str(step))
sys.exit(75)
'''


def test_cancel_saves_and_a_later_submission_takes_only_the_rest(
    cluster: Cluster, tmp_path: Path
) -> None:
    worker, file, run = tmp_path / "counter.py", tmp_path / "c.toml", tmp_path / "run"
    worker.write_text(COUNTER)
    file.write_text(
        f'name = "c"\n[step.a]\ncommand = "python {worker} {{out}}"\nout = "a"\n'
        'resumes = true\n[step.b]\ncommand = "true {a}"\nneeds = ["a"]\nout = "b"\n'
    )
    cluster.submit(file, run)
    log, state = run / "pipeline" / "logs" / "a.log", run / "a" / "state"
    cluster.wait(lambda: log.exists() and "begins at 0" in log.read_text(), 240, run)
    assert "2 of them still in the queue" in cluster.submit(file, run)
    assert "is in the queue" in cluster.submit(file, run, "--from", "a", code=2)
    local = ["--local", "--run", run]
    assert "has jobs in the queue" in cluster.module("slurm.pipeline", file, *local, code=2)
    assert "cancelled 2 jobs" in cluster.module("slurm.cancel", run)
    rows = cluster.status(run)
    assert (rows["a"]["state"], rows["b"]["state"]) == ("stopped", "cancelled")
    saved = int(state.read_text())
    assert saved > 0
    assert "nothing of it is in the queue" in cluster.module("slurm.cancel", run)
    assert "2 jobs, 2 tasks" in cluster.submit(file, run)
    cluster.wait(lambda: f"begins at {saved}" in log.read_text(), 240, run)
    cluster.module("slurm.cancel", run, "--now")


STEADY = '''
"""steady.py OUT STEPS: saves after every step, and takes a while."""
import sys, time
from pathlib import Path
from gatewright import artifact
out, steps = Path(sys.argv[1]), int(sys.argv[2])
out.mkdir(parents=True, exist_ok=True)
state = out / "state"
step = int(state.read_text()) if state.exists() else 0
print("begins at", step, flush=True)
while step < steps:
    time.sleep(0.05)
    step += 1
    artifact.write_json(state, step)  # whole or not at all
artifact.finish(out, kind="note")
'''


def test_a_job_whose_node_fails_goes_on_elsewhere(cluster: Cluster, tmp_path: Path) -> None:
    worker, file, run = tmp_path / "steady.py", tmp_path / "n.toml", tmp_path / "run"
    worker.write_text(STEADY)
    file.write_text(
        f'name = "n"\n[step.a]\ncommand = "python {worker} {{out}} 100"\nout = "a"\n'
        'resumes = true\n[step.b]\ncommand = "cp -r {a} {out}"\nneeds = ["a"]\nout = "b"\n'
    )
    cluster.submit(file, run)
    cluster.wait((run / "a" / "state").exists, 240, run)
    job = cluster.status(run)["a"]["job"]
    node = cluster.call("squeue", "-h", "-j", job, "-o", "%N").stdout.strip()
    cluster.kill_node(node, run)
    try:
        cluster.finish(run, 600)
    finally:
        cluster.start_node(node)
    rows = cluster.status(run)
    assert {row["state"] for row in rows.values()} == {"finished"}, rows
    assert rows["a"]["job"] == job
    log = (run / "pipeline" / "logs" / "a.log").read_text()
    begun = [int(line.split()[-1]) for line in log.splitlines() if line.startswith("begins at")]
    assert len(begun) == 2
    assert begun[1] > 0


def test_bad_input_is_final_and_stops_what_follows(cluster: Cluster, tmp_path: Path) -> None:
    file, run = tmp_path / "bad.toml", tmp_path / "run"
    file.write_text(
        'name = "bad"\n[step.a]\ncommand = "python -m tokenizer.train --corpus /none '
        '--vocab-size 512 --out {out}"\nout = "a"\nresumes = true\n'
        '[step.b]\ncommand = "true {a}"\nneeds = ["a"]\nout = "b"\n'
    )
    cluster.submit(file, run)
    cluster.finish(run, 240)
    rows = cluster.status(run)
    assert (rows["a"]["state"], rows["a"]["why"]) == ("failed", "exit code 2")
    assert any("error: --corpus /none" in line for line in rows["a"]["tail"])
    assert (rows["b"]["state"], rows["b"]["why"]) == ("cancelled", "because a failed")
    log = (run / "pipeline" / "logs" / "a.log").read_text()
    assert "starting again" not in log


def test_a_step_that_cannot_resume_fails_and_says_so(cluster: Cluster, tmp_path: Path) -> None:
    """A step without checkpoints that reaches its limit fails, and status says why."""
    file, run = tmp_path / "p.toml", tmp_path / "run"
    file.write_text(
        'name = "p"\n[step.a]\ncommand = "sleep 300.25"\nout = "a"\n'
        '[step.b]\ncommand = "true {a}"\nneeds = ["a"]\nout = "b"\n'
    )
    cluster.submit(file, run)
    log = run / "pipeline" / "logs" / "a.log"
    job = cluster.status(run)["a"]["job"]
    cluster.wait(lambda: pids_of("sleep", "300.25"), 240, run)
    assert cluster.status(run)["a"]["state"] == "running"
    cluster.call("scancel", "--batch", "--signal=USR1", job)
    cluster.wait(lambda: "cannot resume" in log.read_text(), 120, run)
    for pid in pids_of("sleep", "300.25"):
        os.kill(pid, signal.SIGTERM)
    cluster.finish(run, 240)
    rows = cluster.status(run)
    assert (rows["a"]["state"], rows["a"]["why"]) == ("failed", "exit code 143")
    assert rows["b"]["state"] == "cancelled"
