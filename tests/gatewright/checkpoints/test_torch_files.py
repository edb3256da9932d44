"""Files that claim to be torch.save's: crafted ones end in one line, whatever they describe."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from gatewright.checkpoints import torch_files
from gatewright.errors import UserError

REBUILD = torch._utils._rebuild_tensor_v2


class Call:
    """Pickles as a call that a sound file would not make."""

    def __init__(self, target: Any, *args: Any) -> None:
        self.target, self.args = target, args

    def __reduce__(self) -> Any:
        return self.target, self.args


class Storage:
    """Pickles as a reference to the file's only storage, of 16 floats."""


class Pickler(pickle._Pickler):  # type: ignore[name-defined]
    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Storage):
            return "storage", torch.FloatStorage, "0", "cpu", 16
        return None


def write(file: Path, content: Any) -> bytes:
    data = io.BytesIO()
    Pickler(data, protocol=2).dump(content)
    with zipfile.ZipFile(file, "w") as z:
        z.writestr("a/data.pkl", data.getvalue())
        z.writestr("a/data/0", b"\0" * 64)
    return file.read_bytes()


CRAFTED = {
    "strides of another rank": Call(REBUILD, Storage(), 0, (4,), (1, 1), False, {}),
    "too few arguments": Call(REBUILD, Storage(), 0),
    "no arguments": Call(REBUILD),
    "a shape that is a number": Call(REBUILD, Storage(), 0, 4, 1),
    "an empty size": Call(REBUILD, Storage(), 0, Call(torch.Size), (1,)),
    "a size of nothing": Call(REBUILD, Storage(), 0, Call(torch.Size, None), (1,)),
    "a parameter of nothing": Call(torch._utils._rebuild_parameter),
    "a mapping of a number": Call(OrderedDict, 5),
    "a mapping of triples": Call(OrderedDict, [(1, 2, 3)]),
    "a mapping with a list as key": Call(OrderedDict, [([], 1)]),
    "an offset beyond": Call(REBUILD, Storage(), 2**70, (4,), (1,)),
}


@pytest.mark.parametrize("case", CRAFTED)
def test_crafted_tensors(case: str, tmp_path: Path) -> None:
    write(tmp_path / "x.bin", {"x.A_log": CRAFTED[case]})
    with pytest.raises(UserError, match=r"x\.bin: ") as caught:
        torch_files.read_state_dict(tmp_path, "x.bin")
    assert "\n" not in str(caught.value)


def test_a_sound_file_of_the_same_make_is_read(tmp_path: Path) -> None:
    write(tmp_path / "x.bin", {"x.A_log": Call(REBUILD, Storage(), 2, (4,), (1,), False, {})})
    assert torch_files.read_state_dict(tmp_path, "x.bin")["x.A_log"].shape == (4,)


@pytest.mark.parametrize("place", [2**63 - 1, 2**64 - 1, 1 << 40])
def test_zip64_records_beyond_the_file(place: int, tmp_path: Path) -> None:
    data = write(tmp_path / "x.bin", {"x": 1})
    end = data.rfind(b"PK\5\6")
    record = bytearray(data[end:])
    record[10:12] = b"\xff\xff"
    locator = b"PK\6\7" + struct.pack("<IQI", 0, place, 1)
    (tmp_path / "x.bin").write_bytes(data[:end] + locator + record)
    with pytest.raises(UserError, match="beyond the file's end"):
        torch_files.read_state_dict(tmp_path, "x.bin")


def test_members_that_overlap(tmp_path: Path) -> None:
    """A second name for a member's bytes: an edit of one would be an edit of the other."""
    data = bytearray(write(tmp_path / "x.bin", {"x": 1}))
    entries = [i for i in range(len(data)) if data[i : i + 4] == b"PK\1\2"]
    data[entries[0] + 20 : entries[0] + 28] = data[entries[1] + 20 : entries[1] + 28]
    data[entries[0] + 42 : entries[0] + 46] = data[entries[1] + 42 : entries[1] + 46]
    (tmp_path / "x.bin").write_bytes(data)
    with pytest.raises(UserError, match=r"members a/data.* overlap"):
        torch_files.read_state_dict(tmp_path, "x.bin")
