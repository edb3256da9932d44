"""Exact decoding and single rounding of stored numbers, against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gatewright.checkpoints import dtypes

TORCH = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def torch_raw(values: torch.Tensor) -> np.ndarray:
    if values.dtype is torch.bfloat16:
        return values.view(torch.int16).numpy().view(np.uint16)
    return values.numpy()


@pytest.mark.parametrize("kind", TORCH)
def test_every_pattern_of_16_bits_survives(kind: str) -> None:
    if dtypes.itemsize(kind) == 2:
        raw = np.arange(65536, dtype=np.uint16).view(dtypes.RAW[kind])
    else:
        raw = np.random.default_rng(0).integers(0, 2**32, 65536, dtype=np.uint32).view("<f4")
    values = dtypes.decode(raw, kind)
    keep = np.isfinite(values)
    back = dtypes.encode(values[keep], kind)
    np.testing.assert_array_equal(back.view(np.uint8), raw[keep].view(np.uint8))


@pytest.mark.parametrize("kind", TORCH)
def test_rounding_is_torchs(kind: str) -> None:
    """From fp32 values torch rounds once too, ties to even: subnormals and ties included."""
    rng = np.random.default_rng(1)
    values = np.concatenate(
        [
            rng.normal(size=5000).astype(np.float32),
            (rng.normal(size=500) * 1e-39).astype(np.float32),
            np.float32([1 + 2**-8, 1 + 3 * 2**-8, 2.5, -0.0, 0.0, 1e-45]),
        ]
    )
    expected = torch_raw(torch.from_numpy(values).to(TORCH[kind]))
    found = dtypes.encode(values.astype(np.float64), kind)
    np.testing.assert_array_equal(found.view(np.uint8), expected.view(np.uint8))


def test_bf16_is_rounded_once() -> None:
    """Just above a tie: through fp32 it would become the tie and round down to even."""
    value = 1 + 2.0**-8 + 2.0**-40
    assert dtypes.decode(dtypes.encode(np.array([value]), "BF16"), "BF16")[0] == 1 + 2.0**-7


@given(st.floats(-1e4, 1e4), st.sampled_from(sorted(TORCH)))
def test_rounding_is_within_half_a_spacing(value: float, kind: str) -> None:
    stored = dtypes.decode(dtypes.encode(np.array([value]), kind), kind)[0]
    assert abs(stored - value) <= dtypes.ulp(np.array([value]), kind)[0] / 2
