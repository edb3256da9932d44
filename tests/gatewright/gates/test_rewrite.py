"""Formats x families x edits: A_log changes as asked, and not one other byte does."""

from __future__ import annotations

import json
import math
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from gatewright import artifact
from gatewright.checkpoints import dtypes
from gatewright.gates import edits, find, rewrite
from gatewright.gates.edits import Edit
from tests.gatewright.gates import families
from tests.gatewright.gates.formats import FORMATS, huggingface, sharded_bf16

EDITS = {
    "scale": Edit("scale", 0.5),
    "stronger": Edit("scale", 3.0),
    "offset": Edit("offset", -1.25),
    "target_tau": Edit("target_tau", 50.0),
    "one_layer": Edit("scale", 0.5, layers=frozenset({0})),
    "two_heads": Edit("scale", 0.5, heads=frozenset({0, 1})),
    "table": Edit("table", table_key="scale", table=((0, (0.25,)),)),
}


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder by the ecosystem's own readers, masters included."""
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.rglob("*.safetensors")):
        found.update(load_file(file))
    for file in sorted([*folder.rglob("*.bin"), *folder.rglob("*.pt")]):
        content = torch.load(file, weights_only=True)
        content = content.get("module", content)
        prefix = f"{file.parent.name}/{file.name}/" if "zero" in file.parts else ""
        found.update({prefix + n: t for n, t in content.items() if torch.is_tensor(t)})
    return found


def expected_offset(edit: Edit, layer: int, heads: int, median_tau: float) -> np.ndarray:
    """What an edit means for one layer, said once more in plain terms."""
    if edit.kind == "table":
        return np.full(heads, math.log(0.25) if layer == 0 else 0.0)
    shift = {
        "scale": lambda: math.log(edit.value),
        "offset": lambda: edit.value,
        "target_tau": lambda: math.log(median_tau / edit.value),
    }[edit.kind]()
    found = np.full(heads, shift)
    if edit.layers is not None and layer not in edit.layers:
        found[:] = 0
    if edit.heads is not None:
        found[[h for h in range(heads) if h not in edit.heads]] = 0
    return found


def is_gate(name: str) -> bool:
    return name.endswith(("A_log", "A_log/fp32.pt/param"))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family", families.FAMILIES)
def test_only_the_gates_change_and_they_change_as_asked(
    form: str, family: str, tmp_path: Path
) -> None:
    source = FORMATS[form](family, tmp_path / "source")
    gates = find.find_gates(source)
    assert gates.warnings == ()
    before = loaded(source)
    taus = np.concatenate([gates.tau(g).ravel() for g in gates.gates])
    names = list(EDITS) if "deepspeed" not in form else ["scale", "two_heads", "table"]
    plans = [edits.resolve(EDITS[n], gates, {}, force=True) for n in names]
    for name, plan in zip(names, plans, strict=True):
        out = tmp_path / name
        rewrite.write_edits(gates, [plan], out, dts={})
        artifact.verify(out)
        after = loaded(out)
        assert before.keys() == after.keys()
        for tensor in before:
            if not is_gate(tensor):
                assert torch.equal(before[tensor], after[tensor]), (name, tensor)
        for gate in gates.gates:
            offset = expected_offset(EDITS[name], gate.layer, gate.n_heads, float(np.median(taus)))
            for tensor in (t for t in before if is_gate(t)):
                if gate.A_log.name not in tensor:
                    continue
                old = before[tensor].double().reshape(gate.n_heads, -1)
                exact = old + torch.from_numpy(offset)[:, None]
                new = after[tensor].reshape(gate.n_heads, -1)
                if name == "target_tau":  # the median is taken in fp32
                    ulp = torch.finfo(new.dtype).eps * exact.abs().clamp(min=1)
                    assert ((new - exact).abs() <= ulp + 1e-6).all(), (name, tensor)
                else:
                    assert torch.equal(new, exact.to(new.dtype)), (name, tensor)
        assert_no_other_byte_changed(source, out, gates)


def assert_no_other_byte_changed(source: Path, out: Path, gates: find.Gates) -> None:
    """Compare every file byte by byte: differences lie in A_log (and zip checksums of it)."""
    allowed: dict[str, set[int]] = {}
    for gate in gates.gates:
        for tensor in (gate.A_log, *gate.masters):
            for piece in tensor.pieces:
                size = math.prod(piece.shape) * dtypes.itemsize(tensor.dtype)
                spots = allowed.setdefault(piece.file, set())
                spots.update(range(piece.start, piece.start + size))
                for at in piece.entry.checksums if piece.entry else ():
                    spots.update(range(at, at + 4))
    files = {p.relative_to(source) for p in source.rglob("*") if p.is_file()}
    written = {p.relative_to(out) for p in out.rglob("*") if p.is_file()}
    assert written == files | {Path("manifest.json")}
    for file in files:
        a, b = (np.frombuffer((root / file).read_bytes(), np.uint8) for root in (source, out))
        assert a.size == b.size, file
        changed = set(np.flatnonzero(a != b).tolist())
        assert changed <= allowed.get(file.as_posix(), set()), file
    for file in (f for f in written if f.suffix in (".bin", ".pt")):
        with zipfile.ZipFile(out / file) as archive:
            assert archive.testzip() is None


@pytest.mark.parametrize("family", families.FAMILIES)
def test_logits_equal_those_of_a_model_edited_in_memory(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = families.save(family, tmp_path / "source", max_shard_size="8KB")
    gates = find.find_gates(source)
    plan = edits.resolve(Edit("scale", 0.3), gates, {})
    rewrite.write_edits(gates, [plan], tmp_path / "out", dts={})
    tokens = torch.arange(2, 42).remainder(families.VOCAB)[None]
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(source).eval()
        unscaled = plain(input_ids=tokens).logits
        for name, parameter in plain.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_((parameter.double() + math.log(0.3)).float())
        expected = plain(input_ids=tokens).logits
        scaled = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
        assert torch.equal(scaled(input_ids=tokens).logits, expected)
    assert not torch.equal(unscaled, expected)


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_a_mamba_ssm_checkpoint_with_its_own_config(family: str, tmp_path: Path) -> None:
    """state-spaces' layout: no model_type, the mixer's settings in ssm_cfg, tied weights."""
    folder = tmp_path / "source"
    folder.mkdir()
    state = families.build(family).state_dict()
    state["backbone.embedding.weight"] = state.pop("backbone.embeddings.weight")
    state["lm_head.weight"] = state["backbone.embedding.weight"]
    torch.save(state, folder / "pytorch_model.bin")
    layer = {"mamba": "Mamba1", "mamba2": "Mamba2"}[family]
    config = {"d_model": 16, "n_layer": 3, "ssm_cfg": {"layer": layer, "dt_limit": [0.25, 0.5]}}
    (folder / "config.json").write_text(json.dumps(config))
    gates = find.find_gates(folder)
    assert (gates.model_type, gates.warnings) == (family, ())
    assert gates.dt_limit == (0.25, 0.5)
    plan = edits.resolve(Edit("scale", 0.5), gates, {})
    rewrite.write_edits(gates, [plan], tmp_path / "out", dts={})
    after = loaded(tmp_path / "out")
    for name, old in loaded(folder).items():
        new = (old.double() + math.log(0.5)).float() if is_gate(name) else old
        assert torch.equal(after[name], new), name
    assert_no_other_byte_changed(folder, tmp_path / "out", gates)


def test_several_edits_read_the_checkpoint_once_and_appear_together(tmp_path: Path) -> None:
    source = sharded_bf16("mamba2", tmp_path / "source")
    gates = find.find_gates(source)
    plans = [edits.resolve(Edit("scale", s), gates, {}) for s in (0.5, 1.0, 2.0)]
    done = rewrite.write_edits(gates, plans, tmp_path / "m", dts={})
    assert [d.folder.name for d in done] == ["m-s0.5", "m-s1", "m-s2"]
    for file in source.iterdir():
        assert (tmp_path / "m-s1" / file.name).read_bytes() == file.read_bytes()
    manifests = [artifact.read_manifest(d.folder, "hf-model") for d in done]
    assert {m["parents"]["model"]["content_hash"] for m in manifests} == {
        artifact.content_hash(source)
    }
    assert manifests[1]["content_hash"] == artifact.content_hash(source)
    assert manifests[0]["config"]["edit"] == {
        "kind": "scale",
        "value": 0.5,
        "layers": "all",
        "heads": "all",
    }
    layer = manifests[2]["extra"]["gates"]["layers"][0]
    assert layer["tau_after"] == pytest.approx(layer["tau_before"] / 2, rel=0.02)
    for d in done:
        artifact.verify(d.folder)


def test_a_chain_of_edits_is_traced(tmp_path: Path) -> None:
    source = huggingface("mamba2", tmp_path / "source")
    previous = source
    for name, s in (("a", 0.5), ("b", 2.0)):
        gates = find.find_gates(previous)
        rewrite.write_edits(
            gates, [edits.resolve(Edit("scale", s), gates, {})], tmp_path / name, dts={}
        )
        manifest = artifact.read_manifest(tmp_path / name)
        assert manifest["parents"]["model"]["content_hash"] == artifact.content_hash(previous)
        previous = tmp_path / name
    back, there = loaded(tmp_path / "b"), loaded(source)
    for name in there:
        torch.testing.assert_close(back[name], there[name], atol=2e-7, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_s_then_one_over_s_returns_within_one_spacing(dtype: torch.dtype, tmp_path: Path) -> None:
    """One unit in the last place of the stored type, at the larger of the two magnitudes."""
    source = families.save("mamba2", tmp_path / "source", dtype=dtype)
    original = find.find_gates(source)
    for s in (0.5, 0.7, 3.0, 16.0):
        first = find.find_gates(source)
        rewrite.write_edits(
            first, [edits.resolve(Edit("scale", s), first, {})], tmp_path / f"a{s}", dts={}
        )
        second = find.find_gates(tmp_path / f"a{s}")
        rewrite.write_edits(
            second, [edits.resolve(Edit("scale", 1 / s), second, {})], tmp_path / f"b{s}", dts={}
        )
        back = find.find_gates(tmp_path / f"b{s}")
        for a, mid, b in zip(original.gates, second.gates, back.gates, strict=True):
            start, middle = a.values(original.checkpoint), mid.values(second.checkpoint)
            unit = dtypes.ulp(np.maximum(np.abs(start), np.abs(middle)), a.A_log.dtype)
            assert (np.abs(b.values(back.checkpoint) - start) <= unit).all()


def test_rounding_is_reported(tmp_path: Path) -> None:
    source = families.save("mamba2", tmp_path / "source", dtype=torch.bfloat16)
    gates = find.find_gates(source)
    (done,) = rewrite.write_edits(
        gates, [edits.resolve(Edit("scale", 0.7), gates, {})], tmp_path / "out", dts={}
    )
    worst = 0.0
    for tensor, new in loaded(tmp_path / "out").items():
        if is_gate(tensor):
            exact = loaded(source)[tensor].double() + math.log(0.7)
            worst = max(worst, float((torch.exp(new.double() - exact) - 1).abs().max()))
    rounding = done.report["rounding"]
    assert rounding["stored_as"] == ["BF16"]
    assert rounding["decay_rate_relative_error_max"] == pytest.approx(worst, rel=1e-3)
    assert 1e-5 < worst < 0.01
