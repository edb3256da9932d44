"""Reading Megatron's torch_dist checkpoints (torch.distributed.checkpoint), tensor by tensor.

A folder holds `.metadata`, a pickle that says which box of which tensor lies where, and
`__R_N.distcp` files, in which every box is a small torch.save archive.  Any tensor, pipeline
or data parallel layout is just a different set of boxes.  `.metadata` is read as data and
never run (torch's own reader unpickles it, which would run whatever a stranger put there).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gatewright.checkpoints import dtypes, pickles
from gatewright.checkpoints.storage import Piece, StoredTensor
from gatewright.checkpoints.torch_files import SavedTensor, read_saved
from gatewright.errors import UserError

METADATA = ".metadata"
MAX_METADATA_BYTES = 1 << 30
_ALLOWED = {
    "torch.Size",
    "torch.strided",
    "torch.serialization._get_layout",
    "collections.OrderedDict",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
    *(f"torch.{name}" for name in dtypes.TORCH_NAMES),
}
# Megatron also records its save plans there, made of these two packages' data classes.
_ALLOWED_PREFIXES = ("torch.distributed.checkpoint.", "megatron.core.dist_checkpointing.")


@dataclasses.dataclass(frozen=True)
class _Blob:
    file: str
    offset: int
    length: int


@dataclasses.dataclass(frozen=True)
class Box:
    """A box of a tensor as `.metadata` describes it, and the archive that holds it."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    blob: _Blob

    def overlaps(self, other: Box) -> bool:
        """Tell whether two boxes of one tensor have an element in common."""
        axes = zip(self.offsets, self.shape, other.offsets, other.shape, strict=True)
        return all(max(a, b) < min(a + n, b + m) for a, n, b, m in axes)


@dataclasses.dataclass(frozen=True)
class Described:
    """A tensor as `.metadata` describes it: nothing of its data has been looked at."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


def _size(value: Any) -> tuple[int, ...]:
    if isinstance(value, pickles.Record) and value.name == "torch.Size":
        (value,) = value.args
    if not isinstance(value, (tuple, list)) or not all(
        isinstance(n, int) and n >= 0 for n in value
    ):
        raise ValueError("a size is not a row of whole numbers")
    return tuple(value)


def read_metadata(root: Path) -> dict[str, Described]:
    """Return what `.metadata` says about every tensor.

    Raises:
        UserError: missing, damaged, or with content that a checkpoint has no use for.
    """
    path = root / METADATA
    try:
        if path.stat().st_size > MAX_METADATA_BYTES:
            raise UserError(f"{path}: {path.stat().st_size} bytes are more than a checkpoint needs")
        data = path.read_bytes()
    except OSError as e:
        raise UserError(f"{path}: cannot be read ({e.strerror})") from e
    top = pickles.read(data, str(path), allowed=_ALLOWED, allowed_prefixes=_ALLOWED_PREFIXES)
    try:
        blobs = _blobs(top["storage_data"])
        return {
            str(name): _described(str(name), entry, blobs)
            for name, entry in top["state_dict_metadata"].items()
            if entry.name.endswith(".TensorStorageMetadata")
        }
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as e:
        raise UserError(f"{path}: is damaged ({type(e).__name__}: {e}); copy it again") from e


def _blobs(storage_data: Mapping[Any, Any]) -> dict[tuple[str, tuple[int, ...]], _Blob]:
    blobs = {}
    for index, info in storage_data.items():
        file = info["relative_path"]
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
            raise ValueError(f"data file {file!r} does not lie beside .metadata")
        offset, length = int(info["offset"]), int(info["length"])
        if offset < 0 or length < 0:
            raise ValueError(f"{file}: negative offset")
        if info.state.get("transform_descriptors"):
            raise ValueError(f"{file}: is compressed")
        place = index.state.get("offset")
        where = () if place is None else _size(place)
        blobs[str(index["fqn"]), where] = _Blob(file, offset, length)
    spans = sorted((b.file, b.offset, b.offset + b.length, name) for (name, _), b in blobs.items())
    for (file, _, end, one), (next_file, begin, _, other) in itertools.pairwise(spans):
        if file == next_file and begin < end:
            raise ValueError(f"{one} and {other} share bytes of {file}")
    return blobs


def _described(
    name: str, entry: pickles.Record, blobs: Mapping[tuple[str, tuple[int, ...]], _Blob]
) -> Described:
    kind = entry["properties"].state[0]
    dtype = dtypes.TORCH_NAMES[kind.name.removeprefix("torch.")]
    boxes = []
    for chunk in entry["chunks"]:
        offsets, shape = _size(chunk["offsets"]), _size(chunk["sizes"])
        blob = blobs.get((name, offsets))
        if blob is None:
            raise ValueError(f"{name}: no data for the box at {offsets}")
        boxes.append(Box(offsets, shape, blob))
    shape = _size(entry["size"])
    for box in boxes:
        if len(box.shape) != len(shape) or any(
            o + n > full for o, n, full in zip(box.offsets, box.shape, shape, strict=True)
        ):
            raise ValueError(f"{name}: a box reaches beyond the tensor")
    if sum(math.prod(b.shape) for b in boxes) != math.prod(shape):
        raise ValueError(f"{name}: the boxes do not cover the tensor")
    return Described(dtype, shape, tuple(boxes))


class Tensors(Mapping[str, StoredTensor]):
    """The tensors of a torch_dist folder; a tensor's archives are opened when it is asked for.

    Raises (on access):
        UserError: a data file is missing or damaged, or disagrees with `.metadata`.
    """

    def __init__(self, root: Path, prefix: str = "") -> None:
        self.root = root
        self.prefix = prefix  # path from the opened folder to `root`, put before every file
        self.described = read_metadata(root)
        self._opened: dict[str, StoredTensor] = {}

    def __getitem__(self, name: str) -> StoredTensor:
        if name not in self._opened:
            described = self.described[name]
            for one, other in itertools.combinations(described.boxes, 2):
                if one.overlaps(other):
                    raise UserError(
                        f"{self.root / METADATA}: two boxes of {name} overlap, at {one.offsets} "
                        f"and {other.offsets}; copy it again"
                    )
            pieces = tuple(self._piece(name, described, box) for box in described.boxes)
            self._opened[name] = StoredTensor(name, described.dtype, described.shape, pieces)
        return self._opened[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.described)

    def __len__(self) -> int:
        return len(self.described)

    def _piece(self, name: str, described: Described, box: Box) -> Piece:
        path = self.root / box.blob.file
        if not path.is_file():
            raise UserError(f"{path}: is missing although .metadata lists it; copy it again")
        if box.blob.offset + box.blob.length > path.stat().st_size:
            raise UserError(f"{path}: is shorter than .metadata says; copy it again")
        saved = read_saved(path, box.blob.offset, box.blob.length)
        if (
            not isinstance(saved, SavedTensor)
            or saved.shape != box.shape
            or saved.dtype != described.dtype
        ):
            raise UserError(f"{path}: holds something else than {name} where .metadata says so")
        return Piece(self.prefix + box.blob.file, saved.start, box.offsets, box.shape, saved.entry)
