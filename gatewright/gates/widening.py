"""Storing gates in fp32 inside an otherwise untouched safetensors file.

bf16 spaces numbers in [2, 4) by 1/64, so a decay rate stored in it is off by up to 0.8%.
Widening A_log changes the header and moves the data behind it; every other tensor keeps its
bytes.  Gates come first, so that what follows stays aligned.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from gatewright.checkpoints import dtypes
from gatewright.checkpoints.safetensors_files import header_bytes, read_header
from gatewright.checkpoints.storage import StoredTensor

BLOCK_BYTES = 4 << 20
_TYPES = {dtypes.RAW[name]: name for name in ("F32", "F64")}


def widened_type(tensor: StoredTensor) -> str:
    """Return the type in which a gate is kept: fp32, or its own where that is not narrower."""
    return tensor.dtype if dtypes.itemsize(tensor.dtype) >= 4 else "F32"


def widen_file(
    source: Path, target: Path, gates: Mapping[str, np.ndarray], *, hashed: bool = True
) -> str | None:
    """Write a copy of a safetensors file with some tensors replaced by fp32 (or fp64) ones.

    Args:
        gates: name -> new values (an array of the tensor's shape, in its new type).
        hashed: also hash what is written.

    Returns:
        Hex SHA-256 of the file written, if asked for.
    """
    header = read_header(source)
    rest = {name: entry for name, entry in header.tensors.items() if name not in gates}
    gates = dict(sorted(gates.items(), key=lambda item: -item[1].dtype.itemsize))
    entries = {name: (_TYPES[raw.dtype], raw.shape) for name, raw in gates.items()}
    entries |= {name: (dtype, shape) for name, (dtype, shape, _, _) in rest.items()}
    sha = hashlib.sha256()
    with open(source, "rb") as s, open(target, "wb") as t:

        def put(block: bytes | memoryview) -> None:
            if hashed:
                sha.update(block)
            t.write(block)

        put(header_bytes(entries, header.metadata))
        for raw in gates.values():
            put(np.ascontiguousarray(raw).tobytes())
        for _, _, begin, end in rest.values():
            s.seek(header.data_start + begin)
            left = end - begin
            while left:
                block = s.read(min(left, BLOCK_BYTES))
                if not block:
                    raise OSError(5, "file became shorter while it was read", str(source))
                put(block)
                left -= len(block)
    return sha.hexdigest() if hashed else None


def enlarge_total_size(index: Path, by: int) -> str:
    """Add to `metadata.total_size` of an index, leaving its other bytes; return the new SHA-256."""
    text = index.read_text(encoding="utf-8")
    metadata = json.loads(text).get("metadata")
    if isinstance(metadata, dict) and isinstance(metadata.get("total_size"), int):
        total = metadata["total_size"] + by
        text = re.sub(r'("total_size"\s*:\s*)[0-9]+', rf"\g<1>{total}", text, count=1)
        index.write_text(text, encoding="utf-8")
    return hashlib.sha256(text.encode()).hexdigest()
