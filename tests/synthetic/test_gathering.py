"""Finished folders are joined whole and comparable, or one line says why not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gatewright import artifact
from gatewright.errors import UserError
from synthetic import gathering
from synthetic.sweep import Row, Sweep

CONFIG = {"size": "small", "recipe": {"steps": 10, "lr": 0.1}}


def finished(out: Path, rows: list[Row], **config: Any) -> Path:
    with Sweep(out, "test", {**CONFIG, **config}) as sweep:
        sweep.add_all(rows)
        sweep.finish({})
    return out


def read(*folders: Path, **kwargs: Any) -> gathering.Joined:
    return gathering.read(folders, "test", ["seed"], lambda row: ["y"], **kwargs)


def two(tmp_path: Path) -> list[Path]:
    return [finished(tmp_path / str(i), [{"seed": i, "y": 0.5}], seeds=[i]) for i in range(2)]


def test_finished_folders_are_joined(tmp_path: Path) -> None:
    folders = two(tmp_path)
    joined = read(*folders)
    assert [r["seed"] for r in joined.rows] == [0, 1]
    assert joined.config == {"experiment": "test", **CONFIG}  # which runs: not in common
    out = tmp_path / "all"
    gathering.write(out, joined, lambda folder, rows, config: {"runs": len(rows)})
    assert json.loads((out / "summary.json").read_text()) == {"runs": 2}
    artifact.verify(out)
    again = read(out)
    assert again.rows == joined.rows
    with pytest.raises(UserError, match="already finished"):
        gathering.write(out, joined, lambda folder, rows, config: {})


def test_a_run_that_two_folders_hold_is_refused_or_replaced(tmp_path: Path) -> None:
    later = finished(tmp_path / "later", [{"seed": 1, "y": 0.7}, {"seed": 2, "failed": "nan"}])
    folders = [*two(tmp_path), later]
    with pytest.raises(UserError, match="repeats the run 1; .*--replace"):
        read(*folders)
    assert [r.get("y") for r in read(*folders, replace=True).rows] == [0.5, 0.7, None]


def test_nothing_is_left_where_the_summary_fails(tmp_path: Path) -> None:
    def fails(folder: Path, rows: list[Row], config: Any) -> Row:
        raise UserError("no")

    with pytest.raises(UserError, match="no"):
        gathering.write(tmp_path / "all", read(*two(tmp_path)), fails)
    assert {p.name for p in tmp_path.iterdir()} == {"0", "1"}


def rows(data: bytes, *, whole: bool = True) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "results.jsonl").write_bytes(data)
        if whole:  # as if the folder had been finished so
            artifact.finish(folder, kind="synthetic", config={"experiment": "test", **CONFIG})

    return change


def manifest(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        found = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps({**found, **fields}))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (rows(b'{"seed": 1, "y"', whole=False), "results.jsonl: differs from what manifest.json"),
        (lambda f: (f / "results.jsonl").unlink(), "results.jsonl: is missing"),
        (rows(b""), "holds no runs"),
        (rows(b"\xff\xfe\n"), "line 1 is damaged"),
        (rows(b'{"seed":\n'), "line 1 is damaged"),
        (rows(b'{"seed": 1, "y": 1}'), "last line was cut short"),
        (rows(b"5\n"), "line 1 is no row"),
        (rows(b'{"y": 1}\n'), "line 1 has no seed"),
        (rows(b'{"seed": 1}\n'), "the run 1 has no y"),
        (rows(b'{"seed": 1, "y": 1}\n' * 2), "line 2 repeats the run 1"),
        (manifest(config=None), "lists no settings or no results.jsonl"),
        (manifest(files={}), "lists no settings or no results.jsonl"),
        (manifest(config={"experiment": "other"}), "holds other, not test"),
        (lambda f: (f / "manifest.json").unlink(), "--runs .* unfinished"),
        (
            manifest(config={"experiment": "test", "size": "small", "recipe": {"steps": 99}}),
            "--runs .*bad: has recipe.lr=None, but .*good has 0.1",
        ),
        (
            manifest(config={"experiment": "test", **CONFIG, "size": "paper"}),
            "--runs .*bad: has size='paper', but .*good has 'small'",
        ),
    ],
)
def test_bad_folders_are_named_and_left_as_they_are(
    tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    good = finished(tmp_path / "good", [])
    bad = finished(tmp_path / "bad", [{"seed": 1, "y": 1.0}])
    change(bad)
    before = {p.name: p.read_bytes() for p in bad.iterdir()}
    with pytest.raises(UserError, match=message) as caught:
        read(good, bad)
    assert "\n" not in str(caught.value)
    assert {p.name: p.read_bytes() for p in bad.iterdir()} == before
    with pytest.raises(UserError, match="--runs: name at least one"):
        read()
