"""The files that sbatch gets; `paper.toml`'s are held by golden files.

After a change that is meant: GATEWRIGHT_WRITE_GOLDEN=1 python -m pytest tests/slurm/test_batch.py
"""

import os
from pathlib import Path

import pytest

from slurm import batch, spec
from slurm.site import Site

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parent / "golden" / "paper"
PAPER = spec.load(ROOT / "slurm" / "pipelines" / "paper.toml")
RUN = Path("/scratch/runs/paper")
SITE = Site(
    account="nlp",
    partition="gpu",
    cpu_partition="cpu",
    python="/shared/gatewright/.venv/bin/python",
    gpu_option="--gres=gpu:h100:{n}",
    sbatch=("--qos=long",),
    setup=("module load cuda/12.8",),
)


def text(step: str, site: Site = SITE) -> str:
    folder = RUN / "pipeline" / "submissions" / "001"
    return batch.script(PAPER, PAPER.step(step), site, RUN, folder)


@pytest.mark.parametrize("step", [s.name for s in PAPER.steps])
def test_the_papers_batch_files_are_as_they_were(step: str) -> None:
    path = GOLDEN / f"{step}.sbatch"
    if os.environ.get("GATEWRIGHT_WRITE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text(step))
    assert text(step) == path.read_text()


def test_no_golden_file_is_left_over() -> None:
    assert {p.stem for p in GOLDEN.glob("*.sbatch")} == {s.name for s in PAPER.steps}


def test_the_papers_pretraining_takes_128_gpus() -> None:
    for name in ("pretrain-mamba2", "pretrain-llama"):
        step = PAPER.step(name)
        assert step.resources.nodes * step.resources.gpus == 128
        assert step.processes == step.resources.gpus
        assert step.resumes
        assert step.command.split()[3].endswith("_128xh100")


def options(step: str, site: Site) -> set[str]:
    lines = text(step, site).splitlines()
    return {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")}


def test_a_site_without_accounts_names_none() -> None:
    found = options("sft-llama", Site(account="", partition=""))
    assert not any(o.startswith(("--account", "--partition")) for o in found)
    assert "--gpus-per-node=8" in found


def test_steps_without_gpus_go_to_the_cpu_partition() -> None:
    assert "--partition=cpu" in options("report", SITE)
    assert "--partition=gpu" in options("sft-llama", SITE)
    assert not any("gpu:h100" in o for o in options("report", SITE))


def test_every_job_is_warned_and_may_be_requeued() -> None:
    for step in PAPER.steps:
        found = options(step.name, SITE)
        assert {"--signal=B:USR1@180", "--requeue", "--kill-on-invalid-dep=yes"} <= found
        assert "exec /shared/gatewright/.venv/bin/python -m slurm.job" in text(step.name)


@pytest.mark.parametrize(
    ("indices", "throttle", "said"),
    [
        ([0], None, "0"),
        ([0, 1, 2, 3], None, "0-3"),
        ([5, 0, 1, 3], None, "0-1,3,5"),
        ([0, 1, 2], 2, "0-2%2"),
    ],
)
def test_array_indices(indices: list[int], throttle: int | None, said: str) -> None:
    assert batch.array_of(indices, throttle) == said
