"""A sweep survives crashes, refuses mixed settings, and is finished only once."""

import json
from pathlib import Path

import pytest

from gatewright.errors import UserError
from synthetic.sweep import Sweep, verdict


def test_rows_survive_and_a_broken_line_is_cut_off(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with Sweep(out, "x", {"steps": 3}) as sweep:
        sweep.add({"seed": 0, "accuracy": 0.5})
        sweep.add({"seed": 1, "accuracy": 0.6})
    with open(out / "results.jsonl", "a") as f:
        f.write('{"seed": 2, "accu')
    with Sweep(out, "x", {"steps": 3}) as sweep:
        assert [r["seed"] for r in sweep.rows] == [0, 1]
        assert sweep.has(seed=1)
        assert not sweep.has(seed=2)
        sweep.add({"seed": 2, "accuracy": 0.7})
        sweep.finish({"mean": 0.6})
    lines = (out / "results.jsonl").read_text().splitlines()
    assert [json.loads(x)["seed"] for x in lines] == [0, 1, 2]
    assert json.loads((out / "manifest.json").read_text())["config"]["steps"] == 3


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    Sweep(tmp_path / "run", "x", {"steps": 3, "lr": 0.1})
    with pytest.raises(UserError, match="steps=3, not 4"):
        Sweep(tmp_path / "run", "x", {"steps": 4, "lr": 0.1})


def test_finished_or_foreign_folders_are_refused(tmp_path: Path) -> None:
    with Sweep(tmp_path / "run", "x", {}) as sweep:
        sweep.finish({})
    with pytest.raises(UserError, match="already finished"):
        Sweep(tmp_path / "run", "x", {})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("precious")
    with pytest.raises(UserError, match="other files"):
        Sweep(tmp_path / "other", "x", {})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (b"[1]", "holds another program's files"),
        (b'{"hidden_size": 64}', "holds another program's files"),
        (b"\xff\x00\x9c", "config.json: is damaged"),
        (b'{"experiment": "x", "st', "config.json: is damaged"),
    ],
)
def test_a_foreign_or_damaged_config_is_refused_and_kept(
    config: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(config)
    with pytest.raises(UserError, match=message):
        Sweep(tmp_path, "x", {"steps": 3})
    assert path.read_bytes() == config
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_a_folder_that_cannot_be_written_or_named_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"--out .*: cannot create or write it \(File name too"):
        Sweep(tmp_path / ("n" * 300), "x", {})

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("synthetic.sweep.artifact.write_json", denied)  # root may write anywhere
    with pytest.raises(UserError, match=r"cannot create or write it \(Permission denied\)"):
        Sweep(tmp_path, "x", {})


def test_verdicts_are_plain_json() -> None:
    assert json.loads(json.dumps(verdict("c", True, 0.25, "d")))["number"] == 0.25


def test_a_sweep_may_be_continued_with_more_seeds_but_no_other_settings(tmp_path: Path) -> None:
    with Sweep(tmp_path / "x", "test", {"seeds": [0], "lr": 1.0}, free=("seeds",)) as sweep:
        sweep.add({"seed": 0})
    with Sweep(tmp_path / "x", "test", {"seeds": [0, 1], "lr": 1.0}, free=("seeds",)) as sweep:
        assert sweep.has(seed=0)
        sweep.add({"seed": 1})
    assert json.loads((tmp_path / "x" / "config.json").read_text())["seeds"] == [0, 1]
    with pytest.raises(UserError, match="lr=1.0, not 2.0"):
        Sweep(tmp_path / "x", "test", {"seeds": [0, 1], "lr": 2.0}, free=("seeds",))


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    first = Sweep(tmp_path / "x", "test", {"seeds": [0]}, free=("seeds",))
    with pytest.raises(UserError, match="another process is writing there"):
        Sweep(tmp_path / "x", "test", {"seeds": [1]}, free=("seeds",))
    assert json.loads((tmp_path / "x" / "config.json").read_text())["seeds"] == [0]
    first.add({"seed": 0})
    with first:
        pass
    with Sweep(tmp_path / "x", "test", {"seeds": [1]}, free=("seeds",)) as second:
        assert second.has(seed=0)


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"5\n", "line 1 is no row"), (b'{"a": 1}\n\xff\n', "line 2 is damaged")],
)
def test_damaged_rows_are_named(tmp_path: Path, data: bytes, message: str) -> None:
    with Sweep(tmp_path / "x", "test", {}):
        pass
    (tmp_path / "x" / "results.jsonl").write_bytes(data)
    with pytest.raises(UserError, match=message):
        Sweep(tmp_path / "x", "test", {})
