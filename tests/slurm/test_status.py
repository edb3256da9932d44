"""What status reads from logs and records, without a scheduler."""

import json
import time
from pathlib import Path

import pytest

from gatewright.errors import UserError
from slurm import plan, spec, status

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
