"""The demo pipeline as Slurm jobs, three times: undisturbed, killed, and out of time.

All of its steps and tasks run, with the flags of its recipes turned down.
Both disturbed runs must end with the report and with every loss of the undisturbed one.
"""

import contextlib
import json
import shutil
from pathlib import Path

import psutil
import pytest

from gatewright import runlog
from slurm import plan
from tests.slurm.loopback import ROOT, Cluster

pytestmark = [pytest.mark.slurm]

FILE = ROOT / "slurm" / "pipelines" / "demo.toml"
MODEL = "--model.d-model 32 --model.n-layers 2 --model.head-dim 16 --model.d-state 16"
PRETRAIN_STEPS, SFT_STEPS = 80, 6
SFT = (
    f"--train.steps {SFT_STEPS} --train.checkpoint-every 1 --train.global-batch-packs 1 "
    "--train.eval-packs 1 --train.eval-calls 0"
)
SMALL = {
    "vocab_size": "600",
    "pool_sizes": "1,2",
    "questions": "2",
    "text.flags": "--min-mb 0.1 --max-mb 0.3 --shards 1",
    "pretrain.flags": f"{MODEL} --model.chunk-size 16 --train.steps {PRETRAIN_STEPS} "
    "--train.seq-len-tokens 64 --train.global-batch-sequences 2 --train.micro-batch-sequences 2 "
    "--train.lr-warmup-steps 4 --checkpoint.every-steps 10 --log.gates-every-steps 1000 "
    "--log.no-tensorboard",
    "hf.flags": "--no-check",
    "sft-data.flags": "--tool-corpus-limit 50",
    "sft-mamba2.flags": SFT,
    "sft-llama.flags": SFT,
    "generate.flags": "--max-new-tokens 4",
}
UPSTREAM = ("text", "tokenizer", "corpus", "chats", "sft-data", "pools")
"""Steps before any training: the disturbed runs begin as half-finished ones that have them."""
SCORED = ("mamba2-s0.5", "mamba2-s1", "mamba2-s2", "llama")
TRAINED = [f"pretrain/{family}" for family in ("mamba2", "llama")]
TRAINED += [f"sft/{name}" for name in SCORED]


def flags(**more: str) -> list[str]:
    settings = SMALL | {name.replace("__", "."): value for name, value in more.items()}
    return [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]


def losses(folder: Path) -> dict[int, float]:
    """Return step -> loss as a training run has written it so far."""
    path = folder / "metrics.jsonl"
    rows = runlog.read_metrics(path) if path.exists() else ()
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def outcomes(run: Path, model: str) -> list[tuple[str, ...]]:
    """Return every scored answer without how long it took."""
    path = run / "bfcl" / model / "scores" / "scores.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [tuple(str(row[key]) for key in ("id", "k", "outcome", "called")) for row in rows]


def processes(module: str, out: Path) -> list[psutil.Process]:
    """Return the processes of one task's command, below whatever launched it."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if words[1:3] == ["-m", module] and str(out) in words:
            found.append(process)
    return found


def finished(run: Path, steps: tuple[str, ...]) -> bool:
    return all((run / plan.RECORDS / "tasks" / f"{s}.json").exists() for s in steps) and all(
        json.loads((run / plan.RECORDS / "tasks" / f"{s}.json").read_text())["state"] == "done"
        for s in steps
    )


def log(run: Path, slug: str) -> str:
    return (run / plan.RECORDS / "logs" / f"{slug}.log").read_text()


def begin_with_upstream(undisturbed: Path, run: Path) -> None:
    """Make a run folder that holds what comes before training, as a cancelled run would."""
    for name in UPSTREAM:
        shutil.copytree(undisturbed / name, run / name)
    records = run / plan.RECORDS / "tasks"
    records.mkdir(parents=True)
    for name in UPSTREAM:
        shutil.copy(undisturbed / plan.RECORDS / "tasks" / f"{name}.json", records)


def test_killed_and_out_of_time_the_demo_ends_as_if_nothing_had_happened(
    cluster: Cluster, tmp_path: Path
) -> None:
    site = tmp_path / "site.toml"
    site.write_text(
        'account = ""\npartition = "gpu"\nsave_seconds = 30\n[env]\nOMP_NUM_THREADS = "1"\n'
    )
    undisturbed, killed, limited = runs = [tmp_path / n for n in ("run", "killed", "limited")]
    assert "14 jobs, 26 tasks" in cluster.submit(FILE, undisturbed, *flags(), site=site)
    cluster.wait(lambda: finished(undisturbed, UPSTREAM), 600, undisturbed)
    for run in (killed, limited):
        begin_with_upstream(undisturbed, run)
    # Slurm looks at time limits twice a minute: it warns this job 60 to 90 seconds after its
    # start, and until then its training is held.
    said = cluster.submit(FILE, limited, *flags(pretrain__time="00:02:00"), site=site)
    assert "8 jobs, 20 tasks" in said
    assert "8 jobs, 20 tasks" in cluster.submit(FILE, killed, *flags(), site=site)
    jobs = {run: {name: row["job"] for name, row in cluster.status(run).items()} for run in runs}

    struck = limited / "pretrain" / "mamba2"
    cluster.wait(lambda: len(losses(struck)) >= 7, 600, limited)
    (held,) = processes("pretrain.train", struck)
    held.suspend()

    request = limited / plan.RECORDS / "leave" / "pretrain.family=mamba2"
    seen: list[bool] = []  # the next job takes the request away

    def warned() -> bool:
        """Let the held training go on (and save) once its job has been warned."""
        if request.exists():
            with contextlib.suppress(psutil.NoSuchProcess):
                held.resume()
            seen.append(True)
        return bool(seen)

    for out, module in (("pretrain/mamba2", "pretrain.train"), ("sft/mamba2-s0.5", "sft.train")):

        def begun(out: str = out) -> bool:
            warned()
            return len(losses(killed / out)) >= 2

        cluster.wait(begun, 600, killed)
        for process in processes(module, killed / out):
            process.kill()
    cluster.wait(warned, 300, limited)

    for run in runs:
        cluster.finish(run, 1200)
        rows = cluster.status(run)
        assert {row["state"] for row in rows.values()} == {"finished"}, rows
        assert {n: row["job"] for n, row in rows.items()} == jobs[run]  # ids survive requeues
        assert (run / "report" / "index.html").is_file()
        for name in TRAINED:
            found = losses(run / name)
            assert len(found) == (SFT_STEPS if "sft" in name else PRETRAIN_STEPS)
            assert found == losses(undisturbed / name), (run, name)
        for name in SCORED:
            assert outcomes(run, name) == outcomes(undisturbed, name)
            assert len(outcomes(run, name)) == 4  # two questions at two pool sizes
    for slug in ("pretrain.family=mamba2", "sft-mamba2.scale=0.5"):
        assert "exit code 137: starting again" in log(killed, slug)
        assert "starting again" not in log(undisturbed, slug)
    assert "back into the queue" in log(limited, "pretrain.family=mamba2")
    assert cluster.submit(FILE, killed, *flags(), site=site).startswith("nothing to submit")
