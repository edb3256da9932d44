"""Megatron's own writer and reader of indexed token files, for comparison with ours."""

from __future__ import annotations

from typing import Any


def builder(prefix: str, vocab_size: int) -> Any:
    """Return Megatron's IndexedDatasetBuilder for `prefix`.bin, in the dtype it would choose."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    return IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(vocab_size))


def reader(prefix: str) -> Any:
    """Return Megatron's IndexedDataset of `prefix`.bin and `prefix`.idx."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    return IndexedDataset(prefix)
