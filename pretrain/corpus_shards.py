"""Worker processes that turn one shard of text at a time into token files of its own.

A finished shard is four files in the work folder: `N.bin` (tokens), `N.len` (int32 document
lengths), `N.counts` (int64 occurrences of every token) and, written last, `N.json`.  A run
that is killed loses only the shards that were being encoded.
"""

from __future__ import annotations

import array
import dataclasses
import json
import multiprocessing
import os
import queue
import signal
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gatewright import artifact
from gatewright.documents import BadLines, documents
from gatewright.errors import UserError
from pretrain import corpus_encoder
from pretrain.corpus_index import token_dtype

FLUSH_BYTES = 4 << 20
POLL_SECONDS = 0.5
KEPT_BAD_LINES = 100


@dataclasses.dataclass(frozen=True)
class Settings:
    """What every worker needs to know."""

    tokenizer: Path
    work: Path
    field: str
    skip_bad_lines: int
    short_cut: bool = True


@dataclasses.dataclass
class ShardResult:
    """What became of one shard."""

    index: int
    documents: int = 0
    empty_documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    bad_lines: int = 0
    first_bad_lines: list[str] = dataclasses.field(default_factory=list)
    short_cut: bool = True

    @classmethod
    def read(cls, work: Path, index: int) -> ShardResult | None:
        """Return the record of a shard that is finished, or None."""
        path = work / f"{index}.json"
        return cls(**json.loads(path.read_text())) if path.is_file() else None


class _Consumed:
    """Tells the parent how far a shard is read, and ends an orphaned worker."""

    def __init__(self, shared: Any, index: int, parent: int | None) -> None:
        self._shared, self._index, self._parent = shared, index, parent

    def __call__(self, position: int) -> None:
        self._shared[self._index] = position
        if self._parent is not None and os.getppid() != self._parent:
            os._exit(1)


class ShardEncoder:
    """Encodes shards in this process; the tokenizer is loaded once."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._tokenizer, self._vocab_size, eod = corpus_encoder.load(settings.tokenizer)
        self._dtype = token_dtype(self._vocab_size)
        self._end = np.array([eod], dtype=self._dtype).tobytes()
        self._encoder = self._new_encoder(settings.short_cut)

    def _new_encoder(self, short_cut: bool) -> corpus_encoder.Encoder:
        return corpus_encoder.Encoder(self._tokenizer, self._dtype, short_cut=short_cut)

    def encode(self, path: Path, index: int, consumed: Callable[[int], None]) -> ShardResult:
        """Encode one shard; its record is on disk when this returns.

        Raises:
            UserError: a bad line beyond the limit, or a file that cannot be read.
        """
        stem = self._settings.work / str(index)
        tmp = {k: stem.with_suffix(f".{k}.tmp-{os.getpid()}") for k in ("bin", "len", "counts")}
        try:
            try:
                result = self._write(path, index, tmp, consumed)
            except corpus_encoder.ShortCutError:
                self._encoder = self._new_encoder(False)
                result = self._write(path, index, tmp, consumed)
            for kind, file in tmp.items():
                with open(file, "rb") as written:
                    os.fsync(written.fileno())
                os.replace(file, stem.with_suffix(f".{kind}"))
        finally:
            for file in tmp.values():
                file.unlink(missing_ok=True)
        artifact.write_json(stem.with_suffix(".json"), dataclasses.asdict(result))
        return result

    def _write(
        self, path: Path, index: int, tmp: Mapping[str, Path], consumed: Callable[[int], None]
    ) -> ShardResult:
        """Write a shard's tokens, lengths and counts into the given files."""
        settings, itemsize = self._settings, self._dtype.itemsize
        result = ShardResult(index, short_cut=self._encoder.has_short_cut)
        bad = BadLines(settings.skip_bad_lines)
        counts = np.zeros(self._vocab_size, dtype=np.int64)
        held, lengths = bytearray(), array.array("i")
        with open(tmp["bin"], "wb") as tokens_file, open(tmp["len"], "wb") as lengths_file:

            def flush() -> None:
                found = np.frombuffer(held, dtype=self._dtype)
                counts[:] += np.bincount(found, minlength=self._vocab_size)
                result.documents += len(lengths)
                result.tokens += len(found)
                del found  # a bytearray that is looked at cannot be emptied
                tokens_file.write(held)
                lengths.tofile(lengths_file)
                held.clear()
                del lengths[:]

            for text in documents(path, field=settings.field, bad=bad, consumed=consumed):
                if not text:
                    result.empty_documents += 1
                    continue
                before = len(held)
                held += self._encoder.encode(text)
                held += self._end
                lengths.append((len(held) - before) // itemsize)
                result.text_bytes += len(text) if text.isascii() else len(text.encode("utf-8"))
                if len(held) >= FLUSH_BYTES:
                    flush()
            flush()
        counts.tofile(tmp["counts"])
        result.bad_lines = len(bad.found)
        result.first_bad_lines = bad.found[:KEPT_BAD_LINES]
        return result


def _worker(
    settings: Settings, shards: Sequence[tuple[int, Path]], turn: Any, shared: Any, results: Any,
    parent: int,
) -> None:  # fmt: skip
    """Take shards in order until none is left; runs in a process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        encoder = ShardEncoder(settings)
        while True:
            with turn.get_lock():
                mine, turn.value = turn.value, turn.value + 1
            if mine >= len(shards):
                return
            index, path = shards[mine]
            results.put(encoder.encode(path, index, _Consumed(shared, index, parent)))
    except UserError as e:
        results.put(e)


def encode_shards(
    settings: Settings, shards: Sequence[tuple[int, Path]], shared: Any, workers: int
) -> Generator[ShardResult | None, None, None]:
    """Yield the result of each shard as it is finished, and None now and then between them.

    Args:
        shards: (index, path) of each shard still to do.
        shared: one counter per index, which is set to the bytes read so far.
        workers: processes; 1 works in this one.

    Raises:
        UserError: bad input, from whichever worker met it first.
        RuntimeError: a worker died without a word (killed, out of memory).
    """
    if workers == 1 or len(shards) <= 1:
        if not shards:
            return
        encoder = ShardEncoder(settings)
        for index, path in shards:
            yield encoder.encode(path, index, _Consumed(shared, index, None))
        return
    # fork: this process has neither started threads nor loaded a tokenizer yet.
    context = multiprocessing.get_context("fork")
    results: Any = context.Queue()
    turn = context.Value("q", 0)
    processes = [
        context.Process(
            target=_worker,
            args=(settings, shards, turn, shared, results, os.getpid()),
            daemon=True,
        )
        for _ in range(min(workers, len(shards)))
    ]
    for process in processes:
        process.start()
    try:
        left = len(shards)
        while left:
            # Looked at before the queue: a worker that ended well has put its results there.
            dead = [p for p in processes if p.exitcode not in (None, 0)]
            try:
                found = results.get(timeout=POLL_SECONDS)
            except queue.Empty:
                if dead:
                    raise RuntimeError(
                        f"a worker died (exit code {dead[0].exitcode}; -9 means killed, often "
                        "for want of memory); run the same command again to continue"
                    ) from None
                yield None
                continue
            if isinstance(found, UserError):
                raise found
            left -= 1
            yield found
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()
