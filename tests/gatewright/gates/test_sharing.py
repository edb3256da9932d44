"""Bytes and files that hold more than one gate's truth: refused, or said."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, save

from gatewright.checkpoints import opening
from gatewright.errors import UserError
from gatewright.gates import edits, find, in_place, rewrite
from gatewright.gates.edits import Edit
from tests.gatewright.gates import families
from tests.gatewright.gates.formats import deepspeed_universal, huggingface, pytorch_bin


def views(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Give a gate the storage of a larger tensor, as a careless script does."""
    name = next(n for n in state if n.endswith("A_log"))
    large = torch.cat([state[name].flatten(), torch.zeros(7, dtype=state[name].dtype)])
    return state | {name: large[: state[name].numel()].view_as(state[name]), "large": large}


def of_pytorch(folder: Path) -> Path:
    pytorch_bin("mamba2", folder)
    file = folder / "pytorch_model.bin"
    torch.save(views(torch.load(file, weights_only=True)), file)
    return folder


def of_deepspeed(folder: Path) -> Path:
    deepspeed_universal("mamba2", folder)
    file = folder / "mp_rank_00_model_states.pt"
    states = torch.load(file, weights_only=True)
    both = views(states["module"])
    torch.save(states | {"averages": {"x": both.pop("large")}, "module": both}, file)
    return folder


@pytest.mark.parametrize("make", [of_pytorch, of_deepspeed])
def test_a_gate_that_is_part_of_another_tensor_is_refused(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    source = make(tmp_path / "source")
    before = {p: p.read_bytes() for p in source.rglob("*") if p.is_file()}
    gates = find.find_gates(source)
    plan = edits.resolve(Edit("scale", 0.5), gates, {})
    names = r"A_log and (large|averages\.x) share bytes"
    with pytest.raises(UserError, match=names):
        rewrite.write_edits(gates, [plan], tmp_path / "out", dts={})
    with pytest.raises(UserError, match=names):
        in_place.edit(gates, plan, {})
    assert [p.name for p in tmp_path.iterdir()] == ["source"]
    assert {p: p.read_bytes() for p in source.rglob("*") if p.is_file()} == before
    last = gates.gates[-1].layer  # which shares nothing
    rest = edits.resolve(Edit("scale", 0.5, layers=frozenset({last})), gates, {})
    rewrite.write_edits(gates, [rest], tmp_path / "out", dts={})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_megatron_boxes_that_share_bytes_or_elements_are_refused(tmp_path: Path) -> None:
    state = {"a.A_log": torch.zeros(4), "b": torch.ones(4)}
    save(state, storage_writer=FileSystemWriter(tmp_path / "sound"), no_dist=True)
    assert len(opening.open_checkpoint(tmp_path / "sound").tensors) == 2

    def changed(name: str, change: Callable[[object], None]) -> Path:
        shutil.copytree(tmp_path / "sound", tmp_path / name)
        file = tmp_path / name / ".metadata"
        metadata = FileSystemReader(tmp_path / name).read_metadata()
        change(metadata)
        file.write_bytes(pickle.dumps(metadata))
        return tmp_path / name

    def one_place(metadata: object) -> None:
        stored = list(metadata.storage_data.values())  # type: ignore[attr-defined]
        stored[1].relative_path, stored[1].offset = stored[0].relative_path, stored[0].offset

    with pytest.raises(UserError, match=r"a\.A_log and b share bytes of __0_0\.distcp"):
        opening.open_checkpoint(changed("bytes", one_place))

    def twice(metadata: object) -> None:
        """Two boxes over the same half: as many elements as the tensor has."""
        entry = metadata.state_dict_metadata["b"]  # type: ignore[attr-defined]
        half = entry.chunks[0].__class__(torch.Size([0]), torch.Size([2]))
        entry.chunks[:] = [half, half]

    checkpoint = opening.open_checkpoint(changed("elements", twice))
    with pytest.raises(UserError, match="two boxes of b overlap"):
        checkpoint.read("b")


def test_a_second_copy_of_the_weights_is_said(tmp_path: Path) -> None:
    source = huggingface("mamba2", tmp_path / "source")
    torch.save({}, source / "training_args.bin")
    assert find.find_gates(source).warnings == ()
    for name in ("consolidated.safetensors", "pytorch_model.bin"):
        shutil.copy(source / "model.safetensors", source / name)
    (warning,) = find.find_gates(source).warnings
    assert "2 more files of weights" in warning
    assert "consolidated.safetensors, pytorch_model.bin;" in warning
    assert "instead of model.safetensors" in warning
    sharded = families.save("mamba2", tmp_path / "sharded", max_shard_size="6KB")
    assert find.find_gates(sharded).warnings == ()
