"""Batches: the same sequences whatever the position or layout; documents kept apart."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gatewright.errors import UserError
from gatewright.megatron import build, data, distributed
from gatewright.megatron.config import ParallelConfig
from tests.gatewright.megatron import tiny


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    with distributed.processes(ParallelConfig()):
        yield


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> data.Corpus:
    return data.Corpus.of_folder(
        tiny.write_corpus(tmp_path_factory.mktemp("data") / "corpus"), tiny.EOD
    )


def batches(corpus: data.Corpus, tmp: Path, consumed: int = 0, **train: Any) -> data.Batches:
    config = tiny.config("llama", train=train).train
    dataset = data.build_dataset(corpus, config, tmp)
    return data.Batches(
        dataset, config, data_parallel=1, consumed_samples=consumed, eod_id=corpus.eod_id
    )


def test_resuming_by_consumed_samples_gives_the_same_batches(
    corpus: data.Corpus, tmp_path: Path
) -> None:
    whole = batches(corpus, tmp_path, micro_batch_sequences=2)
    first = [next(whole).tokens_BS for _ in range(6)]
    resumed = batches(corpus, tmp_path, consumed=6, micro_batch_sequences=2)
    for expected in first[3:]:
        assert torch.equal(next(resumed).tokens_BS, expected)
    other_size = batches(corpus, tmp_path, micro_batch_sequences=4)
    assert torch.equal(next(other_size).tokens_BS, torch.cat(first[:2]))


def test_labels_are_the_next_tokens(corpus: data.Corpus, tmp_path: Path) -> None:
    batch = next(batches(corpus, tmp_path, micro_batch_sequences=4))
    assert batch.tokens_BS.shape == (4, 32)
    assert torch.equal(batch.tokens_BS[:, 1:], batch.labels_BS[:, :-1])


def test_a_bad_sample_is_traced_to_its_documents(corpus: data.Corpus, tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    config = tiny.config("llama").train
    dataset = data.build_dataset(corpus, config, tmp_path)
    [found] = data.documents_of(dataset, range(3, 4))
    assert found["sample"] == 3
    assert found["file"] == corpus.prefixes[0]
    files = IndexedDataset(corpus.prefixes[0])  # its tokens are views of a mapped file
    text = np.concatenate([files.get(number) for number in found["documents"]])
    sample, _ = dataset._query_document_sample_shuffle_indices(3)
    windows = np.lib.stride_tricks.sliding_window_view(text, len(sample))
    assert (windows == sample).all(1).any()


def test_a_blend_draws_from_each_file_by_weight(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        tiny.write_corpus(tmp_path / name, seed=seed)
        for end in (".bin", ".idx"):
            os.rename(tmp_path / name / f"text{end}", tmp_path / f"{name}{end}")
    blend = data.Corpus.of_folder(tmp_path, tiny.EOD, {"b": 0.25, "a": 0.75})
    config = tiny.config("llama", train={"steps": 25}).train
    dataset = data.build_dataset(blend, config, tmp_path / "cache")
    files = [row["file"] for row in data.documents_of(dataset, range(100))]
    assert files.count(str(tmp_path / "a")) == 75
    assert files.count(str(tmp_path / "b")) == 25
    with pytest.raises(UserError, match="differ in c; run pretrain.prepare"):
        data.Corpus.of_folder(tmp_path, tiny.EOD, {"a": 0.5, "b": 0.25, "c": 0.25})


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no \.idx file"):
        data.Corpus.of_folder(tmp_path, 0)
    (tmp_path / "text.idx").write_bytes(b"")
    with pytest.raises(UserError, match=r"text\.bin: is missing"):
        data.Corpus.of_folder(tmp_path, 0)


@pytest.mark.parametrize("family", ["mamba2", "llama"])
def test_packed_documents_equal_separate_ones(
    family: str, corpus: data.Corpus, tmp_path: Path
) -> None:
    """With reset_at_documents, each document's losses are those it has on its own."""
    torch.manual_seed(0)
    model = build.build_model(tiny.MODELS[family], init_std=0.2)
    packed = next(batches(corpus, tmp_path, micro_batch_sequences=8, reset_at_documents=True))
    together = losses(model, packed)
    ends = packed.packed.cu_seqlens_q.tolist()
    assert len(ends) > 10  # at least one boundary inside a row
    for start, end in itertools.pairwise(ends):
        alone = data.Batch(
            tokens_BS=packed.tokens_BS[:, start:end],
            labels_BS=packed.labels_BS[:, start:end],
            position_ids_BS=torch.arange(end - start)[None],
        )
        torch.testing.assert_close(together[:, start:end], losses(model, alone), rtol=0, atol=1e-5)
    leaky = dataclasses.replace(packed, packed=None)
    assert (losses(model, leaky) - together).abs().max() > 1e-3  # the check can fail


def test_packed_documents_are_not_split_over_context_parallel_processes() -> None:
    with pytest.raises(UserError, match=r"reset-at-documents: .* --parallel\.context 2"):
        tiny.config("llama", train={"reset_at_documents": True}, parallel={"context": 2})


@torch.no_grad()
def losses(model: torch.nn.Module, batch: data.Batch) -> torch.Tensor:
    """Return each token's loss, of the logits, and check that training sees their sum."""
    inputs = (batch.tokens_BS, batch.position_ids_BS, None)
    logits = model(*inputs, packed_seq_params=batch.packed)
    each = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), batch.labels_BS, reduction="none"
    )
    total = model(*inputs, labels=batch.labels_BS, packed_seq_params=batch.packed)
    torch.testing.assert_close(total, each.sum(), rtol=1e-5, atol=1e-4)
    return each
