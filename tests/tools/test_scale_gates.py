"""The command line of scale_gates, as people type it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gatewright import artifact
from gatewright.errors import UserError
from gatewright.gates import find, statistics
from tests.gatewright.gates import families
from tests.gatewright.gates.test_calibrate import add_tokenizer

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_tokenizer(families.save("mamba2", tmp_path_factory.mktemp("m") / "mamba2"))


def run(*words: str | Path, module: str = "tools.scale_gates") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *map(str, words)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        env={**os.environ, "GATEWRIGHT_QUIET": "1"},
    )


def medians(folder: Path) -> list[float]:
    layers = statistics.layer_gates(find.find_gates(folder))
    return [float(sum(sorted(x.tau)[1:3]) / 2) for x in layers]


def test_one_scale_writes_out_itself_several_write_siblings(model: Path, tmp_path: Path) -> None:
    done = run(model, "--scale", "0.5", "--out", tmp_path / "a")
    assert done.returncode == 0, done.stderr
    assert "median tau" in done.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    artifact.verify(tmp_path / "a")
    manifest = artifact.read_manifest(tmp_path / "a", "hf-model")
    assert manifest["parents"]["model"]["content_hash"] == artifact.content_hash(model)
    done = run(model, "--scale", "0.5,1,2", "--out", tmp_path / "b")
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b-s0.5", "b-s1", "b-s2"]
    for now, half in zip(medians(tmp_path / "b-s2"), medians(tmp_path / "b-s1"), strict=True):
        assert now == pytest.approx(half / 2, rel=1e-5)
    done = run(model, "--offset=-0.5,0.5", "--out", tmp_path / "c")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "c-d-0.5").is_dir()
    assert (tmp_path / "c-d0.5").is_dir()


def test_target_tau_layers_heads_and_a_table(model: Path, tmp_path: Path) -> None:
    done = run(model, "--target-tau", "64", "--out", tmp_path / "a", "--layers", "1")
    assert done.returncode == 0, done.stderr
    assert medians(tmp_path / "a")[1] == pytest.approx(64, rel=1e-4)
    assert medians(tmp_path / "a")[0] == medians(model)[0]
    shown = run(model, "--json", module="tools.show_gates")
    stats = json.loads(shown.stdout)
    stats["layers"][2]["tau"] = [9.0] * 4
    (tmp_path / "stats.json").write_text(json.dumps(stats))
    done = run(model, "--from", tmp_path / "stats.json", "--out", tmp_path / "b", "--force")
    assert done.returncode == 0, done.stderr
    assert medians(tmp_path / "b")[2] == pytest.approx(9, rel=1e-5)
    assert medians(tmp_path / "b")[0] == pytest.approx(medians(model)[0], rel=1e-6)


def test_in_place_and_undo(model: Path, tmp_path: Path) -> None:
    folder = add_tokenizer(families.save("mamba2", tmp_path / "m"))
    before = (folder / "model.safetensors").read_bytes()
    done = run(folder, "--scale", "0.25", "--in-place")
    assert done.returncode == 0, done.stderr
    assert "--undo takes it back" in done.stdout
    assert (folder / "model.safetensors").read_bytes() != before
    done = run(folder, "--undo")
    assert done.returncode == 0, done.stderr
    assert (folder / "model.safetensors").read_bytes() == before


def test_calibrate_and_the_no_decay_warning(model: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(" ".join(f"w{i % 90}" for i in range(200)))
    done = run(
        *(model, "--target-tau", "100", "--out", tmp_path / "a", "--force"),
        *("--calibrate", tmp_path / "text.txt", "--context-length", "100000000"),
    )
    assert done.returncode == 0, done.stderr
    assert "dt from data" in done.stdout
    done = run(
        *(model, "--offset=-40", "--out", tmp_path / "b", "--force"),
        *("--context-length", "100000000"),
    )
    assert "rounds a new one away; keep the state in fp32" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--scale", "0"], "--scale 0: a gate scale is a positive, finite number"),
        (["--scale", "-1"], "--scale -1: a gate scale is a positive, finite number"),
        (["--scale", "nan"], "--scale nan: a gate scale is a positive, finite number"),
        (["--scale", "1,x"], "--scale 1,x: 'x' is not a number"),
        (["--scale", "100"], "--force"),
        (["--sacle", "2"], "did you mean '--scale'?"),
        (["--scale", "2", "--offset", "1"], "give one of --scale, --offset"),
        ([], "give one of --scale, --offset"),
        (["--scale", "2", "--layers", "9"], "no gate in layer 9; layers with gates: 0-2"),
        (["--scale", "2", "--in-place"], "leave --out or --in-place out"),
        (["--offset", "1e39", "--force"], "fp32 holds no such rate"),
        (["--scale", "2,4", "--out", "/"], "--out /: has no name"),
        (["--undo", "--in-place"], "not --in-place"),
        (["--undo", "--scale", "2"], "--undo: takes no other flag"),
        (["--scale", "1,1"], "asked for twice"),
        (["--scale", "2", "--out", ""], "--out: is empty"),
        (["--from", ""], "--from: is empty"),
        (["--scale", "2", "--calibrate", ""], "--calibrate: is empty"),
        (["--scale", "1_0"], "--scale 1_0: '1_0' is not a number"),
        (["--scale", "0.5,,"], "--scale 0.5,,: '' is not a number"),
        (["--scale", "2", "--layers", "9" * 5000], "write numbers below 1,000,000"),
        (["--scale", "2", "--context-length", "9" * 400], "give a number of tokens from 1 to"),
        (["--scale", "2", "--context-length", "0", "--calibrate", "none"], "--context-length 0"),
        (["--target-tau", "1e7"], "--target-tau 1e+07: scales a decay rate of layer 0 by"),
        (["--scale", "2", "--out", "{tmp}/" + "x" * 300], "cannot create it (File name too long)"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    words: list[str], message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from gatewright import cli
    from tools import scale_gates

    argv = [str(model), *(word.replace("{tmp}", str(tmp_path)) for word in words)]
    if "--undo" not in words and "--out" not in words:
        argv += ["--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as left:
        cli.run(scale_gates.main, scale_gates.Args, prog="scale_gates", argv=argv)
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [["--scale", "2", "--in-place"], ["--undo"]])
def test_an_empty_path_is_not_the_current_folder(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`scale_gates "$UNSET" --in-place`, typed inside a checkpoint, must not edit it."""
    from gatewright import cli
    from tools import scale_gates

    monkeypatch.chdir(families.save("mamba2", tmp_path / "m"))
    with pytest.raises(UserError, match="the checkpoint's path is empty"):
        scale_gates.main(cli.parse(scale_gates.Args, ["", *words], prog="scale_gates"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_and_imports_stay_small(model: Path, tmp_path: Path) -> None:
    """No torch, no transformers: a 200 MB promise starts with what is imported."""
    code = (
        "import sys; from gatewright import cli; from tools import scale_gates as s\n"
        f"argv = [{str(model)!r}, '--scale', '2', '--out', {str(tmp_path / 'out')!r}]\n"
        "s.main(cli.parse(s.Args, argv, prog='x'))\n"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'transformers'}))\n"
        "status = dict(line.split(':', 1) for line in open('/proc/self/status'))\n"
        "print(int(status['VmHWM'].split()[0]) // 1024)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0, done.stderr
    *_, loaded, megabytes = done.stdout.splitlines()
    assert loaded == "[]"
    assert int(megabytes) < 120
