"""Batches of token sequences from Megatron's own datasets, at any position of the run.

The order of samples depends on the corpus, the seed, the sequence length and the length of
the run only.  A run is therefore resumed by the number of samples it has consumed, on any
number of processes: global batch n holds the same sequences whatever the layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gatewright.errors import UserError
from gatewright.megatron import cpu, distributed
from gatewright.megatron.config import TrainConfig


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Indexed token files and what the trainer must know of their tokens."""

    prefixes: tuple[str, ...]
    """Paths without .bin/.idx."""
    eod_id: int
    """The end-of-document token."""
    weights: tuple[float, ...] | None = None
    """Sampling weights of several prefixes; None samples by length."""

    @classmethod
    def of_folder(
        cls, folder: Path, eod_id: int, shares: Mapping[str, float] | None = None
    ) -> Corpus:
        """Take every .bin/.idx pair of a corpus folder.

        Args:
            shares: share of each pair (by name) in the tokens that training sees, as
                pretrain.prepare states it (`blend`); None samples several pairs by length.

        Raises:
            UserError: there is none, half a pair, or one without a share.
        """
        prefixes = tuple(str(p.with_suffix("")) for p in sorted(Path(folder).glob("*.idx")))
        if not prefixes:
            raise UserError(f"--data {folder}: holds no .idx file; run pretrain.prepare")
        for prefix in prefixes:
            if not Path(prefix + ".bin").is_file():
                raise UserError(f"{prefix}.bin: is missing; run pretrain.prepare again")
        names = [Path(prefix).name for prefix in prefixes]
        if shares is None or len(prefixes) == 1:
            return cls(prefixes, eod_id)
        if unknown := sorted(set(names) ^ set(shares)):
            raise UserError(
                f"--data {folder}: its files and the blend in its manifest differ in "
                f"{unknown[0]}; run pretrain.prepare again"
            )
        return cls(prefixes, eod_id, tuple(shares[name] for name in names))


def write_documents(folder: Path, documents: Iterable[np.ndarray]) -> None:
    """Write a small corpus (tests, benchmarks) as text.bin and text.idx.

    Args:
        documents: one-dimensional arrays of uint16 token numbers, end-of-document included.
    """
    cpu.enable()
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    folder.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(str(folder / "text.bin"), dtype=np.uint16)
    for tokens in documents:
        builder.add_document(torch.from_numpy(tokens.astype(np.int64)), [len(tokens)])
    builder.finalize(str(folder / "text.idx"))


class _EndOfDocument:
    """All that Megatron's dataset asks of a tokenizer once the text is tokenised."""

    vocab_size = None
    pad = -1  # no token of the corpus means padding

    def __init__(self, eod: int) -> None:
        self.eod = eod
        self.unique_identifiers = {"eod": eod}


def build_dataset(corpus: Corpus, train: TrainConfig, cache: Path) -> Any:
    """Return Megatron's GPTDataset (or a blend) with every sample of the run, in order.

    Args:
        cache: where the sample index is kept between starts.
    """
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    config = GPTDatasetConfig(
        random_seed=train.seed,
        sequence_length=train.seq_len_tokens,
        blend=(list(corpus.prefixes), list(corpus.weights) if corpus.weights else None),
        split="1,0,0",
        path_to_cache=str(cache),
        tokenizer=_EndOfDocument(corpus.eod_id),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    with cpu.redirect():
        built, _, _ = BlendedMegatronDatasetBuilder(
            GPTDataset, [train.samples, 0, 0], lambda: True, config
        ).build()
    if built is None or len(built) < train.samples:
        raise UserError(
            f"--data {corpus.prefixes[0]}: too short for one sequence of "
            f"{train.seq_len_tokens} tokens; give more text or a shorter --train.seq-len-tokens"
        )
    return built


@dataclasses.dataclass(frozen=True)
class Batch:
    """One microbatch on this process.  B sequences of S tokens (S / context parallel size)."""

    tokens_BS: Tensor
    labels_BS: Tensor
    position_ids_BS: Tensor
    packed: Any = None
    """PackedSeqParams when documents do not see one another; then B is 1."""


class Batches:
    """An endless iterator over this process's microbatches from a given position on.

    Args:
        consumed_samples: sequences that all processes have taken before.
    """

    def __init__(
        self,
        dataset: Any,
        train: TrainConfig,
        *,
        data_parallel: int,
        consumed_samples: int,
        eod_id: int,
    ) -> None:
        from megatron.core import parallel_state

        self._dataset = dataset
        self._train = train
        self._data_parallel = data_parallel
        self._rank = parallel_state.get_data_parallel_rank()
        self._next = consumed_samples
        self._eod_id = eod_id
        self._device = distributed.device()
        self._positions: Tensor | None = None

    def seek(self, consumed_samples: int) -> None:
        """Go to the batch that follows this many consumed sequences."""
        self._next = consumed_samples

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        size = self._train.micro_batch_sequences
        first = self._next + self._rank * size
        self._next += size * self._data_parallel
        text_BT = np.stack([self._text(i) for i in range(first, first + size)])
        text = torch.from_numpy(text_BT).to(self._device, non_blocking=True)
        tokens, labels = text[:, :-1], text[:, 1:]
        if self._positions is None:
            self._positions = torch.arange(tokens.size(1), device=self._device)
        batch = Batch(
            tokens_BS=tokens.contiguous(),
            labels_BS=labels.contiguous(),
            position_ids_BS=self._positions.expand_as(tokens),
        )
        if self._train.reset_at_documents:
            return pack_documents(batch, self._eod_id)
        return take_context_part(batch)

    def _text(self, index: int) -> np.ndarray:
        """Return one sample's tokens, one more than the sequence length.  Shape (S + 1,)."""
        dataset, inner = locate(self._dataset, index)
        return dataset._query_document_sample_shuffle_indices(inner)[0]


def locate(dataset: Any, index: int) -> tuple[Any, int]:
    """Return the GPTDataset, and the index within it, that a sample of a blend comes from."""
    if hasattr(dataset, "dataset_index"):
        source = int(dataset.dataset_index[index])
        return dataset.datasets[source], int(dataset.dataset_sample_index[index])
    return dataset, index


def documents_of(dataset: Any, samples: range) -> list[dict[str, Any]]:
    """Name the documents behind a range of samples: file prefix and document numbers."""
    found = []
    for sample in samples:
        source, inner = locate(dataset, sample)
        _, documents = source._query_document_sample_shuffle_indices(inner)
        found.append(
            {"sample": sample, "file": str(source.dataset_path), "documents": documents.tolist()}
        )
    return found


def pack_documents(batch: Batch, eod_id: int) -> Batch:
    """Lay the sequences end to end and mark where documents begin.

    A document ends with its end-of-document token; the next token starts a new segment.
    Every sequence starts one too, so rows stay apart.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    rows, length = batch.tokens_BS.shape
    starts_BS = torch.zeros_like(batch.tokens_BS, dtype=torch.bool)
    starts_BS[:, 1:] = batch.tokens_BS[:, :-1] == eod_id
    starts_BS[:, 0] = True
    starts = starts_BS.flatten().nonzero().flatten().to(torch.int32)
    ends = torch.cat([starts, starts.new_tensor([rows * length])])
    longest = int((ends[1:] - ends[:-1]).max())
    within = torch.arange(rows * length, device=ends.device) - starts.repeat_interleave(
        ends[1:] - ends[:-1]
    )
    return Batch(
        tokens_BS=batch.tokens_BS.reshape(1, -1),
        labels_BS=batch.labels_BS.reshape(1, -1),
        position_ids_BS=within.reshape(1, -1),
        packed=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        ),
    )


def take_context_part(batch: Batch) -> Batch:
    """Keep this context-parallel process's tokens: one chunk from each end (load balance)."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    if parallel_state.get_context_parallel_world_size() == 1:
        return batch
    fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    fields.pop("packed")
    with cpu.redirect():
        return Batch(**get_batch_on_this_cp_rank(fields))
