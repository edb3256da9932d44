"""Where a checkpoint's tensors lie on disk, whatever its format.

Every format's reader answers the same question: which bytes of which file hold a tensor.
Reading, converting and patching then need no knowledge of the format.  A tensor is one
piece in a safetensors file or a `.bin`, and several pieces in a sharded Megatron checkpoint.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gatewright.checkpoints import dtypes
from gatewright.checkpoints.archives import Entry


@dataclasses.dataclass(frozen=True)
class Piece:
    """A box of a tensor whose elements lie row-major and contiguous in one file."""

    file: str
    """Path relative to the checkpoint's root."""
    start: int
    """Offset of the first byte in that file."""
    offsets: tuple[int, ...]
    """Where the box begins in the full tensor, per axis."""
    shape: tuple[int, ...]
    """Extent of the box, per axis."""
    entry: Entry | None = None
    """The zip member around it, whose checksum an edit must renew; None outside zip files."""

    def index(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.shape, strict=True))


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A named tensor: type, shape and the pieces that hold it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * dtypes.itemsize(self.dtype)


@dataclasses.dataclass
class Checkpoint:
    """An opened checkpoint: its files, its tensors, its configuration.

    Nothing of the tensors is read until `read` asks for one.
    """

    root: Path
    format: str
    """`huggingface`, `pytorch`, `megatron` or `deepspeed`."""
    tensors: Mapping[str, StoredTensor]
    files: tuple[str, ...]
    """Every file that belongs to the checkpoint, relative to the root."""
    config: Mapping[str, Any]
    """The parsed config.json, empty when there is none."""

    def read(self, tensor: StoredTensor | str) -> np.ndarray:
        """Return a tensor's raw array (bfloat16 as uint16), assembled from its pieces.

        Raises:
            KeyError: no tensor of that name.
            ValueError: the pieces do not cover the tensor.
        """
        if isinstance(tensor, str):
            tensor = self.tensors[tensor]
        if not tensor.shape:
            return self._block(tensor, tensor.pieces[0], 0, 1).reshape(())
        return self.read_rows(tensor, 0, tensor.shape[0])

    def read_rows(self, tensor: StoredTensor | str, begin: int, end: int) -> np.ndarray:
        """Return rows `begin` to `end` (axis 0) of a tensor; only their bytes are read.

        Raises:
            KeyError: no tensor of that name.
            ValueError: the pieces do not cover the rows, or a file is cut short.
        """
        if isinstance(tensor, str):
            tensor = self.tensors[tensor]
        out = np.empty((end - begin, *tensor.shape[1:]), dtypes.RAW[tensor.dtype])
        filled = 0
        for piece in tensor.pieces:
            first = max(begin, piece.offsets[0])
            last = min(end, piece.offsets[0] + piece.shape[0])
            if first >= last:
                continue
            block = self._block(tensor, piece, first - piece.offsets[0], last - piece.offsets[0])
            out[(slice(first - begin, last - begin), *piece.index()[1:])] = block
            filled += block.size
        if filled != out.size:
            raise ValueError(f"{self.root}: the pieces of {tensor.name} do not cover it")
        return out

    def _block(self, tensor: StoredTensor, piece: Piece, first: int, last: int) -> np.ndarray:
        """Read rows `first` to `last` of a piece."""
        block = np.empty((last - first, *piece.shape[1:]), dtypes.RAW[tensor.dtype])
        row_bytes = math.prod(piece.shape[1:]) * block.itemsize
        with open(self.root / piece.file, "rb", buffering=0) as f:
            f.seek(piece.start + first * row_bytes)
            target = block.reshape(-1).view(np.uint8).data
            done = 0
            while done < block.nbytes:
                n = f.readinto(target[done:])
                if not n:
                    raise ValueError(f"{self.root / piece.file}: {tensor.name} is cut short")
                done += n
        return block

    def shape_and_dtype(self, name: str) -> tuple[tuple[int, ...], str] | None:
        """Return a tensor's shape and type without opening its data; None if there is none."""
        described = getattr(self.tensors, "described", self.tensors)
        tensor = described.get(name)
        return None if tensor is None else (tensor.shape, tensor.dtype)

    def read_float(self, tensor: StoredTensor | str) -> np.ndarray:
        """Return a float tensor's values as float64."""
        if isinstance(tensor, str):
            tensor = self.tensors[tensor]
        return dtypes.decode(self.read(tensor), tensor.dtype)
