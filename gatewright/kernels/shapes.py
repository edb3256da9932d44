"""Shapes checked before C++ reads memory by them."""

from __future__ import annotations

from torch import Tensor


def require(function: str, **expected: tuple[Tensor | None, tuple[int, ...]]) -> None:
    """Raise ValueError naming the first argument that is not of its shape; None passes.

    Example:
        require("state_step", dt=(dt, (b, h)), z=(z, (b, h, p)))
    """
    for name, (given, shape) in expected.items():
        if given is not None and given.shape != shape:
            raise ValueError(f"{function}: {name} {tuple(given.shape)} is not {shape}")
