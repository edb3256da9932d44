"""Rendered training samples on disk: token ids, loss masks and an index, memory-mapped.

    <folder>/train/tokens.bin   int32, all samples one after another
             train/mask.bin     uint8, 1 on the tokens that carry loss
             train/samples.npy  a row per sample: SAMPLE
             held_out/...       the same, of rows that are never trained on
             held_out.jsonl     prompts and gold answers of held-out rows, to measure calls
             tools.jsonl        the tool corpus that pools were drawn from
             tokenizer/         the tokenizer that drew the samples

Samples are packed to the context length when they are read (`sft.packing`), so one folder
serves every batch size and every pool-size curriculum.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from gatewright.errors import UserError

SAMPLE = np.dtype(
    [
        ("start", "<i8"),  # first token in tokens.bin
        ("length", "<i4"),  # tokens
        ("targets", "<i4"),  # tokens that carry loss
        ("pool_size", "<i4"),  # tools in the prompt
        ("row", "<i8"),  # 0-based number of the source row over all inputs
    ]
)


class Writer:
    """Appends samples to a split's folder; `close` writes the index."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self._tokens: io.BufferedWriter = open(folder / "tokens.bin", "wb")  # noqa: SIM115
        self._mask: io.BufferedWriter = open(folder / "mask.bin", "wb")  # noqa: SIM115
        self._chunks: list[NDArray[np.void]] = []
        self._rows: list[tuple[int, int, int, int, int]] = []
        self.tokens = 0
        self.targets = 0
        self.samples = 0

    def add(
        self,
        input_ids: Sequence[int] | NDArray[np.int32],
        mask: Sequence[int] | NDArray[np.uint8],
        pool_size: int,
        row: int,
    ) -> None:
        """Append one sample; both sequences have one entry per token."""
        ids = np.asarray(input_ids, dtype="<i4")
        ones = np.asarray(mask, dtype=np.uint8)
        assert ids.shape == ones.shape
        self._tokens.write(ids.tobytes())
        self._mask.write(ones.tobytes())
        targets = int(ones.sum())
        self._rows.append((self.tokens, len(ids), targets, pool_size, row))
        if len(self._rows) == 4096:
            self._flush()
        self.tokens += len(ids)
        self.targets += targets
        self.samples += 1

    def _flush(self) -> None:
        self._chunks.append(np.array(self._rows, dtype=SAMPLE))
        self._rows = []

    def close(self) -> None:
        self._flush()
        self._tokens.close()
        self._mask.close()
        np.save(self.folder / "samples.npy", np.concatenate(self._chunks))

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._tokens.close()
            self._mask.close()


class Samples:
    """A split's samples, memory-mapped.

    Raises:
        UserError: a file is missing or damaged, or does not match the index.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("tokens.bin", "mask.bin", "samples.npy"):
            if not (folder / name).is_file():
                raise UserError(f"{folder / name}: is missing; run sft.prepare again")
        path = folder / "samples.npy"
        try:
            with open(path, "rb") as f:
                self.index = np.lib.format.read_array(f, allow_pickle=False)
        except (OSError, ValueError, EOFError) as e:
            raise UserError(f"{path}: is damaged ({e}); run sft.prepare again") from e
        if self.index.dtype != SAMPLE or self.index.ndim != 1:
            raise UserError(f"{path}: has another format; run sft.prepare again")
        lengths = self.index["length"].astype(np.int64)
        ends = np.cumsum(lengths)
        if (lengths < 1).any() or (self.index["start"] != ends - lengths).any():
            raise UserError(f"{path}: its samples do not follow each other; run sft.prepare again")
        total = int(lengths.sum())
        self._tokens = _map(folder / "tokens.bin", np.dtype("<i4"), total)
        self._mask = _map(folder / "mask.bin", np.dtype(np.uint8), total)

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, i: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Return (token ids, loss mask) of sample i, shape (length,) each."""
        start, length = int(self.index[i]["start"]), int(self.index[i]["length"])
        return self._tokens[start : start + length], self._mask[start : start + length]

    def require_ids_below(self, vocab_size: int) -> None:
        """Look through all token ids: one beyond the embedding ends a GPU without a word of it.

        Raises:
            UserError: one is negative or not below `vocab_size`.
        """
        for first in range(0, len(self._tokens), 2**24):
            part = self._tokens[first : first + 2**24]
            for wrong in (int(part.min()), int(part.max())):
                if not 0 <= wrong < vocab_size:
                    raise UserError(
                        f"{self.folder / 'tokens.bin'}: holds the token id {wrong}, and ids end "
                        f"at {vocab_size - 1}; run sft.prepare again"
                    )


def _map(path: Path, dtype: np.dtype, count: int) -> NDArray:
    if path.stat().st_size != count * dtype.itemsize:
        raise UserError(f"{path}: its size does not match samples.npy; run sft.prepare again")
    if not count:
        return np.zeros(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,))
