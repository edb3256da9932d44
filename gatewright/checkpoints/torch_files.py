"""Files that torch.save wrote (`pytorch_model.bin`, `fp32.pt`): where their tensors lie.

The pickle inside is read as data (`gatewright.checkpoints.pickles`), never run, and only the
names that `torch.load(weights_only=True)` would accept for weights may occur in it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gatewright.checkpoints import dtypes, pickles
from gatewright.checkpoints.archives import Entry, read_entries
from gatewright.checkpoints.storage import Piece, StoredTensor
from gatewright.errors import UserError

_ALLOWED = {
    "collections.OrderedDict",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_parameter",
    "torch.Size",
    "torch.storage.UntypedStorage",
    "torch.serialization._get_layout",
    *(f"torch.{name}" for name in dtypes.TORCH_NAMES),
    *(f"torch.{name}" for name in dtypes.STORAGE_NAMES),
}
MAX_PICKLE_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class _Storage:
    dtype: str
    key: str
    numel: int


@dataclasses.dataclass(frozen=True)
class SavedTensor:
    """A tensor found in a torch.save file: its type, shape, and bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    entry: Entry

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * dtypes.itemsize(self.dtype)

    def stored(self, name: str, file: str) -> StoredTensor:
        piece = Piece(file, self.start, (0,) * len(self.shape), self.shape, self.entry)
        return StoredTensor(name, self.dtype, self.shape, (piece,))


def _persistent(pid: Any) -> _Storage:
    kind, storage, key, _location, numel = pid
    if kind != "storage" or not isinstance(storage, pickles.Global):
        raise ValueError("a persistent id is not a storage")
    name = storage.name.removeprefix("torch.")
    if name not in dtypes.STORAGE_NAMES:
        raise ValueError(f"storage type {name} is not known")
    return _Storage(dtypes.STORAGE_NAMES[name], str(key), int(numel))


def read_saved(
    path: Path,
    start: int = 0,
    length: int | None = None,
    *,
    allowed_prefixes: tuple[str, ...] = (),
) -> Any:
    """Return what torch.save wrote, with each tensor as a `SavedTensor` and nothing run.

    Args:
        start, length: where the archive lies in the file; the whole file by default.
        allowed_prefixes: beginnings of further names that may occur (they stay inert records).

    Raises:
        UserError: not a torch.save file, damaged, or with content other than plain weights.
    """
    entries = read_entries(path, start, length)
    if "data.pkl" not in entries:
        raise UserError(f"{path}: holds no data.pkl, so torch.save did not write it")
    pickle_entry = entries["data.pkl"]
    if pickle_entry.size > MAX_PICKLE_BYTES:
        raise UserError(f"{path}: its pickle has {pickle_entry.size} bytes; weights need less")
    with open(path, "rb") as f:
        f.seek(pickle_entry.start)
        data = f.read(pickle_entry.size)
        if "byteorder" in entries:
            f.seek(entries["byteorder"].start)
            if f.read(6) != b"little":
                raise UserError(f"{path}: was saved on a big-endian machine; save it again")
    found = pickles.read(
        data,
        str(path),
        allowed=_ALLOWED,
        allowed_prefixes=allowed_prefixes,
        persistent=_persistent,
    )
    try:
        return _resolve(found, path, entries)
    except RecursionError as e:
        raise UserError(f"{path}: its pickle is nested too deeply for weights") from e
    except (TypeError, ValueError, IndexError) as e:  # too few arguments, or of other types
        raise UserError(
            f"{path}: a tensor or mapping in it is not described as torch.save does "
            f"({type(e).__name__}: {e}); fetch it again"
        ) from e


def _resolve(value: Any, path: Path, entries: dict[str, Entry]) -> Any:
    """Turn the pickle's records into dicts and `SavedTensor`s."""
    if isinstance(value, dict):
        return {k: _resolve(v, path, entries) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_resolve(v, path, entries) for v in value)
    if not isinstance(value, pickles.Record):
        return value
    if value.name == "collections.OrderedDict":
        pairs = dict(value.args[0]) if value.args else {}
        return {k: _resolve(v, path, entries) for k, v in (pairs | value.items).items()}
    if value.name == "torch._utils._rebuild_parameter":
        return _resolve(value.args[0], path, entries)
    if value.name == "torch._utils._rebuild_tensor_v2":
        return _tensor(value.args, path, entries)
    return value


def _tensor(args: tuple[Any, ...], path: Path, entries: dict[str, Entry]) -> SavedTensor:
    storage, offset, shape, stride = args[:4]
    if isinstance(shape, pickles.Record):
        (shape,) = shape.args
    if not isinstance(storage, _Storage) or not all(
        isinstance(n, int) and n >= 0 for n in (offset, *shape, *stride)
    ):
        raise UserError(f"{path}: a tensor in it has no sound storage, shape or stride")
    expected, contiguous = 1, True
    for n, s in zip(reversed(shape), reversed(stride), strict=True):
        contiguous &= n <= 1 or s == expected
        expected *= n
    if not contiguous:
        raise UserError(f"{path}: a tensor in it is not contiguous; save it again")
    entry = entries.get(f"data/{storage.key}")
    size = dtypes.itemsize(storage.dtype)
    if entry is None or (offset + math.prod(shape)) * size > entry.size:
        raise UserError(f"{path}: a tensor in it reaches beyond its storage; fetch it again")
    return SavedTensor(storage.dtype, tuple(shape), entry.start + offset * size, entry)


def walk(value: Any, prefix: str = "") -> Iterator[tuple[str, SavedTensor]]:
    """Yield every tensor of nested dicts under its dotted name."""
    if isinstance(value, SavedTensor):
        yield prefix, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from walk(item, f"{prefix}.{key}" if prefix else str(key))


def read_state_dict(root: Path, file: str) -> dict[str, StoredTensor]:
    """Return the tensors of a `pytorch_model.bin`-like file, by name.

    Raises:
        UserError: see `read_saved`; or the file holds something other than a state dict.
    """
    saved = read_saved(root / file)
    if not isinstance(saved, dict):
        raise UserError(f"{root / file}: holds no state dict")
    return {name: tensor.stored(name, file) for name, tensor in walk(saved)}
