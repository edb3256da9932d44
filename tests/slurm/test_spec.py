"""What a pipeline file may say, and that each mistake in it is one line before anything runs."""

from pathlib import Path

import pytest

from gatewright.errors import UserError
from slurm import spec
from slurm.spec import Pipeline

PIPELINES = Path(__file__).resolve().parents[2] / "slurm" / "pipelines"

GOOD = """
name = "small"
[params]
size = 8
[step.text]
command = "make-text {out}"
out = "text"
[step.tokenizer]
command = "train --text {text} --size {size} --out {out}"
needs = ["text"]
out = "tokenizer"
[step.gates]
command = "scale {tokenizer} --scale {scale} --out {out}"
needs = "tokenizer"
out = "gates/s{scale}"
matrix = { scale = [0.5, 1, 2] }
[step.sft]
command = "tune --model {gates} --seed {seed} --out {out}"
needs = ["gates"]
out = "sft/s{scale}-{seed}"
matrix = { scale = [0.5, 1, 2], seed = [0, 1] }
[step.report]
command = "report --scores {sft} --out {out}"
needs = ["sft"]
out = "report"
"""


def load(tmp_path: Path, text: str, **overrides: str) -> Pipeline:
    path = tmp_path / "p.toml"
    path.write_text(text)
    return spec.load(path, overrides)


def test_a_matrix_makes_a_task_for_each_combination(tmp_path: Path) -> None:
    pipeline = load(tmp_path, GOOD)
    names = [t.name for t in pipeline.tasks_of("sft")]
    assert names[:3] == ["sft[scale=0.5,seed=0]", "sft[scale=0.5,seed=1]", "sft[scale=1,seed=0]"]
    assert len(names) == 6
    first = pipeline.tasks_of("sft")[0]
    expected = ["tune", "--model", "/r/gates/s0.5", "--seed", "0", "--out", "/r/sft/s0.5-0"]
    assert first.argv("/r") == expected


def test_parents_are_the_tasks_whose_output_the_command_names(tmp_path: Path) -> None:
    pipeline = load(tmp_path, GOOD)
    third = pipeline.tasks_of("sft")[2]
    assert [p.name for p in pipeline.parents(third)] == ["gates[scale=1]"]
    assert len(pipeline.parents(pipeline.tasks_of("report")[0])) == 6


def test_several_outputs_become_several_words(tmp_path: Path) -> None:
    argv = load(tmp_path, GOOD).tasks_of("report")[0].argv("/r")
    assert argv[:3] == ["report", "--scores", "/r/sft/s0.5-0"]
    assert len(argv) == 2 + 6 + 2


def test_a_run_folder_with_spaces_stays_one_word(tmp_path: Path) -> None:
    argv = load(tmp_path, GOOD).tasks_of("tokenizer")[0].argv("/my runs/r")
    assert argv[2] == "/my runs/r/text"


def test_steps_follow_their_needs_whatever_the_order_in_the_file(tmp_path: Path) -> None:
    head, *steps = GOOD.split("[step.")
    pipeline = load(tmp_path, "[step.".join([head, *reversed(steps)]))
    assert [s.name for s in pipeline.steps] == ["text", "tokenizer", "gates", "sft", "report"]
    assert pipeline.descendants("gates") == {"gates", "sft", "report"}


def test_params_can_be_set_from_outside(tmp_path: Path) -> None:
    assert "99" in load(tmp_path, GOOD, size="99").tasks_of("tokenizer")[0].argv("/r")
    with pytest.raises(UserError, match=r"--set sise=9: .*did you mean 'size'"):
        load(tmp_path, GOOD, sise="9")


def test_the_site_says_where_things_lie_and_the_command_line_wins(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text(GOOD)
    site = {"size": "5", "of_another_pipeline": "x"}
    assert spec.load(path, {}, site).params["size"] == "5"
    assert spec.load(path, {"size": "6"}, site).params["size"] == "6"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('needs = ["text"]', 'needs = ["report"]', "circle: (tokenizer|report|gates|sft) -> "),
        ('needs = ["text"]', 'needs = ["txet"]', r"needs 'txet', which is no step.*'text'"),
        ('out = "report"', 'out = "tokenizer"', "both write tokenizer"),
        ('out = "report"', 'out = "tokenizer/x"', "both write tokenizer/x"),
        ('out = "gates/s{scale}"', 'out = "gates"', "both write gates; put its matrix key"),
        ('needs = "tokenizer"', 'need = "tokenizer"', "unknown key 'need'.*'needs'"),
        ("--size {size}", "--size {sise}", "unknown placeholder {sise}.*'size'"),
        ("--size {size}", "--size {size", "lone brace"),
        ("--scores {sft}", "--scores={sft}", "{sft} stands for 6 folders"),
        ('needs = ["sft"]', "needs = []", "unknown placeholder {sft}"),
        ("--scores {sft}", "--x {run}/gates/s1", None),
        ("train --text {text}", "train --text {run}/report", "does not need 'report'"),
        ('out = "report"', 'out = "/report"', "plain path below the run"),
        ('out = "report"', 'out = "../report"', "plain path below the run"),
        ('out = "report"', 'out = "pipeline/x"', "own records"),
        ('out = "report"', "", "step 'report': has no out"),
        ('command = "make-text {out}"', "", "step 'text': has no command"),
        ('out = "report"', 'out = "report"\ntime = "1h"', "HH:MM:SS"),
        ('out = "report"', 'out = "report"\ntime = "00:99:00"', "HH:MM:SS"),
        ('out = "report"', 'out = "report"\ntime = "00:00:60"', "HH:MM:SS"),
        ('out = "report"', 'out = "report"\ntime = "٠١:٠٠:٠٠"', "HH:MM:SS"),
        ('out = "report"', 'out = "report"\ntime = "00:00:00"', "for no limit; give one"),
        ('out = "report"', 'out = "report"\nmemory = "٣G"', "16G"),
        ('out = "report"', 'out = "report"\naccount = "a\\nb"', "account = .* a line break"),
        ('out = "report"', 'out = "report"\npartition = "a b"', "partition = .* has a space"),
        ('out = "report"', 'out = "report"\nprocesses = 2', "processes = 2: .*python -m MODULE"),
        ('out = "report"', 'out = "report"\nprocesses = true', "True: give a whole number"),
        ('out = "report"', 'out = "report"\nthrottle = 2', "throttle = 2: .*no matrix"),
        ('out = "report"', 'out = "report"\nenv = { A = [1] }', r"env.A = \[1\]: give a string"),
        ("[0.5, 1, 2] }\n[step.sft]", "[1, 2, 1] }\n[step.sft]", "matrix.scale: 1 is given twice"),
        ("seed = [0, 1]", 'seed = ["m/a", "m_a"]', "would share the record 'sft.scale=0.5.*m_a'"),
        ("make-text {out}", "python -m x {nothing}", "unknown placeholder {nothing}.*known here: "),
        ('out = "report"', 'out = "report"\nmemory = "lots"', "16G"),
        ('out = "report"', 'out = "report"\nnodes = 0', "whole number >= 1"),
        ('out = "report"', 'out = "report"\nnodes = true', "whole number"),
        ('out = "report"', 'out = "report"\nnodes = 2', "gives no processes"),
        ("[0.5, 1, 2] }\n[step.sft]", "[] }\n[step.sft]", "non-empty array"),
        ("size = 8", "size = 8 8", r"not valid TOML: .*line 4"),
        ("size = 8", "text = 8", "params.text"),
        ("[params]", "[parms]", "unknown key 'parms'.*'params'"),
        ("make-text {out}", "make-text 'x", "No closing quotation"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, old: str, new: str, message: str | None) -> None:
    assert old in GOOD
    if message is None:  # reads of a step that is needed indirectly are allowed
        load(tmp_path, GOOD.replace(old, new))
        return
    with pytest.raises(UserError, match=message) as e:
        load(tmp_path, GOOD.replace(old, new))
    assert "p.toml" in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("processes = 8\ngpus = 4", "processes = 8 is more than gpus = 4"),
        ("processes = 8\ngpus = 8", None),
        ("processes = 8", None),
    ],
)
def test_a_process_takes_a_gpu(tmp_path: Path, more: str, message: str | None) -> None:
    text = f'name = "p"\n[step.a]\ncommand = "python -m a {{out}}"\nout = "a"\n{more}\n'
    if message is None:
        load(tmp_path, text)
        return
    with pytest.raises(UserError, match=message):
        load(tmp_path, text)


def test_a_home_folder_is_a_path_in_the_command_and_in_the_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    text = """
    name = "p"
    [params]
    data = "~/data"
    [step.a]
    command = "x --in {data}/a --also={data} ~/b {out}"
    inputs = ["{data}", "~/b"]
    out = "a"
    """
    (task,) = load(tmp_path, text).tasks
    expected = ["x", "--in", "/home/me/data/a", "--also=/home/me/data", "/home/me/b", "/r/a"]
    assert task.argv("/r") == expected
    assert task.inputs == ("/home/me/data", "/home/me/b")


def test_a_placeholder_where_none_is_known(tmp_path: Path) -> None:
    text = 'name = "p"\n[step.a]\ncommand = "x {out}"\nout = "a{b}"\n'
    with pytest.raises(UserError, match="unknown placeholder {b}; known here: nothing"):
        load(tmp_path, text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such pipeline file"):
        spec.load(tmp_path / "none.toml")


@pytest.mark.parametrize("path", sorted(PIPELINES.glob("*.toml")), ids=lambda p: p.stem)
def test_every_shipped_pipeline_is_sound(path: Path) -> None:
    pipeline = spec.load(path)
    assert pipeline.name == path.stem.replace("_", "-") or pipeline.name == path.stem
    assert all(t.step.resources.seconds > 0 for t in pipeline.tasks)
