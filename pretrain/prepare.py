"""Turn text into the indexed token files that pretraining reads.

    python -m pretrain.prepare --input runs/text --tokenizer runs/tokenizer --out runs/corpus

Each document is followed by the end-of-document token.  Workers encode one shard file each
into files of their own, which are appended in order: the result does not depend on the number
of workers.  A run that is killed continues, when started again, at the shards that it had not
finished.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import glob
import hashlib
import multiprocessing
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gatewright import artifact, cli
from gatewright.documents import find_shards, input_parents
from gatewright.errors import UserError
from gatewright.runlog import progress
from pretrain import corpus_blend, corpus_encoder
from pretrain.corpus_index import token_dtype
from pretrain.corpus_merge import Merge
from pretrain.corpus_shards import Settings, encode_shards

BLEND_CHOICES = ("none", "partitions", *corpus_blend.BLENDS)


@dataclasses.dataclass(frozen=True)
class Args:
    """Flags of `python -m pretrain.prepare`."""

    input: tuple[str, ...]
    """Files, globs or folders: .jsonl, .jsonl.gz, .jsonl.zst(d) or .parquet."""
    tokenizer: Path
    """Tokenizer folder (or any folder with a Hugging Face tokenizer.json)."""
    out: Path
    """Folder to make."""
    workers: int = dataclasses.field(default_factory=lambda: len(os.sched_getaffinity(0)))
    """Processes, each with one shard at a time."""
    text_field: str = "text"
    """JSON key or parquet column that holds a document."""
    skip_bad_lines: int = 0
    """Lines that may be bad (not JSON, no text) before the run stops; counted and named."""
    blend: str = "none"
    """none: one pair of files. partitions: a pair per partition (quality=*/kind=*/kind2=*, or the
    shard's folder). nemotron_cc_hq: only the two partitions of high quality, a pair each."""
    weights: tuple[str, ...] = ()
    """PARTITION=WEIGHT: how often a token of it is seen relative to others; 1 unless given."""
    short_cut: bool = True
    """Encode by cached pieces where that is exact (see corpus_encoder); off: tokenizer only."""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UserError(f"--workers {self.workers}: give at least 1")
        if self.skip_bad_lines < 0:
            raise UserError(f"--skip-bad-lines {self.skip_bad_lines}: give 0 or more")
        if self.blend not in BLEND_CHOICES:
            raise UserError(
                f"--blend {self.blend}{cli.nearest(self.blend, BLEND_CHOICES)}; "
                f"choices: {', '.join(BLEND_CHOICES)}"
            )


@contextlib.contextmanager
def only_one(out: Path) -> Iterator[None]:
    """Hold the right to prepare `out`.

    Raises:
        UserError: another process holds it, or nothing can be written there.
    """
    path = out.parent / f".{out.name}.prepare.lock"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        held = open(path, "w")  # noqa: SIM115
    except OSError as e:
        raise UserError(f"--out {out}: cannot write beside it ({e.strerror})") from e
    with held as lock:
        try:
            # A POSIX lock: workers do not inherit it, so it ends with this process.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            raise UserError(f"--out {out}: another run is preparing it") from e
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def work_folder(args: Args, parts: Sequence[corpus_blend.Part]) -> Path:
    """Return the folder of this very job beside `out`; those of other jobs are removed.

    The name holds a hash of everything that decides a shard's tokens, so that a changed input
    or tokenizer never continues an old run.
    """
    digest = hashlib.sha256(artifact.sha256_file(args.tokenizer / "tokenizer.json").encode())
    config = args.tokenizer / "tokenizer_config.json"
    digest.update(config.read_bytes() if config.is_file() else b"")
    digest.update(args.text_field.encode())
    for part in parts:
        digest.update(f"\0{part.name}".encode())
        for shard in part.shards:
            stat = shard.stat()
            digest.update(f"\0{shard.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
    prefix = f".{args.out.name}.prepare-"
    work = args.out.parent / (prefix + digest.hexdigest()[:16])
    try:
        for other in args.out.parent.glob(glob.escape(prefix) + "*"):
            if other != work and other.is_dir():
                shutil.rmtree(other)
        work.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"--out {args.out}: cannot write beside it ({e.strerror})") from e
    return work


def require_few_bad_lines(count: int, last: str, limit: int) -> None:
    """Refuse more bad lines than --skip-bad-lines allows over all shards.

    Raises:
        UserError: with their number, and one of them by name.
    """
    if count > limit:
        raise UserError(
            f"{count} bad lines, the last {last}; mend them or allow more with --skip-bad-lines N"
        )


def entropy_nats(counts: np.ndarray) -> float:
    """Return the entropy of a distribution given by (weighted) counts, in nats."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def summarise(merge: Merge, parts: Sequence[corpus_blend.Part]) -> dict[str, Any]:
    """Return the facts of a corpus that its manifest keeps under `extra`."""
    states = merge.states
    weighted = {p.name: p.weight * states[p.name].tokens for p in parts}
    total = sum(weighted.values())
    # A token of weight w is seen w times as often, so its count counts w times.
    mixed = sum(
        (p.weight * merge.counts(p.name) for p in parts), np.zeros(merge.vocab_size, np.float64)
    )
    keys = ("tokens", "documents", "empty_documents", "text_bytes", "bad_lines")
    return {
        **{k: sum(getattr(s, k) for s in states.values()) for k in keys},
        "unigram_entropy_nats": entropy_nats(mixed),
        "first_bad_lines": [line for s in states.values() for line in s.first_bad_lines],
        "shards_without_short_cut": sum(s.without_short_cut for s in states.values()),
        "blend": {p.name: weighted[p.name] / total for p in parts},
        "parts": {
            p.name: {
                "tokens": states[p.name].tokens,
                "documents": states[p.name].documents,
                "shards": len(p.shards),
                "weight": p.weight,
            }
            for p in parts
        },
    }


def encode_all(args: Args, work: Path, parts: Sequence[corpus_blend.Part], merge: Merge) -> None:
    """Encode and append every shard that is not appended yet."""
    shards = list(enumerate(path for part in parts for path in part.shards))
    sizes = [path.stat().st_size for _, path in shards]
    merge.advance()
    todo = [
        (i, path) for i, path in shards if not merge.done(i) and not (work / f"{i}.json").is_file()
    ]
    before = sum(sizes) - sum(sizes[i] for i, _ in todo)
    if before:
        print(f"continuing: {len(shards) - len(todo)} of {len(shards)} shards are done")
    # Bytes read of each shard, written by the workers.
    shared = multiprocessing.RawArray(ctypes.c_int64, len(shards))
    read = np.ctypeslib.as_array(shared)
    settings = Settings(args.tokenizer, work, args.text_field, args.skip_bad_lines, args.short_cut)
    bad, last = merge.bad_lines()
    require_few_bad_lines(bad, last, args.skip_bad_lines)
    results = encode_shards(settings, todo, shared, args.workers)
    with (
        contextlib.closing(results),
        progress(total=sum(sizes), initial=before, desc="prepare", unit="B", scale=True) as bar,
    ):
        for result in results:
            if result is not None:
                read[result.index] = sizes[result.index]
                merge.advance()
                if result.bad_lines:
                    bad, last = bad + result.bad_lines, result.first_bad_lines[-1]
                require_few_bad_lines(bad, last, args.skip_bad_lines)
            bar.update(before + int(read.sum()) - bar.n)
    merge.advance()


def main(args: Args) -> None:
    """Turn JSONL or parquet text into Megatron's indexed token files."""
    if os.path.lexists(args.out):
        raise UserError(f"--out {args.out} exists: remove it or choose another folder")
    shards = find_shards(args.input, "--input")
    parts = corpus_blend.plan(shards, args.blend, corpus_blend.parse_weights(args.weights))
    if not args.tokenizer.is_dir():
        raise UserError(f"--tokenizer {args.tokenizer}: no such folder")
    _, vocab_size, eod_id = corpus_encoder.load(args.tokenizer)
    dtype = token_dtype(vocab_size)
    parents = {"tokenizer": args.tokenizer, **input_parents(args.input)}
    extra: dict[str, Any] = {
        "vocab_size": vocab_size,
        "eod_id": eod_id,
        "dtype": dtype.name,
        "shards": [[str(s), s.stat().st_size] for part in parts for s in part.shards],
    }
    with only_one(args.out):
        work = work_folder(args, parts)
        merge = Merge(work, parts, vocab_size)
        try:
            encode_all(args, work, parts, merge)
            empty = [p for p in parts if not merge.states[p.name].documents]
            if empty:
                shutil.rmtree(work)
                files = ", ".join(str(p.shards[0]) for p in empty)
                raise UserError(
                    f"--input: no document with text in {files} (of blend part "
                    f"{', '.join(p.name for p in empty)}); leave it out or give text"
                )
            extra.update(summarise(merge, parts))
            with artifact.create(
                args.out, kind="corpus", config=args, parents=parents, extra=extra
            ) as folder:
                merge.publish(folder, dtype)
        except UserError as e:
            if not work.exists():
                raise
            done = sum(state.shards for state in merge.states.values())
            if not done:
                shutil.rmtree(work)  # nothing worth continuing
                raise
            raise UserError(
                f"{e} ({done} finished shards wait in {work} for the same command; it may be "
                "removed)"
            ) from e
        shutil.rmtree(work)
    per_token = extra["text_bytes"] / extra["tokens"]
    print(
        f"{args.out}: {extra['tokens']:,} tokens of {extra['documents']:,} documents in "
        f"{len(extra['shards'])} shards, {per_token:.2f} bytes a token, "
        f"unigram entropy {extra['unigram_entropy_nats']:.4f} nats"
    )
    if extra["bad_lines"]:
        print(f"skipped {extra['bad_lines']} bad lines, first {extra['first_bad_lines'][0]}")


if __name__ == "__main__":
    cli.run(main, Args, prog="python -m pretrain.prepare")
