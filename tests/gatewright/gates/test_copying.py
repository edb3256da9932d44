"""How a scaled copy comes to be: links, shared blocks, full disks, hashes and marks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from gatewright import artifact
from gatewright.errors import UserError
from gatewright.gates import copying, edits, find, marks, rewrite
from gatewright.gates.edits import Edit
from tests.gatewright.gates.formats import huggingface, sharded_bf16


def test_link_shares_unchanged_files_and_leaves_the_input_alone(tmp_path: Path) -> None:
    source = sharded_bf16("mamba2", tmp_path / "source")
    gates = find.find_gates(source)
    before = {p.name: p.read_bytes() for p in source.iterdir()}
    plan = edits.resolve(Edit("scale", 0.5, layers=frozenset({1})), gates, {})
    rewrite.write_edits(gates, [plan], tmp_path / "out", dts={}, link=True)
    changed = {gates.gates[1].A_log.pieces[0].file}
    for name in before:
        same = (source / name).samefile(tmp_path / "out" / name)
        assert same == (name not in changed and name.endswith(".safetensors")), name
    with open(tmp_path / "out" / "config.json", "a") as f:  # people do edit it
        f.write(" ")
    assert {p.name: p.read_bytes() for p in source.iterdir()} == before


def test_link_shares_blocks_of_changed_files_where_the_filesystem_can(tmp_path: Path) -> None:
    source = huggingface("mamba2", tmp_path / "source")
    (tmp_path / "probe").write_bytes(b"x" * 8192)
    if not copying.share(tmp_path / "probe", tmp_path / "clone", may_link=False):
        pytest.skip("this filesystem has no reflinks (XFS and btrfs do)")
    before = (source / "model.safetensors").read_bytes()
    gates = find.find_gates(source)
    plan = edits.resolve(Edit("scale", 0.5), gates, {})
    rewrite.write_edits(gates, [plan], tmp_path / "out", dts={}, link=True)
    assert not (source / "model.safetensors").samefile(tmp_path / "out" / "model.safetensors")
    assert (source / "model.safetensors").read_bytes() == before
    rewrite.write_edits(gates, [plan], tmp_path / "copy", dts={})
    for file in source.iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == (
            tmp_path / "copy" / file.name
        ).read_bytes()
    artifact.verify(tmp_path / "out")


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = huggingface("mamba2", tmp_path / "source")
    before = {p.name: p.read_bytes() for p in source.iterdir()}
    gates = find.find_gates(source)
    plans = [edits.resolve(Edit("scale", s), gates, {}) for s in (0.5, 2.0)]
    written = 0
    real = copying._copy_many

    def full(*args: object) -> None:
        nonlocal written
        written += 1
        if written == 2:
            raise OSError(28, "No space left on device", "model.safetensors")
        real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(copying, "_copy_many", full)
    with pytest.raises(UserError, match=r"No space left on device; nothing was written"):
        rewrite.write_edits(gates, plans, tmp_path / "out", dts={})
    assert [p.name for p in tmp_path.iterdir()] == ["source"]
    assert {p.name: p.read_bytes() for p in source.iterdir()} == before


def test_a_hub_cache_snapshot_of_links_is_copied_for_real(tmp_path: Path) -> None:
    stored = huggingface("mamba2", tmp_path / "blobs")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in stored.iterdir():
        (snapshot / file.name).symlink_to(file)
    gates = find.find_gates(snapshot)
    rewrite.write_edits(
        gates, [edits.resolve(Edit("scale", 2), gates, {})], tmp_path / "out", dts={}
    )
    shutil.rmtree(stored)
    assert not any(p.is_symlink() for p in (tmp_path / "out").iterdir())
    artifact.verify(tmp_path / "out")


def test_hashes_are_taken_over_from_a_manifest_only_while_it_holds(tmp_path: Path) -> None:
    source = huggingface("mamba2", tmp_path / "source")
    gates = find.find_gates(source)
    rewrite.write_edits(gates, [edits.resolve(Edit("scale", 2), gates, {})], tmp_path / "a", dts={})
    known = marks.known(tmp_path / "a", whole=True)
    assert set(known) == {p.name for p in source.iterdir()}
    config = tmp_path / "a" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"note": 1}))
    assert "config.json" not in marks.known(tmp_path / "a", whole=True)


def test_large_files_are_marked_by_what_they_were_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marks, "END_BYTES", 1000)
    monkeypatch.setattr(marks, "WHOLE_BYTES", 2000)
    source = sharded_bf16("mamba2", tmp_path / "source")
    gates = find.find_gates(source)
    plans = [edits.resolve(Edit("scale", s), gates, {}) for s in (0.5, 2.0)]
    rewrite.write_edits(gates, plans, tmp_path / "m", dts={})
    rewrite.write_edits(gates, plans, tmp_path / "w", dts={}, whole_hashes=True)
    shard = gates.gates[0].A_log.pieces[0].file
    found = set()
    for label in ("s0.5", "s2"):
        folder = tmp_path / f"m-{label}"
        files = artifact.read_manifest(folder)["files"]
        assert files[shard]["sha256"].startswith(artifact.UNHASHED)
        assert files["config.json"]["sha256"] == artifact.sha256_file(source / "config.json")
        assert shard not in marks.known(folder, whole=True)  # hashed when it matters
        artifact.verify(folder)
        found.add(files[shard]["sha256"])
        whole = tmp_path / f"w-{label}"
        assert (folder / shard).read_bytes() == (whole / shard).read_bytes()
        stated = artifact.read_manifest(whole)["files"]
        assert all(e["sha256"] == artifact.sha256_file(whole / n) for n, e in stated.items())
    assert len(found) == 2
    (tmp_path / "m-s2" / shard).write_bytes(b"short")
    with pytest.raises(UserError, match="differs"):
        artifact.verify(tmp_path / "m-s2")


def test_marks_rest_on_the_hashes_of_a_finished_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes far from both ends count where the input's manifest states whole hashes."""
    monkeypatch.setattr(marks, "END_BYTES", 100)
    monkeypatch.setattr(marks, "WHOLE_BYTES", 300)
    folders = []
    for middle in (0.0, 1.0):
        folder = huggingface("mamba2", tmp_path / f"source{middle}")
        layer = find.find_gates(folder).checkpoint.tensors["backbone.layers.1.mixer.in_proj.weight"]
        with open(folder / layer.pieces[0].file, "r+b") as f:
            f.seek(layer.pieces[0].start)
            f.write(np.float32(middle).tobytes())
        folders.append(folder)

    def stated(name: str) -> list[str]:
        found = []
        for folder in folders:
            gates = find.find_gates(folder)
            out = tmp_path / f"{folder.name}-{name}"
            plan = edits.resolve(Edit("scale", 0.5), gates, {})
            rewrite.write_edits(gates, [plan], out, dts={})
            manifest = artifact.read_manifest(out)
            assert manifest["parents"]["model"]["content_hash"] in (
                artifact.content_hash(folder),
                artifact.content_hash_of({p.name: marks.mark_of_ends(p) for p in folder.iterdir()}),
            )
            found.append(manifest["files"]["model.safetensors"]["sha256"])
        return found

    assert len(set(stated("foreign"))) == 1  # a mark of the ends does not see it
    for folder in folders:
        artifact.finish(folder, kind="hf-model")
    assert len(set(stated("finished"))) == 2
    chained = find.find_gates(tmp_path / "source0.0-finished")
    plan = edits.resolve(Edit("scale", 2), chained, {})
    rewrite.write_edits(chained, [plan], tmp_path / "chain", dts={})
    parent = artifact.read_manifest(tmp_path / "chain")["parents"]["model"]
    assert parent["content_hash"] == artifact.content_hash(tmp_path / "source0.0-finished")


def test_output_inside_the_input_is_refused(tmp_path: Path) -> None:
    source = huggingface("mamba2", tmp_path / "source")
    gates = find.find_gates(source)
    plan = edits.resolve(Edit("scale", 2), gates, {})
    with pytest.raises(UserError, match="lies inside the checkpoint"):
        rewrite.write_edits(gates, [plan], source / "out", dts={})
    with pytest.raises(UserError, match="asked for twice"):
        rewrite.write_edits(gates, [plan, plan], tmp_path / "out", dts={})
