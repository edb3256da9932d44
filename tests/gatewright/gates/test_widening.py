"""--keep-fp32-gates: every narrower gate in fp32, nothing else touched, and all of it said."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import pytest
import torch

from gatewright import artifact
from gatewright.errors import UserError
from gatewright.gates import edits, find, rewrite
from gatewright.gates.edits import Edit
from tests.gatewright.gates import families
from tests.gatewright.gates.formats import pytorch_bin, sharded_bf16
from tests.gatewright.gates.test_rewrite import is_gate, loaded

INDEX = "model.safetensors.index.json"


def test_keep_fp32_gates_widens_nothing_but_the_gates(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = sharded_bf16("mamba2", tmp_path / "source")
    gates = find.find_gates(source)
    plan = edits.resolve(Edit("scale", 0.7), gates, {})
    (done,) = rewrite.write_edits(gates, [plan], tmp_path / "out", dts={}, fp32=True)
    before, after = loaded(source), loaded(tmp_path / "out")
    assert before.keys() == after.keys()
    for name in before:
        if is_gate(name):
            exact = (before[name].double() + math.log(0.7)).float()
            assert torch.equal(after[name], exact)
        else:
            assert torch.equal(after[name], before[name])
    assert done.report["rounding"]["decay_rate_relative_error_max"] < 1e-6
    assert [row["stored_as"] for row in done.report["layers"]] == ["F32"] * 3
    artifact.verify(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    name = gates.gates[0].A_log.name
    assert torch.equal(model.get_parameter(name).data, after[name])
    binary = pytorch_bin("mamba2", tmp_path / "bin")
    other = find.find_gates(binary)
    with pytest.raises(UserError, match="--keep-fp32-gates"):
        rewrite.write_edits(
            other, [edits.resolve(Edit("scale", 2), other, {})], tmp_path / "x", dts={}, fp32=True
        )


def test_gates_that_are_not_edited_are_widened_too(tmp_path: Path) -> None:
    """What is reported as stored in F32 is, at scale 1 and in layers that are not selected."""
    source = sharded_bf16("mamba2", tmp_path / "source")
    gates = find.find_gates(source)
    for name, edit in (
        ("same", Edit("scale", 1.0)),
        ("one", Edit("scale", 0.5, layers=frozenset({1}))),
    ):
        plan = edits.resolve(edit, gates, {})
        (done,) = rewrite.write_edits(gates, [plan], tmp_path / name, dts={}, fp32=True, link=True)
        assert done.report["rounding"]["stored_as"] == ["F32"]
        before, after = loaded(source), loaded(tmp_path / name)
        for tensor, new in after.items():
            assert new.dtype == (torch.float32 if is_gate(tensor) else before[tensor].dtype)
            if "layers.1." not in tensor or name == "same":
                assert torch.equal(new.float(), before[tensor].float()), tensor
        artifact.verify(tmp_path / name)


def test_the_index_states_the_new_size_and_keeps_its_other_bytes(tmp_path: Path) -> None:
    source = sharded_bf16("mamba2", tmp_path / "source")
    gates = find.find_gates(source)
    plan = edits.resolve(Edit("scale", 0.5), gates, {})
    rewrite.write_edits(gates, [plan], tmp_path / "out", dts={}, fp32=True, link=True)
    old, new = ((folder / INDEX).read_text() for folder in (source, tmp_path / "out"))
    sizes = [json.loads(text)["metadata"]["total_size"] for text in (old, new)]
    assert sizes[1] == sum(t.nbytes for t in loaded(tmp_path / "out").values())
    assert new == old.replace(f'"total_size": {sizes[0]}', f'"total_size": {sizes[1]}')
    artifact.verify(tmp_path / "out")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_wide_already_is_patched_as_ever(dtype: torch.dtype, tmp_path: Path) -> None:
    source = families.save("mamba2", tmp_path / "source", dtype=dtype)
    gates = find.find_gates(source)
    plan = edits.resolve(Edit("scale", 0.7), gates, {})
    for name, fp32 in (("plain", False), ("kept", True)):
        rewrite.write_edits(gates, [plan], tmp_path / name, dts={}, fp32=fp32)
    for file in source.iterdir():
        data = (tmp_path / "plain" / file.name).read_bytes()
        assert (tmp_path / "kept" / file.name).read_bytes() == data


def test_a_file_of_mixed_types_is_read_back(tmp_path: Path) -> None:
    """fp64 gates keep their type beside a bf16 gate that is widened."""
    model = families.build("mamba2")
    for i, dtype in enumerate((torch.bfloat16, torch.float64, torch.float32)):
        mixer = model.backbone.layers[i].mixer
        mixer.A_log.data = mixer.A_log.data.to(dtype)
    model.save_pretrained(tmp_path / "source")
    gates = find.find_gates(tmp_path / "source")
    plan = edits.resolve(Edit("scale", 0.7), gates, {})
    (done,) = rewrite.write_edits(gates, [plan], tmp_path / "out", dts={}, fp32=True)
    assert [row["stored_as"] for row in done.report["layers"]] == ["F32", "F64", "F32"]
    before, after = loaded(tmp_path / "source"), loaded(tmp_path / "out")
    for name, old in before.items():
        if is_gate(name):
            exact = old.double() + math.log(0.7)
            assert torch.equal(after[name], exact.to(after[name].dtype)), name
        else:
            assert torch.equal(after[name], old), name
    data = (tmp_path / "out" / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    for name, entry in json.loads(data[8 : 8 + length]).items():
        size = {"F64": 8, "F32": 4}.get(entry.get("dtype"), 1)
        assert entry.get("data_offsets", [0])[0] % size == 0, name
