"""Storing edited gates in fp32 inside an otherwise untouched safetensors file.

bf16 spaces numbers in [2, 4) by 1/64, so a decay rate stored in it is off by up to 0.8%.
Widening A_log changes the header and moves the data behind it; every other tensor keeps its
bytes.  Gates come first, so that what follows stays aligned.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from gatewright.checkpoints.safetensors_files import header_bytes, read_header

BLOCK_BYTES = 4 << 20


def widen_file(
    source: Path, target: Path, gates: Mapping[str, np.ndarray], *, hashed: bool = True
) -> str | None:
    """Write a copy of a safetensors file with some tensors replaced by fp32 ones.

    Args:
        gates: name -> new values (float32 array of the tensor's shape).
        hashed: also hash what is written.

    Returns:
        Hex SHA-256 of the file written, if asked for.
    """
    header = read_header(source)
    rest = {name: entry for name, entry in header.tensors.items() if name not in gates}
    entries = {name: ("F32", raw.shape) for name, raw in gates.items()}
    entries |= {name: (dtype, shape) for name, (dtype, shape, _, _) in rest.items()}
    sha = hashlib.sha256()
    with open(source, "rb") as s, open(target, "wb") as t:

        def put(block: bytes | memoryview) -> None:
            if hashed:
                sha.update(block)
            t.write(block)

        put(header_bytes(entries, header.metadata))
        for raw in gates.values():
            put(np.ascontiguousarray(raw, "<f4").tobytes())
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
