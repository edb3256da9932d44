"""The safetensors format: strict reading of headers, streaming writing of shards.

Layout of a file: u64 little-endian header length, the header (JSON, padded with spaces), the
data.  Each header entry is `name: {dtype, shape, data_offsets: [begin, end]}`, offsets counted
from the start of the data.  A header from somewhere else is untrusted: sizes, overlaps, holes
and ends are checked before anything is believed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from gatewright.checkpoints import dtypes
from gatewright.checkpoints.storage import Piece, StoredTensor
from gatewright.errors import UserError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclasses.dataclass(frozen=True)
class Header:
    """A validated header: where the data begins, what lies in it, free-form metadata."""

    data_start: int
    tensors: dict[str, tuple[str, tuple[int, ...], int, int]]
    """name -> (dtype, shape, begin, end), in file order."""
    metadata: dict[str, str]


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def read_header(path: Path) -> Header:
    """Return the validated header of a safetensors file.

    Raises:
        UserError: the file is cut short, or its header is not what the format allows.
    """

    def bad(why: str) -> UserError:
        return UserError(f"{path}: not a sound safetensors file ({why}); fetch or make it again")

    size = path.stat().st_size
    with open(path, "rb") as f:
        first = f.read(8)
        if len(first) < 8:
            raise bad("shorter than 8 bytes")
        (length,) = struct.unpack("<Q", first)
        if length > MAX_HEADER_BYTES or 8 + length > size:
            raise bad(f"a header of {length} bytes does not fit into a file of {size}")
        text = f.read(length)
    try:
        parsed = json.loads(text, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as e:
        raise bad(f"the header is not valid JSON: {e}") from e
    if not isinstance(parsed, dict):
        raise bad("the header is not a JSON object")
    metadata = parsed.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise bad("__metadata__ is not an object")
    entries: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    for name, entry in parsed.items():
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            whole = all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end))
        except (TypeError, KeyError, ValueError) as e:
            raise bad(f"entry {name!r} lacks dtype, shape or data_offsets") from e
        if not whole or not isinstance(dtype, str):
            raise bad(f"entry {name!r} has sizes that are not whole numbers")
        if dtype in dtypes.RAW and math.prod(shape) * dtypes.itemsize(dtype) != end - begin:
            raise bad(f"entry {name!r}: offsets {begin}..{end} do not fit {dtype} {shape}")
        entries[name] = (dtype, tuple(shape), begin, end)
    expected = 0
    ordered = sorted(entries.items(), key=lambda item: item[1][2:])
    for name, (_, _, begin, end) in ordered:
        if begin != expected:
            kind = "overlaps its neighbour" if begin < expected else "leaves a hole before it"
            raise bad(f"entry {name!r} {kind}")
        expected = max(end, begin)
    if 8 + length + expected != size:
        raise bad(f"the tensors need {8 + length + expected} bytes, the file has {size}")
    return Header(8 + length, dict(ordered), {str(k): str(v) for k, v in metadata.items()})


def shard_names(root: Path) -> list[str] | None:
    """Return the safetensors files of a Hugging Face folder, or None when it has none.

    Raises:
        UserError: a damaged index, or one that names a file outside the folder or a missing one.
    """
    index = root / INDEX
    if (root / SINGLE).is_file():
        return [SINGLE]
    if not index.is_file():
        return None
    return sorted(set(read_index(index).values()))


def read_index(index: Path) -> dict[str, str]:
    """Return the weight map (tensor name -> shard) of an index file.

    Raises:
        UserError: damaged, or it names a file outside the folder or a missing one.
    """
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        items = list(weight_map.items())
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{index}: not a valid index (no weight_map); fetch it again") from e
    for name, shard in items:
        if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", ".", ".."):
            raise UserError(f"{index}: {name!r} points at {shard!r}, not at a file beside it")
        if not (index.parent / shard).is_file():
            raise UserError(f"{index}: names {shard}, which is missing; fetch the missing shard")
    return dict(items)


def read_folder(root: Path, shards: Sequence[str]) -> dict[str, StoredTensor]:
    """Return every tensor of a Hugging Face folder's safetensors files.

    Raises:
        UserError: a damaged header, a tensor in two shards, or an index that disagrees with
            the shards.
    """
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        header = read_header(root / shard)
        for name, (dtype, shape, begin, _) in header.tensors.items():
            if name in tensors:
                raise UserError(f"{root}: {name} is in {tensors[name].pieces[0].file} and {shard}")
            piece = Piece(shard, header.data_start + begin, (0,) * len(shape), shape)
            tensors[name] = StoredTensor(name, dtype, shape, (piece,))
    if list(shards) != [SINGLE]:
        for name, shard in read_index(root / INDEX).items():
            if name not in tensors or tensors[name].pieces[0].file != shard:
                raise UserError(f"{root / INDEX}: says {name} is in {shard}, but it is not")
    return tensors


def header_bytes(
    entries: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return length prefix and header of a file that holds `entries` in their order.

    The data start at a multiple of 8 bytes, as the format's own writer does.
    """
    table: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    begin = 0
    for name, (dtype, shape) in entries.items():
        end = begin + math.prod(shape) * dtypes.itemsize(dtype)
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


@dataclasses.dataclass(frozen=True)
class Planned:
    """A tensor that is going to be written: its type, its shape, and how to get its values."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    produce: Callable[[], np.ndarray]
    """Answers the raw array (row-major); called once, when its turn to be written comes."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * dtypes.itemsize(self.dtype)


def split_shards(tensors: Iterable[Planned], max_shard_bytes: int) -> list[list[Planned]]:
    """Fill shards in order; a tensor larger than the limit gets a shard of its own."""
    shards: list[list[Planned]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.nbytes
    return shards


def write_folder(
    folder: Path,
    tensors: Sequence[Planned],
    max_shard_bytes: int,
    progress: Callable[[int], None] = lambda n: None,
) -> list[str]:
    """Write tensors as one safetensors file, or as shards with an index; return the names.

    One tensor is in memory at a time.

    Args:
        progress: told the bytes of each tensor as it is written.
    """
    # Widest types first, so that every tensor starts at a multiple of its element size.
    shards = [
        sorted(shard, key=lambda t: -dtypes.itemsize(t.dtype))
        for shard in split_shards(tensors, max_shard_bytes)
    ]
    names = (
        [SINGLE]
        if len(shards) == 1
        else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    )
    for name, shard in zip(names, shards, strict=True):
        with open(folder / name, "wb") as f:
            f.write(header_bytes({t.name: (t.dtype, t.shape) for t in shard}))
            for tensor in shard:
                _write(f, tensor)
                progress(tensor.nbytes)
            f.flush()
            os.fsync(f.fileno())
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(t.nbytes for t in tensors)},
            "weight_map": {
                t.name: name for name, shard in zip(names, shards, strict=True) for t in shard
            },
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return names


def _write(f: IO[bytes], tensor: Planned) -> None:
    raw = np.ascontiguousarray(tensor.produce())
    assert raw.shape == tuple(tensor.shape), tensor.name
    assert raw.dtype == dtypes.RAW[tensor.dtype], tensor.name
    f.write(raw.reshape(-1).view(np.uint8).data)
