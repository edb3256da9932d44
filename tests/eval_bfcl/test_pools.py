import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from eval_bfcl import pools
from gatewright import artifact
from gatewright.errors import UserError

CELL = "pool_size=4/seed=0"


@pytest.fixture
def folder(pools_1_4: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(pools_1_4, tmp_path / "p"))


def finish_again(folder: Path) -> None:
    """Make the manifest fit the files, as if they had been written so."""
    manifest = artifact.read_manifest(folder)
    (folder / artifact.MANIFEST).unlink()
    artifact.finish(folder, kind="pools", extra=manifest["extra"])


def cut(path: Path, lines: int) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:lines]))


@pytest.mark.parametrize("lost", [f"{CELL}/pools.jsonl", f"{CELL}/tools.jsonl"])
@pytest.mark.parametrize("how", ["short", "absent"])
def test_pools_that_lost_rows_since_they_were_made_are_refused(
    lost: str, how: str, folder: Path
) -> None:
    if how == "short":
        cut(folder / lost, 10)
    else:
        (folder / lost).unlink()
    with pytest.raises(UserError, match=f"--pools .*{lost}: has [0-9,]+ bytes, not the"):
        pools.load(folder)


def with_row(file: str, **fields: object) -> Callable[[Path], None]:
    """Return a function that changes fields of the first row of a file of a cell."""

    def damage(folder: Path) -> None:
        path = folder / CELL / file
        first, *rest = path.read_text().splitlines(keepends=True)
        row = {k: v for k, v in {**json.loads(first), **fields}.items() if v != "absent"}
        path.write_text("".join([json.dumps(row) + "\n", *rest]))

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / CELL / "pools.jsonl").write_text(""), "pools.jsonl: holds no question"),
        (lambda p: cut(p / CELL / "tools.jsonl", 5), "pools.jsonl:[0-9]+: names '.*', which .*"),
        (with_row("tools.jsonl", question_id="absent"), "tools.jsonl:1: lacks .*'question_id'"),
        (with_row("tools.jsonl", name=["x"]), "tools.jsonl:1: lacks a field .*unhashable"),
        (with_row("pools.jsonl", golds="absent"), "pools.jsonl:1: lacks a field .*'golds'"),
        (with_row("pools.jsonl", k="four"), "pools.jsonl:1: k is 'four', not a whole number"),
        (with_row("pools.jsonl", k=8), f"pools.jsonl:1: k = 8, seed = 0 in {CELL}"),
        (with_row("pools.jsonl", id="simple_python_900"), "pools.jsonl:1: the split has no ques"),
        (with_row("pools.jsonl", id=["x"]), r"pools.jsonl:1: id is \['x'\], not text"),
        (with_row("pools.jsonl", gold_rank="x"), "pools.jsonl:1: gold_rank is 'x', not a whole"),
        (with_row("pools.jsonl", retrieved=1), "pools.jsonl:1: retrieved is 1, not true or false"),
        (with_row("pools.jsonl", golds=[7]), "pools.jsonl:1: names or golds is no list of tool"),
        (with_row("pools.jsonl", gold_ranks=["1"]), "pools.jsonl:1: gold_ranks is no list of"),
        (with_row("tools.jsonl", schema="x"), "tools.jsonl:1: schema is 'x', not an object"),
        (with_row("pools.jsonl", names=5), "pools.jsonl:1: names is 5, not a list"),
        (
            with_row("pools.jsonl", names=[["x"]]),
            "pools.jsonl:1: names or golds is no list of tool",
        ),
    ],
)
def test_a_damaged_row_is_named(damage: Callable[[Path], None], message: str, folder: Path) -> None:
    damage(folder)
    finish_again(folder)
    with pytest.raises(UserError, match=f"{message}.*; build the pools again") as said:
        pools.load(folder)
    assert "\n" not in str(said.value)


@pytest.mark.parametrize("name", pools.FACTS)
def test_a_manifest_of_another_version_is_refused(name: str, folder: Path) -> None:
    path = folder / artifact.MANIFEST
    manifest = json.loads(path.read_text())
    del manifest["extra"][name]
    path.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=f"manifest.json: has no extra.{name} .*build_pools"):
        pools.load(folder)


@pytest.mark.parametrize(
    "line", [b'{"a": "\xff"}', b'{"a": ' + b"[" * 100_000, b'{"a": ' + b"9" * 5_000 + b"}", b"["]
)
def test_a_line_that_is_no_json_is_named(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line + b"\n")
    with pytest.raises(UserError, match="x.jsonl:2: is not JSON .*; make it so"):
        pools.read_jsonl(path, "make it so")
