"""Submitting and cancelling: no job is lost, doubled or forgotten, whatever comes between."""

import errno
import json
import os
from pathlib import Path

import pytest

from gatewright import artifact
from gatewright.errors import UserError
from slurm import local, pipeline, plan, status, submission
from tests.slurm.fake_slurm import FakeSlurm, fake

TEXT = """
name = "p"
[params]
n = 1
[step.a]
command = "python -m a {n} {x} {out}"
matrix = { x = [1, 3] }
out = "a/{x}"
[step.b]
command = "python -m b {a} {out}"
needs = ["a"]
out = "b"
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return fake(tmp_path, monkeypatch, TEXT)


def finish(slurm: FakeSlurm, name: str) -> plan.Record:
    """Make a task look finished."""
    p = slurm.pipeline()
    (task,) = [t for t in p.tasks if t.name == name]
    for out in task.out_paths(slurm.run):
        out.mkdir(parents=True)
        (out / "manifest.json").write_text('{"content_hash": "1"}')
    fingerprint = plan.fingerprint(p, slurm.run, task)
    hashes = plan.out_hashes(slurm.run, task)
    record = plan.Record(name, "done", fingerprint, [], "log", 0.0, outs=hashes)
    plan.write_record(slurm.run, task, record)
    return record


def test_another_matrix_takes_what_is_new_and_knows_what_is_queued(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.submit(only="a")
    slurm.becomes("1_1", "RUNNING")  # x = 3
    slurm.submit("a.x=3,9", only="a")
    assert slurm.queued() == ["a[x=1]", "a[x=3]", "a[x=9]"]
    assert slurm.jobs() == {"1_0": "PENDING", "1_1": "RUNNING", "2_1": "PENDING"}
    rows = {row.task: (row.state, row.job) for row in status.rows(slurm.run)[1]}
    assert rows["a[x=3]"] == ("running", "1_1")
    assert rows["a[x=9]"] == ("waits", "2_1")
    assert rows["a[x=1]"] == ("waits", "1_0")  # though the pipeline has it no more
    slurm.cancel()
    assert "cancelled 3 jobs" in capsys.readouterr().out
    assert {*slurm.jobs().values()} == {"CANCELLED"}


def test_submit_local_and_cancel_look_at_the_queue_with_the_run_locked(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.submit()
    looked = []

    def active(run: Path) -> list[submission.SubmittedTask]:
        looked.append(run)
        with pytest.raises(UserError, match="another pipeline works"), local.locked(run):
            pass
        return []

    monkeypatch.setattr(submission, "active", active)
    slurm.submit("n=2")
    slurm.cancel()
    monkeypatch.setattr(local, "execute", lambda *args: 0)
    pipeline.main(pipeline.Args(slurm.file, local=True, run=slurm.run))
    assert len(looked) == 3
    with local.locked(slurm.run):
        for act in (slurm.submit, slurm.cancel):
            with pytest.raises(UserError, match="another pipeline works"):
                act()


def test_a_number_is_never_given_twice(slurm: FakeSlurm) -> None:
    (slurm.run / "pipeline" / "submissions" / "007").mkdir(parents=True)  # a killed submission's
    assert submission.folders(slurm.run) == []
    slurm.submit()
    assert [f.name for f in submission.folders(slurm.run)] == ["008"]


def test_an_interrupt_while_sbatch_works_takes_every_job_back(slurm: FakeSlurm) -> None:
    slurm.write("hook", '[ "$id" = 2 ] && kill -INT "$PPID"')
    with pytest.raises(KeyboardInterrupt):
        slurm.submit()
    assert slurm.jobs() == {"1_0": "CANCELLED", "1_1": "CANCELLED", "2": "CANCELLED"}
    assert slurm.written() == []
    assert slurm.read("session") != [str(os.getsid(0))]  # the terminal's Ctrl-C misses sbatch


def test_a_full_disk_takes_every_job_back(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(artifact, "write_json", full)
    with pytest.raises(UserError, match=r"No space left on device.*nothing was submitted"):
        slurm.submit()
    assert {*slurm.jobs().values()} == {"CANCELLED"}


def test_what_cannot_be_taken_back_stays_known(slurm: FakeSlurm) -> None:
    slurm.write("refuse-2", "sbatch: error: Batch job submission failed: Too many jobs")
    slurm.write("refuse-scancel", "scancel: error: Kill job error on job id 1: Access denied")
    with pytest.raises(UserError, match=r"'b': sbatch refused it: Batch job.*Access denied") as e:
        slurm.submit()
    assert "\n" not in str(e.value)
    assert slurm.queued() == ["a[x=1]", "a[x=3]"]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("scancel: error: Kill job error on job id 1: Invalid job id specified", None),
        ("scancel: error: Kill job error on job id 1: Job/step already completing", None),
        (
            "scancel: error: Access denied\nscancel: error: 1: Invalid job id",
            "scancel .*: Access den",
        ),
        ("", "no message"),
    ],
)
def test_cancel_says_when_slurm_does_not_cancel(
    slurm: FakeSlurm, said: str, message: str | None
) -> None:
    slurm.submit()
    slurm.write("refuse-scancel", said)
    if message is None:
        slurm.cancel()
        return
    with pytest.raises(UserError, match=message):
        slurm.cancel()


@pytest.mark.parametrize("heard", [True, False])
def test_training_is_told_to_save_and_ended_whether_or_not_it_heard(
    slurm: FakeSlurm, heard: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.file.write_text(TEXT.replace('out = "a/{x}"', 'out = "a/{x}"\nresumes = true'))
    slurm.submit()
    slurm.becomes("1_1", "RUNNING")
    if not heard:
        slurm.write("refuse-signal", "scancel: error: no answer")
    slurm.cancel(wait_seconds=0)
    assert slurm.read("signalled") == ["--batch --signal=USR1 1_1"]
    assert {*slurm.jobs().values()} == {"CANCELLED"}
    said = capsys.readouterr().out
    assert "waiting for a[x=3] to save (at most 0 s)" in said
    assert ("could not be told to save: scancel" in said) is not heard


def test_cancel_refuses_a_negative_wait(slurm: FakeSlurm) -> None:
    with pytest.raises(UserError, match="--wait-seconds -1: give 0 or more"):
        slurm.cancel(wait_seconds=-1)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("n=2", r"'a\[x=1\]' is in the queue \(job 1_0\) with other command than now.*cancel"),
        ("a.time=00:30:00", "with other resources than now"),
        ("a.processes=2", "with other processes than now"),
    ],
)
def test_a_queued_task_is_not_changed_in_silence(
    slurm: FakeSlurm, setting: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.submit()
    slurm.submit()
    assert "nothing to submit: 3 tasks, 3 of them still in the queue" in capsys.readouterr().out
    with pytest.raises(UserError, match=message):
        slurm.submit(setting)
    assert len(slurm.jobs()) == 3


def test_what_a_queued_task_reads_is_not_made_again_under_it(slurm: FakeSlurm) -> None:
    slurm.submit()
    for job in ("1_0", "1_1"):
        slurm.becomes(job, "FAILED")
    with pytest.raises(UserError, match=r"'b' is in the queue .* would read 'a\[x=1\]'"):
        slurm.submit()


def test_a_folder_that_a_renamed_steps_job_writes_is_not_given_to_another(
    slurm: FakeSlurm,
) -> None:
    slurm.submit(only="a")
    slurm.file.write_text(
        TEXT.replace("step.a]", "step.c]").replace("{a}", "{c}").replace('"a"', '"c"')
    )
    with pytest.raises(UserError, match=r"'a\[x=1\]' is in the queue .* writes what 'c\[x=1\]'"):
        slurm.submit(only="c")


def test_a_refused_from_changes_nothing_and_an_accepted_one_says_asked_for(
    slurm: FakeSlurm,
) -> None:
    before = finish(slurm, "a[x=1]")
    finish(slurm, "a[x=3]")
    mark = slurm.run / "pipeline" / "cancelled"
    mark.touch()
    p = slurm.pipeline()
    task = p.tasks_of("a")[0]
    slurm.write("refuse-2", "sbatch: error: no")
    with pytest.raises(UserError, match="sbatch refused it: no; change the step"):
        slurm.submit(start_from="a")
    assert plan.read_record(slurm.run, task) == before
    assert mark.exists()
    (slurm.folder / "refuse-2").unlink()
    slurm.submit(start_from="a")
    assert plan.why_run(p, slurm.run, task) == "asked for"
    assert not mark.exists()
    row = status.rows(slurm.run)[1][0]
    assert row.state == "waits"  # not "finished": it is queued to be made again


def test_without_sbatch_nothing_is_written(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="sbatch is not here: run this on a machine of the cluster"):
        slurm.submit()
    assert not slurm.run.exists()


def test_a_refused_submission_leaves_no_run(slurm: FakeSlurm) -> None:
    slurm.write("refuse", "allocation failure: Invalid partition name specified")
    said = "step 'a': Slurm would refuse it: Invalid partition name specified; change the step"
    with pytest.raises(UserError, match=said):
        slurm.submit()
    assert slurm.written() == []
    with pytest.raises(UserError, match="is no run folder"):
        status.rows(slurm.run)
    (slurm.folder / "refuse").unlink()
    slurm.submit()
    assert slurm.written() == ["001"]
    script = (slurm.run / "pipeline/submissions/001/a.sbatch").read_text()
    assert f"cd {slurm.run}/pipeline/submissions/001/code" in script
    rows = json.loads((slurm.run / "pipeline/submissions/001/jobs.json").read_text())
    assert rows[0]["tasks"] == {"a[x=1]": 0, "a[x=3]": 1}


def test_a_submissions_settings_are_as_private_as_the_umask_says(slurm: FakeSlurm) -> None:
    """They hold the site's [env], so perhaps tokens."""
    before = os.umask(0o077)
    try:
        slurm.submit()
    finally:
        os.umask(before)
    for name in ("settings.json", "resolved.json"):
        path = slurm.run / "pipeline" / "submissions" / "001" / name
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_run_path_that_sbatch_would_not_take_is_refused_first(slurm: FakeSlurm) -> None:
    slurm.run = slurm.run.with_name("my run")
    for dry_run in (False, True):
        with pytest.raises(UserError, match="--run .* would not take ' ' as it is"):
            slurm.submit(dry_run=dry_run)
    assert not slurm.run.exists()
