"""Shards appended in order to the corpus's files, each step of it resumable.

`commit.json` in the work folder says how far each part has got: shards, bytes, counts.  It is
replaced atomically after a shard's bytes are on disk, and only then is the shard deleted.  A
run that is killed between cuts the files back to what the commit says and appends again.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gatewright import artifact
from pretrain.corpus_blend import Part
from pretrain.corpus_index import append_file, write_index
from pretrain.corpus_shards import KEPT_BAD_LINES, ShardResult


@dataclasses.dataclass
class PartState:
    """What is appended of one part."""

    shards: int = 0
    bin_bytes: int = 0
    len_bytes: int = 0
    documents: int = 0
    empty_documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    bad_lines: int = 0
    first_bad_lines: list[str] = dataclasses.field(default_factory=list)
    without_short_cut: int = 0
    counts: str | None = None
    """File of the token counts that belong to this state."""


class Merge:
    """Appends finished shards to their parts, in the order of the plan.

    Args:
        parts: the plan; shard numbers run through all parts in order.
        vocab_size: length of the token counts.
    """

    def __init__(self, work: Path, parts: Sequence[Part], vocab_size: int) -> None:
        self.work, self.parts, self.vocab_size = work, parts, vocab_size
        self._path = work / "commit.json"
        self.states = {p.name: PartState() for p in parts}
        if self._path.is_file():
            for name, raw in json.loads(self._path.read_text()).items():
                state = PartState(**raw)
                file = self._stem(name, ".bin")
                # It is gone if it was renamed away just before a kill (see `publish`).
                if file.is_file() and file.stat().st_size >= state.bin_bytes:
                    self.states[name] = state
        self._firsts = np.cumsum([0, *(len(p.shards) for p in parts)]).tolist()

    def _stem(self, name: str, ending: str) -> Path:
        """Return a part's file; shards beside it are called by numbers, as a part may be."""
        return self.work / f"part-{name}{ending}"

    def done(self, index: int) -> bool:
        """Say whether a shard is already part of the corpus."""
        for part, first in zip(self.parts, self._firsts, strict=False):
            if index < first + len(part.shards):
                return index - first < self.states[part.name].shards
        raise IndexError(index)

    def bad_lines(self) -> tuple[int, str]:
        """Return how many bad lines all finished shards hold, appended or not, and one of them."""
        found: list[PartState | ShardResult] = list(self.states.values())
        for index in range(self._firsts[-1]):
            if not self.done(index) and (result := ShardResult.read(self.work, index)) is not None:
                found.append(result)
        bad = [one for one in found if one.bad_lines]
        return sum(one.bad_lines for one in bad), bad[-1].first_bad_lines[-1] if bad else ""

    def counts(self, name: str) -> np.ndarray:
        """Return how often each token occurs in a part.  Shape (vocab_size,), int64."""
        file = self.states[name].counts
        if file is None:
            return np.zeros(self.vocab_size, dtype=np.int64)
        return np.fromfile(self.work / file, dtype=np.int64)

    def advance(self) -> None:
        """Append every shard whose turn has come and which is finished."""
        for part, first in zip(self.parts, self._firsts, strict=False):
            while (done := self.states[part.name].shards) < len(part.shards):
                result = ShardResult.read(self.work, first + done)
                if result is None:
                    break
                self._append(part.name, first + done, result)

    def _append(self, name: str, index: int, result: ShardResult) -> None:
        old = self.states[name]
        stem = self.work / str(index)
        counts = self.counts(name) + np.fromfile(stem.with_suffix(".counts"), dtype=np.int64)
        new = PartState(
            shards=old.shards + 1,
            bin_bytes=append_file(
                stem.with_suffix(".bin"), self._stem(name, ".bin"), old.bin_bytes
            ),
            len_bytes=append_file(
                stem.with_suffix(".len"), self._stem(name, ".len"), old.len_bytes
            ),
            documents=old.documents + result.documents,
            empty_documents=old.empty_documents + result.empty_documents,
            tokens=old.tokens + result.tokens,
            text_bytes=old.text_bytes + result.text_bytes,
            bad_lines=old.bad_lines + result.bad_lines,
            first_bad_lines=(old.first_bad_lines + result.first_bad_lines)[:KEPT_BAD_LINES],
            without_short_cut=old.without_short_cut + (not result.short_cut),
            counts=self._stem(name, f".counts-{old.shards + 1}").name,
        )
        with open(self.work / str(new.counts), "wb") as f:
            counts.tofile(f)
            f.flush()
            os.fsync(f.fileno())
        self.states[name] = new
        artifact.write_json(self._path, {n: dataclasses.asdict(s) for n, s in self.states.items()})
        for kind in ("json", "bin", "len", "counts"):
            stem.with_suffix(f".{kind}").unlink()
        if old.counts is not None:
            (self.work / old.counts).unlink()

    def publish(self, folder: Path, dtype: np.dtype) -> None:
        """Put each part's `.bin` and `.idx` into a folder on the same file system."""
        for part in self.parts:
            state = self.states[part.name]
            found = write_index(self._stem(part.name, ".len"), folder / f"{part.name}.idx", dtype)
            assert found == (state.documents, state.tokens), (found, state)
            source, target = self._stem(part.name, ".bin"), folder / f"{part.name}.bin"
            try:
                # A second name, so that a kill before the manifest is written loses nothing.
                os.link(source, target)
            except OSError:
                os.rename(source, target)
