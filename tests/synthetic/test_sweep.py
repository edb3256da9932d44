"""A sweep survives crashes, refuses mixed settings, and is finished only once."""

import json
from pathlib import Path

import pytest

from gatewright.errors import UserError
from synthetic.sweep import Sweep, gathered, verdict


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


def test_finished_folders_are_gathered(tmp_path: Path) -> None:
    for i in range(2):
        with Sweep(tmp_path / str(i), "test", {"size": "small", "seed": i}) as sweep:
            sweep.add({"seed": i, "y": 0.5})
            sweep.finish({})
    folders = [tmp_path / "0", tmp_path / "1"]
    with gathered(folders, tmp_path / "all", "test", ["seed"]) as sweep:
        assert [r["seed"] for r in sweep.rows] == [0, 1]
    with gathered(
        folders, tmp_path / "all", "test", ["seed"]
    ) as sweep:  # interrupted before its end
        assert [r["seed"] for r in sweep.rows] == [0, 1]
    with pytest.raises(UserError, match="holds test, not rules"):
        gathered(folders, tmp_path / "other", "rules", ["seed"])
    with pytest.raises(UserError, match="repeats the run 0"):
        gathered([folders[0], folders[0]], tmp_path / "other", "test", ["seed"])
    with Sweep(tmp_path / "again", "test", {"size": "small"}) as sweep:
        sweep.add({"seed": 1, "y": 0.7})
        sweep.finish({})
    three = [*folders, tmp_path / "again"]
    with gathered(three, tmp_path / "new", "test", ["seed"], replace=True) as sweep:
        assert [r["y"] for r in sweep.rows] == [0.5, 0.7]
        assert sweep.config["size"] == "small"
        assert "seed" not in sweep.config
    with Sweep(tmp_path / "2", "test", {"size": "paper"}) as sweep:
        sweep.finish({})
    with pytest.raises(UserError, match="mixes the sizes paper, small"):
        gathered([*folders, tmp_path / "2"], tmp_path / "other", "test", ["seed"])
    assert not (tmp_path / "other").exists()
    with Sweep(tmp_path / "3", "test", {"size": "small"}):
        pass
    with pytest.raises(UserError, match="--runs"):
        gathered([tmp_path / "3"], tmp_path / "other", "test", ["seed"])
