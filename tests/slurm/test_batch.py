"""The files that sbatch gets; `paper.toml`'s are held by golden files.

After a change that is meant: GATEWRIGHT_WRITE_GOLDEN=1 python -m pytest tests/slurm/test_batch.py
"""

import dataclasses
import os
import subprocess
from pathlib import Path

import pytest

from gatewright.errors import UserError
from slurm import batch, environment, spec
from slurm.site import Site
from slurm.spec import Pipeline

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


def one_step(tmp_path: Path, more: str = "", command: str = "x {out}") -> Pipeline:
    path = tmp_path / "p.toml"
    path.write_text(f'name = "p"\n[step.a]\ncommand = """{command}"""\nout = "a"\n{more}\n')
    return spec.load(path)


@pytest.mark.parametrize(
    ("run", "image", "message"),
    [
        ("/a/my runs", "", "sbatch would not take ' ' as it is: choose a path"),
        ("/a/it's", "", "would not take"),
        ("/a/100%", "", "would not take '%'"),
        ("/a/b\nc", "", "would not take"),
        ("/a/12:30", "image", "sbatch or the container would not take ':'"),
        ("/a/b,c", "image", "would not take ','"),
        ("/a/12:30,x_y-z.é+=@", "", None),
    ],
)
def test_a_run_folder_must_fit_into_sbatch_files(
    tmp_path: Path, run: str, image: str, message: str | None
) -> None:
    site = dataclasses.replace(SITE, container=image)
    if message is None:
        batch.check(one_step(tmp_path), site, Path(run))
        return
    with pytest.raises(UserError, match=message) as e:
        batch.check(one_step(tmp_path), site, Path(run))
    assert str(e.value).startswith("--run ")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("time", "save_seconds", "fits"), [("00:02:00", 30, True), ("00:04:00", 180, False)]
)
def test_a_step_that_resumes_needs_time_to_work(
    tmp_path: Path, time: str, save_seconds: int, fits: bool
) -> None:
    site = dataclasses.replace(SITE, save_seconds=save_seconds)
    batch.check(one_step(tmp_path, f'time = "{time}"'), site, RUN)
    resumes = one_step(tmp_path, f'time = "{time}"\nresumes = true')
    if fits:
        batch.check(resumes, site, RUN)
        return
    with pytest.raises(UserError, match=r"'a': time = '00:04:00' leaves less than 60 s"):
        batch.check(resumes, site, RUN)


def test_line_breaks_stay_in_comments(tmp_path: Path) -> None:
    command = "x 'one\nrm -rf two' {out}"
    p = one_step(tmp_path, 'summary = "first\\nrm -rf second\\n#SBATCH --x"', command)
    found = batch.script(p, p.steps[0], SITE, RUN, RUN / "s").splitlines()
    assert {line for line in found if "rm -rf" in line or "--x" in line} == {
        "# rm -rf second",
        "# #SBATCH --x",
        "# rm -rf two' /scratch/runs/paper/a",
    }


def test_the_sites_setup_may_use_what_is_not_set(tmp_path: Path) -> None:
    """As conda's and Lmod's own shell code does."""
    p = one_step(tmp_path)
    site = dataclasses.replace(SITE, setup=('echo "[$NOT_SET]"', "false"), python="/no/python")
    (tmp_path / "s" / "code").mkdir(parents=True)
    written = batch.script(p, p.steps[0], site, tmp_path, tmp_path / "s")
    done = subprocess.run(["bash", "-c", written], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("[]\n", 1)
    assert "/no/python" not in done.stderr  # what fails in it ends the job


def test_threads_are_those_of_the_machine_that_runs_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (task,) = one_step(tmp_path, "cpus = 96").tasks
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert environment.settings(task)["OMP_NUM_THREADS"] == "96"
    assert environment.environment(task)["OMP_NUM_THREADS"] == "2"
