"""The growing folder of answers: what it refuses, and what a full disk leaves of it."""

import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eval_bfcl import pools, results
from eval_bfcl.results import Results, check_label, model_facts, read_answers
from gatewright import artifact
from gatewright.errors import UserError

CELL = "pool_size=4/seed=0"
RUN = {"label": "m", "prompts_hash": "a", "limit": 4}


def begun(out: Path, **run: Any) -> Results:
    found = Results(out, "m", "simple_python")
    found.begin({**RUN, **run})
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Results]:
    made = begun(tmp_path / "r")
    yield made
    made.close()


def row(n: int) -> dict[str, Any]:
    return {"id": f"q{n}", "result": "x" * 50}


def a_file(at: Path) -> Path:
    at.write_text("x")
    return at


def holding(text: str) -> Callable[[Path], Path]:
    def make(at: Path) -> Path:
        at.mkdir()
        (at / "run.json").write_text(text)
        return at

    return make


def foreign(at: Path) -> Path:
    at.mkdir()
    (at / "thesis.txt").write_text("x")
    return at


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (a_file, "--out .*: cannot be written .File exists"),
        (lambda at: a_file(at) / "x", "--out .*: cannot be written .Not a directory"),
        (lambda at: Path("/proc/x"), "--out /proc/x: cannot be written"),
        (holding('{"label": '), "--out .*run.json: is not JSON"),
        (holding("[]"), "run.json: is not a JSON object"),
        (holding("{}"), "was begun with .* = None, not "),
        (foreign, "is not empty"),
    ],
)
def test_a_folder_that_cannot_be_filled_is_one_line(
    make: Callable[[Path], Path], message: str, tmp_path: Path
) -> None:
    out = make(tmp_path / "r")
    with pytest.raises(UserError, match=message):
        begun(out)
    if make is foreign:
        assert [p.name for p in out.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("label", ["", ".", "..", "a/b", "/", "a\0b", "a\nb"])
def test_a_name_does_not_lead_out_of_the_folder(label: str) -> None:
    with pytest.raises(UserError, match="--name .*: is no name for a file"):
        check_label(label)


def test_other_prompts_do_not_continue_a_folder(folder: Results) -> None:
    folder.close()
    with pytest.raises(UserError, match="was begun with other prompts, although"):
        begun(folder.out, prompts_hash="b")
    with pytest.raises(UserError, match="was begun with limit = 4, not 5"):
        begun(folder.out, prompts_hash="b", limit=5)  # the cause, not what follows from it
    begun(folder.out).close()


def test_the_lock_is_of_a_file_that_nobody_replaces(tmp_path: Path) -> None:
    """Two that begin at once: the second must not lock a run.json that the first replaces."""
    out = tmp_path / "r"
    out.mkdir()
    with open(out / results.LOCK, "ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # the first is about to write run.json
        with pytest.raises(UserError, match="another process is filling it"):
            begun(out)
        assert not (out / results.RUN).exists()
    begun(out).close()  # the first has died: its folder can be begun
    artifact.finish(out, kind="bfcl-results")
    with pytest.raises(UserError, match="is already finished"):
        begun(out)


def test_a_foreign_id_is_found_before_anything_is_asked(folder: Results) -> None:
    folder.append(CELL, [row(0), row(99)])
    with pytest.raises(UserError, match=r"_result.json:2: answers q99, which is not asked"):
        folder.done(CELL, {"q0", "q1"})


class FullDisk:
    """Stands for `os.replace` and file writes that find no space."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "replace", fail)
        monkeypatch.setattr(Path, "mkdir", lambda *_, **__: fail())


@pytest.mark.parametrize(
    "write",
    [
        lambda r: r.append(CELL, [row(2)]),
        lambda r: r.write_prompts(CELL, {"q0": "prompt"}),
        lambda r: r.write_failures(CELL, {"q0": "error"}),
        lambda r: r.sort(CELL, ["q1", "q0"]),
    ],
)
def test_a_full_disk_is_one_line_and_keeps_what_is_there(
    write: Callable[[Results], None], folder: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.append(CELL, [row(0), row(1)])
    with monkeypatch.context() as patch:
        FullDisk(patch)
        with pytest.raises(UserError, match="--out .*: cannot be written .No space left"):
            write(folder)
    assert [p.name for p in folder.out.rglob("*.tmp")] == []
    folder.close()
    again = begun(folder.out)
    assert again.done(CELL, {"q0", "q1"}) == {"q0", "q1"}
    write(again)
    again.close()


def test_a_line_that_a_full_disk_cut_is_asked_again(folder: Results) -> None:
    folder.append(CELL, [row(0)])
    with open(folder.file(CELL), "ab") as f:
        f.write(json.dumps(row(1)).encode()[:20])
    assert folder.done(CELL, {"q0", "q1"}) == {"q0"}
    folder.append(CELL, [row(1)])
    assert [r["id"] for r in pools.read_jsonl(folder.file(CELL))] == ["q0", "q1"]


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b'{"id": "q1", "latency": NaN}',
        b'{"id": ["x"]}',
        b'{"id": 7}',
        b"{}",
        b"[]",
        b'{"id": "\xff"}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_result_is_named_by_its_line(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(b'{"id": "q0", "result": ""}\n' + line + b"\n")
    with pytest.raises(UserError, match=r"r.json:2: is (not|no) .*; remove the line"):
        read_answers(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": {"gate_scale": [1]}}, r"extra.gate_scale is \[1\], not a number or null"),
        ({"seed": "0"}, "seed is '0', not a whole number or null"),
    ],
)
def test_a_damaged_manifest_of_a_model_is_one_line(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba2"}')
    artifact.finish(tmp_path, kind="hf-model", extra={"gate_scale": 1})
    assert model_facts(tmp_path)["gate_scale"] == 1
    manifest = json.loads((tmp_path / artifact.MANIFEST).read_text())
    (tmp_path / artifact.MANIFEST).write_text(json.dumps({**manifest, **change}))
    with pytest.raises(UserError, match=f"manifest.json: {message}"):
        model_facts(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (b"[]", "is not a JSON object"),
        (b'{"model_type": "\xff"}', "is not JSON"),
        (b"{", "is not JSON"),
        (b'{"max_position_embeddings": "long"}', "max_position_embeddings 'long'"),
    ],
)
def test_a_damaged_config_is_one_line(config: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(config)
    with pytest.raises(UserError, match=f"--model .*config.json: {message}"):
        model_facts(tmp_path)
