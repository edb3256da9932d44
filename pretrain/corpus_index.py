"""Megatron's indexed token files, written as a stream of arrays.

`.bin` holds the tokens of all documents in a row.  `.idx`, little endian:

    "MMIDIDX\\0\\0" | u64 version 1 | u8 dtype code | u64 sequences S | u64 documents D + 1
    | int32 length of each sequence (S) | int64 byte offset of each sequence (S)
    | int64 first sequence of each document, then S (D + 1)

Here every document is one sequence.  Neither file is ever held in memory: lengths are read
back in blocks, and offsets and document numbers are computed block by block.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPE_CODES = {np.dtype(np.uint16): 8, np.dtype(np.int32): 4}
BLOCK = 1 << 20
"""Documents per block."""


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the type that Megatron gives tokens: u16 below 65500, else i32."""
    return np.dtype(np.uint16) if vocab_size < 65_500 else np.dtype(np.int32)


def _blocks(lengths: Path) -> Iterator[np.ndarray]:
    with open(lengths, "rb") as f:
        while data := f.read(4 * BLOCK):
            yield np.frombuffer(data, dtype="<i4")


def write_index(lengths: Path, out: Path, dtype: np.dtype) -> tuple[int, int]:
    """Write the `.idx` that goes with a file of int32 document lengths.

    Returns:
        The number of documents and of tokens.
    """
    documents = lengths.stat().st_size // 4
    tokens = 0
    with open(out, "wb") as f:
        f.write(MAGIC + struct.pack("<QBQQ", VERSION, DTYPE_CODES[dtype], documents, documents + 1))
        for block in _blocks(lengths):
            f.write(block.tobytes())
        for block in _blocks(lengths):
            ends = np.cumsum(block, dtype=np.int64) + tokens
            f.write(((ends - block) * dtype.itemsize).astype("<i8").tobytes())
            tokens = int(ends[-1])
        for first in range(0, documents + 1, BLOCK):
            f.write(np.arange(first, min(first + BLOCK, documents + 1), dtype="<i8").tobytes())
        f.flush()
        os.fsync(f.fileno())
    return documents, tokens


def append_file(source: Path, target: Path, at: int) -> int:
    """Write a file's bytes into `target` from offset `at` on; return the new end.

    The kernel copies (and shares the blocks on file systems that can); whatever stood beyond
    `at` is cut off first.
    """
    left = source.stat().st_size
    end = at + left
    with open(source, "rb") as src, open(target, "r+b" if target.exists() else "w+b") as dst:
        dst.truncate(at)
        dst.seek(at)
        try:
            while left and (moved := os.copy_file_range(src.fileno(), dst.fileno(), left)):
                left -= moved
        except OSError:  # not supported between these files
            src.seek(-left, os.SEEK_END)
            dst.seek(end - left)
            shutil.copyfileobj(src, dst, 1 << 22)
        dst.flush()
        os.fsync(dst.fileno())
    return end
