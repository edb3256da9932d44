"""What status reads from logs and records, without a scheduler."""

import json
import subprocess
import time
from pathlib import Path

import pytest

from gatewright.errors import UserError
from slurm import local, pipeline, plan, scheduler, spec, status, submission
from tests.slurm.fake_slurm import fake

LOG = """start
pretrain mamba2:   0%|          | 0.00/12.3k [00:00<?, ?tok/s]
pretrain mamba2:  34%|███▍      | 4.2k/12.3k [01:15<02:20, 57tok/s, loss=8.850]
"""


def test_progress_is_the_last_bar() -> None:
    assert status.progress_of(LOG.splitlines()) == "34%, 02:20 left"
    assert status.progress_of(["x: 0%|  | 0/2 [00:00<?, ?it/s]"]) == "0%"
    both = "a:  10%|# | 1/10 [00:01<00:09, 1it/s]\ra:  20%|## | 2/10 [00:02<00:08, 1it/s]"
    assert status.progress_of([both]) == "20%, 00:08 left"
    assert status.progress_of(["no bar", ""]) == ""


def test_a_run_on_this_machine_is_told_from_its_records(tmp_path: Path) -> None:
    folder = tmp_path / "pipeline"
    folder.mkdir()
    (folder / "pipeline.toml").write_text(
        'name = "p"\n[params]\nn = 1\n[step.a]\ncommand = "x {n} {out}"\nout = "a"\n'
        '[step.b]\ncommand = "x {a} {out}"\nneeds = ["a"]\nout = "b"\n'
    )
    (folder / "settings.json").write_text('{"n": "7"}')
    pipeline, found = status.rows(tmp_path)
    assert [row.state for row in found] == ["not submitted", "not submitted"]
    assert pipeline.params["n"] == "7"
    task = pipeline.tasks[0]
    record = plan.Record("a", "failed", {}, [], "log", time.time(), seconds=3, exit_code=4)
    plan.write_record(tmp_path, task, record)
    log = plan.log_path(tmp_path, task)
    log.parent.mkdir()
    log.write_text("why it failed\n")
    (tmp_path / "a").mkdir()
    row = {"step": 5, "time": 0, "loss": 2.5}
    (tmp_path / "a" / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    first = status.rows(tmp_path)[1][0]
    assert (first.state, first.why, first.loss, first.seconds) == ("failed", "exit code 4", 2.5, 3)
    assert first.tail == ["why it failed"]


def test_a_submission_cut_short_is_none_and_damaged_settings_are_named(tmp_path: Path) -> None:
    records = tmp_path / "pipeline"
    (records / "submissions" / "001" / "code").mkdir(parents=True)
    with pytest.raises(UserError, match="is no run folder"):
        status.open_run(tmp_path)
    (records / "pipeline.toml").write_text('name = "p"\n[step.a]\ncommand = "x {out}"\nout = "a"\n')
    for text in ("{", "[1]"):
        (records / "settings.json").write_text(text)
        with pytest.raises(UserError, match=r"settings.json: is damaged"):
            status.open_run(tmp_path)


def test_a_run_whose_process_died_is_stopped_not_running(tmp_path: Path) -> None:
    folder = tmp_path / "pipeline"
    folder.mkdir()
    text = 'name = "p"\n[step.a]\ncommand = "x {out}"\nout = "a"\n'
    (folder / "pipeline.toml").write_text(text)
    task = spec.load(folder / "pipeline.toml").tasks[0]
    plan.write_record(tmp_path, task, plan.Record("a", "running", {}, [], "log", time.time()))
    (folder / "lock").write_text("999999999")
    assert status.rows(tmp_path)[1][0].state == "stopped"


ONE_STEP = 'name = "p"\n[step.a]\ncommand = "x {out}"\nout = "a"\n'


def test_the_final_state_of_a_cancelled_job_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def sacct(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(argv, 0, "FAILED\nCANCELLED by 1000\n", "")

    monkeypatch.setattr(scheduler, "_call", sacct)
    assert scheduler.accounted("1") == "CANCELLED"


def test_without_slurm_what_a_job_does_is_unknown_and_what_it_did_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = fake(tmp_path, monkeypatch, ONE_STEP)
    slurm.submit()
    monkeypatch.setenv("PATH", "/nowhere")
    (row,) = status.rows(slurm.run)[1]
    assert (row.state, row.why[:14]) == ("unknown", "no squeue here")
    task = slurm.pipeline().tasks[0]
    for state in ("running", "failed"):
        record = plan.Record("a", state, {}, [], "log", time.time(), job="1", exit_code=3)
        plan.write_record(slurm.run, task, record)
        (row,) = status.rows(slurm.run)[1]
        assert row.state == ("unknown" if state == "running" else "failed")
    assert row.why == "exit code 3"


def test_a_run_on_this_machine_after_a_submission_is_told_from_its_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = fake(tmp_path, monkeypatch, ONE_STEP)
    slurm.submit()
    slurm.becomes("1", "CANCELLED")
    slurm.file.write_text(ONE_STEP + '[step.b]\ncommand = "x {out}"\nout = "b"\n')
    seen = []

    def execute(*args: object) -> int:
        task = slurm.pipeline().tasks[0]
        record = plan.Record("a", "running", {}, [], "log", time.time())
        plan.write_record(slurm.run, task, record)
        seen.extend(status.rows(slurm.run)[1])
        return 0

    monkeypatch.setattr(local, "execute", execute)
    pipeline.main(pipeline.Args(slurm.file, local=True, run=slurm.run))
    assert [(row.task, row.state) for row in seen] == [("a", "running"), ("b", "not submitted")]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("settings.json", "{}", "settings.json: is damaged"),
        ("settings.json", '{"set": {}, "site": {"x": 1}}', "settings.json: is damaged"),
        ("jobs.json", "[{", "jobs.json: is damaged, so its jobs are not known: end those"),
        ("jobs.json", '[{"step": "a"}]', "jobs.json: is damaged"),
        ("jobs.json", '{"step": "a"}', "jobs.json: is damaged"),
    ],
)
def test_a_damaged_submission_is_one_line(
    name: str, text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = fake(tmp_path, monkeypatch, ONE_STEP)
    slurm.submit()
    (submission.folders(slurm.run)[0] / name).write_text(text)
    for act in (lambda: status.rows(slurm.run), slurm.cancel):
        with pytest.raises(UserError, match=message) as e:
            act()
        assert "\n" not in str(e.value)


@pytest.mark.parametrize("name", ["x" * 300, "none", "file"])
def test_no_run_folder_is_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is no run folder|File name too long"):
        status.open_run(tmp_path / name)


def test_what_slurm_says_comes_without_its_commands_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def squeue(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(argv, 1, "", "squeue: fatal: no configuration\n")

    monkeypatch.setattr(scheduler, "_call", squeue)
    with pytest.raises(UserError, match="^squeue: no configuration; try again later$"):
        scheduler.jobs(["1"])
