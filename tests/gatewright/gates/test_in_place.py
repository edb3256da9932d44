"""Editing in place: undone byte for byte, at whatever moment the machine died."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gatewright import artifact
from gatewright.errors import UserError
from gatewright.gates import edits, find, in_place, rewrite
from gatewright.gates.edits import Edit
from tests.gatewright.gates import families


def content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def edit_in_place(folder: Path, s: float) -> None:
    gates = find.find_gates(folder)
    in_place.edit(gates, edits.resolve(Edit("scale", s), gates, {}), {})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A finished folder with a manifest, sharded."""
    families.save("mamba2", tmp_path / "source", max_shard_size="6KB")
    gates = find.find_gates(tmp_path / "source")
    plan = edits.resolve(Edit("scale", 1.0), gates, {})
    rewrite.write_edits(gates, [plan], tmp_path / "model", dts={})
    return tmp_path / "model"


def test_in_place_equals_a_copy_and_can_be_undone(folder: Path, tmp_path: Path) -> None:
    before = content(folder)
    gates = find.find_gates(folder)
    plan = edits.resolve(Edit("scale", 0.25), gates, {})
    rewrite.write_edits(gates, [plan], tmp_path / "copy", dts={})
    in_place.edit(gates, plan, {})
    for name, data in content(tmp_path / "copy").items():
        if name != "manifest.json":
            assert (folder / name).read_bytes() == data
    artifact.content_hash(folder)
    manifest = artifact.read_manifest(folder)
    assert manifest["extra"]["edits_in_place"][0]["edit"]["value"] == 0.25
    assert manifest["extra"]["gate_scale"] == 0.25
    changed = {n for n, d in before.items() if (folder / n).read_bytes() != d}
    for name in changed - {"manifest.json"}:
        assert manifest["files"][name]["sha256"] == artifact.sha256_file(folder / name)
    with pytest.raises(UserError, match="can still be undone"):
        edit_in_place(folder, 2.0)
    assert in_place.undo(folder) == 3
    after = content(folder)
    assert json.loads(after.pop("manifest.json")) == json.loads(before.pop("manifest.json"))
    assert after == before
    with pytest.raises(UserError, match="nothing to undo"):
        in_place.undo(folder)


@pytest.mark.parametrize("died_after", [0, 1])
def test_a_cut_short_edit_is_undone(
    died_after: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content(folder)
    synced = 0
    real = os.fsync

    class Died(BaseException):
        pass

    def fsync(fd: int) -> None:
        nonlocal synced
        real(fd)
        name = os.path.realpath(f"/proc/self/fd/{fd}")
        if name.endswith(".safetensors"):
            synced += 1
            if synced > died_after:
                raise Died

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(Died):
        edit_in_place(folder, 0.5)
    monkeypatch.undo()
    assert content(folder) != before
    in_place.undo(folder)
    after = content(folder)
    assert {n: d for n, d in after.items() if n != "manifest.json"} == {
        n: d for n, d in before.items() if n != "manifest.json"
    }


def test_links_are_not_edited_through(folder: Path, tmp_path: Path) -> None:
    """A copy made with --link shares files: editing one must not change the other."""
    gates = find.find_gates(folder)
    plan = edits.resolve(Edit("scale", 0.5, layers=frozenset({0})), gates, {})
    rewrite.write_edits(gates, [plan], tmp_path / "linked", dts={}, link=True)
    before = content(folder), content(tmp_path / "linked")
    with pytest.raises(UserError, match="shared with another folder"):
        edit_in_place(tmp_path / "linked", 0.5)
    assert (content(folder), content(tmp_path / "linked")) == before


def test_undo_refuses_what_changed_since(folder: Path) -> None:
    edit_in_place(folder, 0.5)
    gates = find.find_gates(folder)
    piece = gates.gates[0].A_log.pieces[0]
    with open(folder / piece.file, "r+b") as f:
        f.seek(piece.start)
        f.write(b"\0\0\0\0")
    before = content(folder)
    with pytest.raises(UserError, match="changed since the edit"):
        in_place.undo(folder)
    assert content(folder) == before


def test_a_copy_does_not_inherit_the_undo_file(folder: Path, tmp_path: Path) -> None:
    """It would block edits of the copy, and undo there what was done elsewhere."""
    edit_in_place(folder, 0.5)
    gates = find.find_gates(folder)
    plan = edits.resolve(Edit("scale", 0.5), gates, {})
    rewrite.write_edits(gates, [plan], tmp_path / "copy", dts={})
    names = {p.name for p in folder.iterdir()} - {in_place.UNDO}
    assert {p.name for p in (tmp_path / "copy").iterdir()} == names
    artifact.verify(tmp_path / "copy")


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"patches": [{"file": "x"}], "manifest": null}', '{"patches": 3}']
)
def test_damaged_undo_files(text: str, folder: Path) -> None:
    (folder / in_place.UNDO).write_text(text)
    with pytest.raises(UserError, match="is damaged"):
        in_place.undo(folder)


def test_an_undo_file_cannot_reach_outside(folder: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"AAAA")
    edit_in_place(folder, 0.5)
    record = json.loads((folder / in_place.UNDO).read_text())
    record["patches"] = [
        {"file": "../victim", "start": 0, "before": "QkJCQg==", "after_sha256": "0"}
    ]
    (folder / in_place.UNDO).write_text(json.dumps(record))
    with pytest.raises(UserError, match="not in the folder"):
        in_place.undo(folder)
    assert victim.read_bytes() == b"AAAA"
