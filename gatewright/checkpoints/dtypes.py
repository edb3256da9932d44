"""Number formats of stored tensors, without torch: sizes, exact decoding, exact rounding.

Names are those of the safetensors format (`F32`, `BF16`, ...).  numpy has no bfloat16, so a
raw bfloat16 tensor is an array of uint16 here; `decode` and `encode` go through float64,
which holds every value of every format exactly.
"""

from __future__ import annotations

from typing import Any

import numpy as np

RAW: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("u1"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E5M2": np.dtype("u1"),
    "F8_E8M0": np.dtype("u1"),
    "C64": np.dtype("<c8"),
}
"""numpy type of the raw elements of each stored type."""

TORCH_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""torch dtype name (without `torch.`) -> stored type."""

STORAGE_NAMES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}
"""torch storage class -> stored type."""

FLOATS = ("F64", "F32", "F16", "BF16")
"""The types in which gates may be stored."""

# significand bits (with the hidden one) and the smallest normal exponent of each format
_PRECISION = {"F64": (53, -1022), "F32": (24, -126), "F16": (11, -14), "BF16": (8, -126)}


def itemsize(dtype: str) -> int:
    """Return the bytes of one element of a stored type."""
    return RAW[dtype].itemsize


def decode(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Return the values of a raw float tensor as float64, exactly."""
    if dtype == "BF16":
        return (raw.astype("<u4") << 16).view("<f4").astype(np.float64)
    assert dtype in FLOATS, dtype
    return raw.astype(np.float64)


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """Round float64 values to the nearest stored value (ties to even) and return the raw array.

    bfloat16 is rounded once, from float64: going through float32 would round twice.
    """
    values = np.asarray(values, dtype=np.float64)
    if dtype != "BF16":
        assert dtype in FLOATS, dtype
        return values.astype(RAW[dtype])
    finite = np.isfinite(values)
    quantum = ulp(np.where(finite, values, 0.0), "BF16")
    rounded = np.where(finite, np.rint(values / quantum) * quantum, values)
    with np.errstate(over="ignore"):
        single = rounded.astype("<f4")
    return (single.view("<u4") >> 16).astype("<u2")


def ulp(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return the spacing of a stored type's values at the magnitude of `values`."""
    digits, smallest = _PRECISION[dtype]
    _, exponent = np.frexp(np.abs(np.asarray(values, dtype=np.float64)))
    exponent = np.where(np.asarray(values) == 0, smallest, exponent - 1)
    return np.ldexp(1.0, np.maximum(exponent, smallest) - (digits - 1))
