"""What `--set` changes of a pipeline file, for this machine and for submissions."""

import re
from pathlib import Path

import pytest

from gatewright.errors import UserError
from slurm import overrides, spec, status, submission
from slurm.site import Site

TEXT = """
name = "p"
[params]
size = 8
[step.a]
command = "train {size} --out {out}"
out = "a"
[step.b]
command = "score {a} --out {out}"
needs = ["a"]
matrix = { seed = [0, 1] }
out = "b/{seed}"
time = "01:00:00"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "p.toml"
    path.write_text(TEXT)
    return path


SETTINGS = (
    "size=9",
    "a.flags=--steps {size} --name 'x y'",
    "a.time=00:10:00",
    "b.gpus=2",
    "b.flags=--seed {seed}",
    "b.seed=4, 7,9",
)


def test_a_step_gets_other_resources_and_more_words(file: Path) -> None:
    pipeline = spec.load(file, overrides.parse(SETTINGS))
    expected = ["train", "9", "--out", "/r/a", "--steps", "9", "--name", "x y"]
    assert pipeline.tasks_of("a")[0].argv("/r") == expected
    assert pipeline.step("a").resources.time == "00:10:00"
    assert pipeline.step("a").resources.gpus == 0
    assert pipeline.step("b").resources.gpus == 2
    assert pipeline.step("b").resources.time == "01:00:00"
    assert pipeline.tasks_of("b")[1].argv("/r")[-2:] == ["--seed", "7"]
    assert [t.outs for t in pipeline.tasks_of("b")] == [("b/4",), ("b/7",), ("b/9",)]


def test_changes_are_frozen_with_a_submission_and_known_to_status(
    file: Path, tmp_path: Path
) -> None:
    changes = overrides.parse(SETTINGS)
    pipeline = spec.load(file, changes)
    run, site = tmp_path / "run", Site(account="", partition="")
    code = tmp_path / "code"
    code.mkdir()
    folder = submission.next_folder(run)
    with submission.draft(folder) as draft:
        args = (pipeline, run, site, changes, list(pipeline.steps), code, tmp_path / "site.toml")
        submission.write(draft, folder, *args)
    (folder / submission.JOBS).write_text("[]")
    assert "#SBATCH --time=00:10:00" in (folder / "a.sbatch").read_text()
    assert submission.load(folder)[0].tasks == pipeline.tasks
    assert status.open_run(run)[0].tasks == pipeline.tasks


def test_the_readmes_examples_are_settings_of_the_papers_pipeline() -> None:
    root = Path(__file__).resolve().parents[2]
    section = (root / "README.md").read_text().split("## On Slurm")[1].split("\n## ")[0]
    found = re.findall(r"--set ([a-z][\w-]*\.[^`]+)`", section)
    assert len(found) >= 2
    settings = tuple(setting.replace('"', "") for setting in found)
    pipeline = spec.load(root / "slurm/pipelines/paper.toml", overrides.parse(settings))
    assert pipeline.step("pretrain-mamba2").resources.time == "08:00:00"
    assert pipeline.tasks_of("sft-mamba2")[0].argv("/r")[-2:] == ["--train.lr", "1e-5"]


def test_one_name_is_set_once(file: Path) -> None:
    with pytest.raises(UserError, match="--set size=2: size is also set to '1'; give it once"):
        overrides.parse(("size=1", "size=2"))


def test_values_that_a_later_step_does_not_find_are_named(file: Path) -> None:
    file.write_text(
        TEXT + '[step.c]\ncommand = "x --in={b} {out}"\nneeds = ["b"]\nmatrix = { seed = [0] }\n'
        'out = "c/{seed}"\n'
    )
    assert spec.load(file).tasks_of("c")
    with pytest.raises(UserError, match="step 'c': .*no task of 'b' has this step's matrix values"):
        spec.load(file, {"b.seed": "7"})


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("size", "--set size: write it as NAME=VALUE or STEP.KEY=VALUE"),
        ("sise=9", "no such param .did you mean 'size'"),
        ("c.time=1", "--set c.time=1: .*no step 'c'"),
        ("a.tiem=00:10:00", "no key 'tiem' .did you mean 'time'"),
        ("a.time=10", "step 'a': time = '10': write it as HH:MM:SS"),
        ("a.gpus=two", "--set a.gpus=two: give a whole number"),
        ("a.gpus=-1", "step 'a': gpus = -1"),
        ("a.flags={sise}", "unknown placeholder {sise}"),
        ("a.flags={run}/b/0", "reads b/0 but does not need 'b'"),
        ("a.flags='", "No closing quotation"),
        ("b.sed=1", "no key 'sed' .did you mean 'seed'.*seed, flags, nodes"),
        ("b.seed=,", "step 'b': matrix.seed = .*give a non-empty array"),
        ("b.seed=1,1", "step 'b': matrix.seed: 1 is given twice"),
    ],
)
def test_a_mistake_is_one_line(setting: str, message: str, file: Path) -> None:
    with pytest.raises(UserError, match=message) as e:
        spec.load(file, overrides.parse((setting,)))
    assert "\n" not in str(e.value)
