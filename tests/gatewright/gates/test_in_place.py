"""Editing in place: undone byte for byte, at whatever moment the machine died."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    with pytest.raises(UserError, match="interrupted half-way.* --undo restores"):
        find.find_gates(folder)
    in_place.undo(folder)
    find.find_gates(folder)
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


def test_an_edit_torn_inside_a_tensor_is_undone(folder: Path) -> None:
    """A page of a large tensor may have reached the disk and the next one not."""
    before = content(folder)
    edit_in_place(folder, 0.5)
    file = find.find_gates(folder).gates[0].A_log.pieces[0].file
    old, new = before[file], (folder / file).read_bytes()
    changed = [i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
    for torn in (changed[1], changed[len(changed) // 2]):
        (folder / file).write_bytes(new[:torn] + old[torn:])
        undo_file = (folder / in_place.UNDO).read_bytes()
        in_place.undo(folder)
        assert (folder / file).read_bytes() == old
        (folder / in_place.UNDO).write_bytes(undo_file)


def test_an_interrupted_undo_is_no_sound_input(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content(folder)
    edit_in_place(folder, 0.5)
    monkeypatch.setattr(in_place, "_write", failing(in_place._write, after=1))
    with pytest.raises(UserError, match=r"Input/output error.*half changed.* --undo"):
        in_place.undo(folder)
    monkeypatch.undo()
    with pytest.raises(UserError, match="interrupted half-way"):
        find.find_gates(folder)
    in_place.undo(folder)
    assert {n: d for n, d in content(folder).items() if n != "manifest.json"} == {
        n: d for n, d in before.items() if n != "manifest.json"
    }


def failing(real: Callable[..., None], after: int) -> Callable[..., None]:
    calls = 0

    def write(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > after:
            raise OSError(5, "Input/output error", "a disk")
        real(*args)

    return write


def test_a_failing_disk_names_the_way_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_place, "_write", failing(in_place._write, after=1))
    with pytest.raises(UserError, match=r"a disk.*Input/output error.*half changed.* --undo"):
        edit_in_place(folder, 0.5)


@pytest.mark.parametrize(
    "change",
    [
        {"files": {"model-00001-of-00003.safetensors": {}}},
        {"files": 5},
        {"extra": []},
        {"extra": {"edits_in_place": 5}},
        {"kind": None, "files": None},
    ],
)
def test_an_incomplete_manifest_is_refused_before_the_edit(
    change: dict[str, Any], folder: Path
) -> None:
    manifest = folder / artifact.MANIFEST
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | change))
    before = content(folder)
    with pytest.raises(UserError, match=r"manifest\.json: "):
        edit_in_place(folder, 0.5)
    assert content(folder) == before


def test_undo_does_not_reach_a_copy_that_was_linked_since(folder: Path, tmp_path: Path) -> None:
    """Edit layer 0 in place, link a copy with another edit, undo: the copy stays as it is."""
    before = content(folder)
    gates = find.find_gates(folder)
    in_place.edit(gates, edits.resolve(Edit("scale", 0.5, layers=frozenset({0})), gates, {}), {})
    gates = find.find_gates(folder)
    plan = edits.resolve(Edit("scale", 0.5, layers=frozenset({2})), gates, {})
    rewrite.write_edits(gates, [plan], tmp_path / "linked", dts={}, link=True)
    edited = gates.gates[0].A_log.pieces[0].file
    assert (folder / edited).samefile(tmp_path / "linked" / edited)
    linked = content(tmp_path / "linked")
    in_place.undo(folder)
    assert content(tmp_path / "linked") == linked
    assert (folder / edited).read_bytes() == before[edited]
    assert {p.name for p in folder.iterdir()} == set(before)


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
    "text", ["{", "[]", '{"patches": [{"file": "x"}], "manifest": null}', "[" * 100_000]
)
def test_undo_files_that_are_none(text: str, folder: Path) -> None:
    (folder / in_place.UNDO).write_text(text)
    with pytest.raises(UserError, match="is damaged"):
        in_place.undo(folder)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"format": "another"}, "is damaged"),
        ({"state": "half"}, "is damaged"),
        ({"manifest": "{"}, "is damaged"),
        ({"manifest": 5}, "is damaged"),
        ({"patches": 3}, "is damaged"),
        ({"patch": {"start": -5}}, "not in the folder"),
        ({"patch": {"start": 2**70}}, "not in the folder"),
        ({"patch": {"start": "x"}}, "is damaged"),
        ({"patch": {"before": "AAAA"}}, "is damaged"),
        ({"patch": {"before": "?"}}, "is damaged"),
        ({"patch": {"file": "a\0b"}}, "not in the folder"),
        ({"patch": {"file": "x" * 5000}}, "not in the folder"),
        ({"patch": {"file": "."}}, "not in the folder"),
        ({"patch": {"file": "gone.safetensors"}}, "not in the folder"),
    ],
)
def test_damaged_undo_files_are_refused_before_anything_is_restored(
    change: dict[str, Any], match: str, folder: Path
) -> None:
    edit_in_place(folder, 0.5)
    record = json.loads((folder / in_place.UNDO).read_text())
    record["patches"][-1] |= change.pop("patch", {})
    (folder / in_place.UNDO).write_text(json.dumps(record | change))
    before = content(folder)
    with pytest.raises(UserError, match=match):
        in_place.undo(folder)
    assert content(folder) == before


def test_an_undo_file_cannot_reach_outside(folder: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"AAAA")
    edit_in_place(folder, 0.5)
    record = json.loads((folder / in_place.UNDO).read_text())
    record["patches"] = [
        {"file": "../victim", "start": 0, "before": "QkJCQg==", "after": "QUFBQQ=="}
    ]
    (folder / in_place.UNDO).write_text(json.dumps(record))
    with pytest.raises(UserError, match="not in the folder"):
        in_place.undo(folder)
    assert victim.read_bytes() == b"AAAA"
