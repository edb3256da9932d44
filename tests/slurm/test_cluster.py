"""A real Slurm on loopback: chains, deaths of every kind, requeues, status, cancel.

The cluster is Debian's slurm-wlm, brought up by cluster.sh.  Without it, or without being
root, these tests skip themselves and say why.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from gatewright import runlog
from tests.slurm.loopback import ROOT, SCRIPT, Cluster, missing, pids_of

pytestmark = [pytest.mark.slurm]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    reason = missing()
    if reason:
        pytest.skip(reason)
    # Sockets have short paths, so not below pytest's own folder.
    folder = Path(f"/tmp/gatewright-slurm-{os.getpid()}")
    began = time.monotonic()
    up = subprocess.run([SCRIPT, "up", folder], capture_output=True, text=True, timeout=60)
    try:
        assert up.returncode == 0, up.stdout + up.stderr
        assert time.monotonic() - began < 60
        yield Cluster(folder)
    finally:
        subprocess.run([SCRIPT, "down", folder], capture_output=True, timeout=60, check=False)
        left = [p for p in psutil.process_iter(["cmdline"]) if _belongs(p, folder)]
        shutil.rmtree(folder, ignore_errors=True)
    assert not left, f"the cluster left {left}"


def _belongs(process: psutil.Process, folder: Path) -> bool:
    alive = process.status() != psutil.STATUS_ZOMBIE
    return alive and any(str(folder) in word for word in process.info["cmdline"] or [])


TRAINING = """
name = "small"
[params]
text = "{text}"
steps = 120
[defaults]
cpus = 1
time = "00:20:00"

[step.tokenizer]
command = "python -m tokenizer.train --corpus {{text}} --vocab-size 512 --out {{out}}"
inputs = ["{{text}}"]
out = "tokenizer"

[step.corpus]
command = '''python -m pretrain.prepare --input {{text}} --tokenizer {{tokenizer}} --workers 1
    --out {{out}}'''
inputs = ["{{text}}"]
needs = ["tokenizer"]
out = "corpus"

[step.pretrain]
command = '''python -m pretrain.train mamba2_debug_cpu --data {{corpus}} --tokenizer {{tokenizer}}
    --out {{out}} --model.d-model 32 --model.n-layers 2 --model.d-state 16 --model.head-dim 16
    --model.chunk-size 16 --train.seq-len-tokens 32 --train.global-batch-sequences 2
    --train.micro-batch-sequences 2 --train.lr-warmup-steps 4 --train.steps {{steps}}
    --checkpoint.every-steps 10 --log.gates-every-steps 1000'''
matrix = {{ arm = ["undisturbed", "killed", "limited"] }}
needs = ["corpus", "tokenizer"]
out = "pretrain/{{arm}}"
resumes = true

[step.hf]
command = "python -m tools.convert {{pretrain}} --to hf --tokenizer {{tokenizer}} --out {{out}}"
matrix = {{ arm = ["undisturbed", "killed", "limited"] }}
needs = ["pretrain", "tokenizer"]
out = "hf/{{arm}}"

[step.pools]
command = '''python -m eval_bfcl.build_pools --split simple_python --retriever bm25
    --pool-sizes 1 --seeds 0 --out {{out}}'''
out = "pools"

[step.generate]
command = '''python -m eval_bfcl.generate --model {{hf}} --backend transformers --pools {{pools}}
    --limit 2 --max-new-tokens 4 --out {{out}}'''
matrix = {{ arm = ["undisturbed", "killed", "limited"] }}
needs = ["hf", "pools"]
out = "results/{{arm}}"
resumes = true

[step.score]
command = "python -m eval_bfcl.score --results {{generate}} --pools {{pools}} --out {{out}}"
matrix = {{ arm = ["undisturbed", "killed", "limited"] }}
needs = ["generate", "pools"]
out = "scores/{{arm}}"

[step.report]
command = "python -m eval_bfcl.report --scores {{score}} --out {{out}}"
needs = ["score"]
out = "report"
"""


@pytest.fixture(scope="module")
def corpus_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """English prose of this project's own documents, as JSONL."""
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    files = [ROOT / "LICENSE", ROOT / "CONTRIBUTING.md", ROOT / "docs" / "DECISIONS.md"]
    rows = [{"text": part} for f in files for part in f.read_text().split("\n\n") if part]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def losses(run: Path, arm: str) -> dict[int, float]:
    rows = runlog.read_metrics(run / "pretrain" / arm / "metrics.jsonl")
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def trained(run: Path, arm: str, steps: int) -> bool:
    path = run / "pretrain" / arm / "metrics.jsonl"
    return path.exists() and max(losses(run, arm), default=0) >= steps


def test_training_that_is_killed_or_meets_its_limit_ends_as_if_nothing_had_happened(
    cluster: Cluster, corpus_text: Path, tmp_path: Path
) -> None:
    file, run = tmp_path / "small.toml", tmp_path / "run"
    file.write_text(TRAINING.format(text=corpus_text))
    said = cluster.submit(file, run)
    assert "8 jobs, 16 tasks" in said
    jobs = {name: row["job"] for name, row in cluster.status(run).items()}

    cluster.wait(lambda: trained(run, "killed", 15), 240, run)
    victims = [
        p
        for p in psutil.process_iter(["cmdline"])
        if "pretrain.train" in (p.info["cmdline"] or [])
        and str(run / "pretrain" / "killed") in p.info["cmdline"]
    ]
    assert victims
    for process in victims:
        process.kill()
    cluster.wait(lambda: trained(run, "limited", 15), 240, run)
    cluster.call("scancel", "--batch", "--signal=USR1", jobs["pretrain[arm=limited]"])

    cluster.finish(run, 600)
    rows = cluster.status(run)
    assert {row["state"] for row in rows.values()} == {"finished"}, rows
    assert {name: row["job"] for name, row in rows.items()} == jobs  # ids survive the requeue
    logs = run / "pipeline" / "logs"
    assert "exit code 137: starting again" in (logs / "pretrain.arm=killed.log").read_text()
    assert "back into the queue" in (logs / "pretrain.arm=limited.log").read_text()
    undisturbed = losses(run, "undisturbed")
    assert len(undisturbed) == 120
    assert losses(run, "killed") == undisturbed
    assert losses(run, "limited") == undisturbed
    assert (run / "report" / "index.html").is_file()
    assert cluster.submit(file, run).startswith("nothing to submit: 16 tasks, all finished")


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
    cluster.wait(state.exists, 60, run)
    cluster.call("scancel", "--batch", "--signal=USR1", job)
    cluster.finish(run, 300)
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
    cluster.wait(lambda: log.exists() and "begins at 0" in log.read_text(), 60, run)
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
    cluster.wait(lambda: f"begins at {saved}" in log.read_text(), 60, run)
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
    cluster.wait((run / "a" / "state").exists, 60, run)
    job = cluster.status(run)["a"]["job"]
    node = cluster.call("squeue", "-h", "-j", job, "-o", "%N").stdout.strip()
    cluster.kill_node(node, run)
    try:
        cluster.finish(run, 300)
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
    cluster.finish(run, 60)
    rows = cluster.status(run)
    assert (rows["a"]["state"], rows["a"]["why"]) == ("failed", "exit code 2")
    assert any("error: --corpus /none" in line for line in rows["a"]["tail"])
    assert (rows["b"]["state"], rows["b"]["why"]) == ("cancelled", "because a failed")
    log = (run / "pipeline" / "logs" / "a.log").read_text()
    assert "starting again" not in log


def readme_commands() -> list[str]:
    text = (ROOT / "README.md").read_text().split("<!-- slurm: executed by tests/slurm -->")[1]
    block = text.split("```")[1]
    return [line.partition("  #")[0].strip() for line in block.strip().splitlines()]


def test_the_readmes_section_on_slurm_works_as_written(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "slurm").symlink_to(ROOT / "slurm")
    (tmp_path / "text.jsonl").write_text('{"text": "a short text"}\n')
    commands = readme_commands()
    assert commands[0] == "cp slurm/site.example.toml site.toml"
    said = []
    for command in commands:
        words = [sys.executable if w == "python" else w for w in command.split()]
        env = {**cluster.env, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        said.append(done.stdout)
        if words[0] == "cp":  # "then fill it in"
            example = (tmp_path / "site.toml").read_text()
            filled = example.replace('account = "my-account"', 'account = ""')
            filled = filled.replace('partition = "gpu"', 'partition = "cluster"', 1)
            assert filled != example
            text = tmp_path / "text.jsonl"
            params = f'[params]\nnemotron_cc = "{text}"\nnemotron_agentic = "{text}"\n'
            (tmp_path / "site.toml").write_text(filled + params)
    _, dry, submitted, status, cancelled = said
    assert "nothing was submitted" in dry
    assert "16 nodes x 8 GPU" in submitted
    assert "pretrain-mamba2" in status
    assert "cancelled" in cancelled or "nothing of it is in the queue" in cancelled


PIPELINES = sorted((ROOT / "slurm" / "pipelines").glob("*.toml"))


@pytest.mark.parametrize("file", PIPELINES, ids=lambda p: p.stem)
def test_slurm_would_take_every_shipped_pipeline(
    cluster: Cluster, file: Path, tmp_path: Path
) -> None:
    site = tmp_path / "site.toml"
    site.write_text('account = ""\npartition = "cluster"\n')
    args = [file, "--submit", "--dry-run", "--site", site, "--run", tmp_path / "run"]
    cluster.module("slurm.pipeline", *args)
    scripts = sorted((tmp_path / "run" / "pipeline").glob("submissions/dry-run/*.sbatch"))
    assert scripts
    for script in scripts:
        cluster.call("sbatch", "--test-only", str(script))


def test_what_slurm_refuses_is_said_before_anything_is_submitted(
    cluster: Cluster, tmp_path: Path
) -> None:
    file, run = tmp_path / "p.toml", tmp_path / "run"
    file.write_text(
        'name = "p"\n[step.a]\ncommand = "true"\nout = "a"\n'
        '[step.b]\ncommand = "true"\nout = "b"\npartition = "nowhere"\n'
    )
    said = cluster.submit(file, run, code=2)
    assert "step 'b': Slurm would refuse it: Invalid partition" in said
    assert cluster.call("squeue", "-h", "-n", "p.a").stdout == ""


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
    cluster.wait(lambda: pids_of("sleep", "300.25"), 60, run)
    assert cluster.status(run)["a"]["state"] == "running"
    cluster.call("scancel", "--batch", "--signal=USR1", job)
    cluster.wait(lambda: "cannot resume" in log.read_text(), 20, run)
    for pid in pids_of("sleep", "300.25"):
        os.kill(pid, signal.SIGTERM)
    cluster.finish(run, 60)
    rows = cluster.status(run)
    assert (rows["a"]["state"], rows["a"]["why"]) == ("failed", "exit code 143")
    assert rows["b"]["state"] == "cancelled"
