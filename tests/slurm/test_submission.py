"""What a submission freezes, which tasks it takes, and what its jobs wait for."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from gatewright import cli
from gatewright.errors import UserError
from slurm import freeze, local, node, pipeline, plan, queue, scheduler, spec, submission
from slurm.site import Site
from slurm.spec import Pipeline
from slurm.submission import QueuedStep, SubmittedTask

ROOT = Path(__file__).resolve().parents[2]
SITE = Site(account="", partition="")

TEXT = """
name = "p"
[params]
n = 1
[step.a]
command = "python -m a {n} {out}"
out = "a"
[step.b]
command = "python -m b {a} {out}"
matrix = { s = [1, 2, 3] }
needs = ["a"]
out = "b/{s}"
throttle = 2
[step.c]
command = "python -m c {b} {out}"
matrix = { s = [1, 2, 3] }
needs = ["b"]
out = "c/{s}"
[step.d]
command = "python -m d {c} {out}"
needs = ["c"]
out = "d"
"""


def load(tmp_path: Path) -> Pipeline:
    path = tmp_path / "p.toml"
    path.write_text(TEXT)
    return spec.load(path)


def test_an_array_waits_task_by_task_only_where_tasks_match(tmp_path: Path) -> None:
    p = load(tmp_path)
    a, b, c = (p.tasks_of(n) for n in "abc")
    rows = {
        "a": QueuedStep("a", "1", {"a": 0}, False, []),
        "b": QueuedStep("b", "2", {f"b[s={i + 1}]": i for i in range(3)}, True, []),
    }
    assert queue.dependencies(p, p.step("b"), b, rows, {}) == ["afterok:1"]
    assert queue.dependencies(p, p.step("c"), c, rows, {}) == ["aftercorr:2"]
    assert queue.dependencies(p, p.step("c"), c[1:], rows, {}) == ["afterok:2"]
    rows["c"] = QueuedStep("c", "3", {f"c[s={i + 1}]": i for i in range(3)}, True, [])
    assert queue.dependencies(p, p.step("d"), p.tasks_of("d"), rows, {}) == ["afterok:3"]
    assert queue.dependencies(p, p.step("a"), a, {}, {}) == []


def test_what_is_queued_already_is_awaited_and_not_taken_again(tmp_path: Path) -> None:
    p = load(tmp_path)
    why: dict[str, str | None] = {t.name: "not run yet" for t in p.tasks}
    active = {
        name: SubmittedTask(name, job, tmp_path)
        for name, job in (("a", "7"), ("b[s=1]", "8_0"), ("b[s=3]", "8_2"))
    }
    pending = queue.todo(list(p.tasks), why, active)
    assert [t.name for t in pending["b"]] == ["b[s=2]"]
    assert "a" not in pending
    assert queue.dependencies(p, p.step("b"), pending["b"], {}, active) == ["afterok:7"]
    rows = {"b": QueuedStep("b", "9", {"b[s=2]": 1}, True, [])}
    found = queue.dependencies(p, p.step("c"), pending["c"], rows, active)
    assert found == ["afterok:9", "afterok:8_0", "afterok:8_2"]


def test_a_dry_run_writes_everything_and_needs_no_scheduler(tmp_path: Path) -> None:
    load(tmp_path)
    site = tmp_path / "site.toml"
    site.write_text('account = "x"\npartition = ""\n')
    argv = [sys.executable, "-m", "slurm.pipeline", str(tmp_path / "p.toml"), "--submit"]
    argv += ["--dry-run", "--site", str(site), "--run", str(tmp_path / "run"), "--set", "n=5"]
    done = subprocess.run(
        argv, cwd=ROOT, env={"PATH": "/nowhere"}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "4 jobs, 8 tasks" in done.stdout
    folder = tmp_path / "run" / "pipeline" / "submissions" / "dry-run"
    assert {f.stem for f in folder.glob("*.sbatch")} == set("abcd")
    resolved = json.loads((folder / "resolved.json").read_text())
    assert resolved[0]["command"][3:] == ["5", str(tmp_path / "run" / "a")]
    again, frozen = submission.load(folder)
    assert again.params["n"] == "5"
    assert frozen.account == "x"
    assert submission.folders(tmp_path / "run") == []  # a dry run is no submission


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ("taken", "taken is a file"),
        ("taken/run", "taken is a file"),
        ("run", "run/pipeline is a file"),
        ("/proc/x", "cannot be made"),
        ("/sys", "cannot be made or written"),
        ("x" * 300, "File name too long"),
    ],
)
def test_a_run_folder_that_cannot_be(run: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "pipeline").write_text("")
    (tmp_path / "site.toml").write_text('account = ""\npartition = ""\n')
    (tmp_path / "p.toml").write_text('name = "p"\n[step.a]\ncommand = "x {out}"\nout = "a"\n')
    args = pipeline.Args(
        tmp_path / "p.toml",
        submit=True,
        dry_run=True,
        site=tmp_path / "site.toml",
        run=tmp_path / run,
    )
    with pytest.raises(UserError, match=message):
        pipeline.main(args)
    with pytest.raises(UserError, match="--run"):
        pipeline.main(dataclasses.replace(args, submit=False, local=True, dry_run=False))


def test_the_code_is_frozen_with_its_revision(tmp_path: Path) -> None:
    freeze.freeze_code(ROOT, tmp_path / "code", [tmp_path])
    for name in ("slurm/job.py", "gatewright/artifact.py", "REVISION"):
        assert (tmp_path / "code" / name).is_file()
    assert not (tmp_path / "code" / ".git").exists()
    assert not (tmp_path / "code" / ".venv").exists()
    code = "from gatewright import artifact; print(artifact.git_revision(), artifact.__file__)"
    seen = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "code", capture_output=True, text=True
    )
    revision, file = seen.stdout.split()
    assert revision == (tmp_path / "code" / "REVISION").read_text().strip()
    assert file.startswith(str(tmp_path))


@pytest.mark.parametrize("git", [True, False])
def test_runs_outputs_and_the_site_file_are_no_code(git: bool, tmp_path: Path) -> None:
    code, target = tmp_path / "code", tmp_path / "copy"
    names = [
        "slurm/a.py",
        "new.py",
        "site.toml",
        "run/pipeline/lock",
        "run/a/x",
        "out/manifest.json",
    ]
    names += ["out/x", "my/run/x", "pipeline/lock"]
    for name in names:
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        (code / name).write_text("text")
    if git:
        subprocess.run(["git", "init", "-q", str(code)], check=True)
        subprocess.run(["git", "-C", str(code), "add", "slurm"], check=True)
    freeze.freeze_code(code, target, [code / "my" / "run", code / "site.toml"])
    found = {str(p.relative_to(target)) for p in target.rglob("*") if p.is_file()}
    assert found == {"slurm/a.py", "new.py", "REVISION"}


def test_a_step_asked_for_again_is_forgotten(tmp_path: Path) -> None:
    p = load(tmp_path)
    task = p.tasks_of("a")[0]
    run = tmp_path / "run"
    (run / "a").mkdir(parents=True)
    (run / "a" / "manifest.json").write_text('{"content_hash": "1"}')
    fingerprint = plan.fingerprint(p, run, task)
    record = plan.Record("a", "done", fingerprint, [], "log", 0.0, outs=plan.out_hashes(run, task))
    plan.write_record(run, task, record)
    assert plan.why_run(p, run, task) is None
    assert local.reasons(p, run, list(p.tasks), set())["b[s=1]"] == "not run yet"
    with plan.forgotten(run, [task]):
        assert plan.why_run(p, run, task) == "asked for"
    assert plan.why_run(p, run, task) == "asked for"


def test_task_by_task_only_between_arrays(tmp_path: Path) -> None:
    """A step without a matrix after an array of one task: its index is 0, too."""
    path = tmp_path / "p.toml"
    path.write_text(TEXT.replace("[1, 2, 3]", "[1]"))
    p = spec.load(path)
    rows = {"c": QueuedStep("c", "3", {"c[s=1]": 0}, True, [])}
    assert queue.dependencies(p, p.step("d"), p.tasks_of("d"), rows, {}) == ["afterok:3"]


def test_the_rendezvous_comes_from_slurms_variables() -> None:
    env = {
        "SLURM_JOB_ID": "812345",
        "SLURM_NODEID": "3",
        "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7",
    }
    flags = node.rendezvous(16, env)
    port = node.master_port(env)
    expected = ["--node-rank=3", "--master-addr=10.0.0.7", f"--master-port={port}"]
    assert flags == expected
    other = [
        node.master_port({**env, "SLURM_STEP_ID": "1"}),
        node.master_port({**env, "SLURM_RESTART_COUNT": "1"}),
        node.master_port({**env, "SLURM_JOB_ID": "812346"}),
    ]
    assert len({port, *other}) == 4
    assert all(1024 < p < 32768 for p in [port, *other])
    assert node.master_port({**env, "SLURM_STEP_RESV_PORTS": "12001-12003"}) == 12001
    assert node.rendezvous(1, env)[-1] == "--rdzv-endpoint=localhost:0"


@pytest.mark.parametrize("module", ["slurm.job", "slurm.node"])
def test_the_inner_entry_points_say_what_they_are(module: str, tmp_path: Path) -> None:
    def run(*words: str, **env: str) -> tuple[int, str]:
        argv = [sys.executable, "-m", module, *words]
        done = subprocess.run(
            argv, cwd=ROOT, env={"PATH": "/nowhere", **env}, capture_output=True, text=True
        )
        return done.returncode, done.stdout + done.stderr

    code, text = run("--help")
    assert code == 0
    assert "Submission folder" in text
    assert run("x", "a", "0") == (
        2,
        "error: runs inside a Slurm job only; python -m slurm.pipeline submits one\n",
    )
    code, text = run(str(tmp_path), "a", "0", SLURM_JOB_ID="1")
    assert (code, text.count("\n")) == (2, 1)
    assert "is no submission folder" in text


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('out = "a"', 'out = "a"\nneeds = ["d"]', "need each other in a circle: a -> d -> c -> b"),
        ('needs = ["a"]', 'needs = ["e"]', "step 'b' needs 'e', which is no step"),
        ('out = "d"', 'out = "a"', "steps 'a' and 'd' both write a"),
        ('account = "x"', "", 'no account: write account = "NAME"'),
    ],
)
def test_wrong_input_is_one_line_before_anything_is_submitted(
    old: str,
    new: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def talk(*argv: str) -> None:
        raise AssertionError(f"the scheduler was asked: {argv}")

    monkeypatch.setattr(scheduler, "_call", talk)
    file, site, run = tmp_path / "p.toml", tmp_path / "site.toml", tmp_path / "run"
    file.write_text(TEXT.replace(old, new))
    site.write_text('account = "x"\npartition = ""\n'.replace(old, new))
    argv = [str(file), "--submit", "--site", str(site), "--run", str(run)]
    with pytest.raises(SystemExit) as left:
        cli.run(pipeline.main, pipeline.Args, prog="slurm.pipeline", argv=argv)
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not run.exists()
