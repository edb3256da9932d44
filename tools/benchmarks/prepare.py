"""Corpus preparation, MB of text per second and peak memory, against Megatron-LM's way.

Threads are worker processes here.  The peer is what Megatron-LM's preprocessing does: a
`multiprocessing.Pool` maps the transformers tokenizer over lines and sends lists of integers
to the one process that writes them with `IndexedDatasetBuilder`.  Both read the same plain
JSONL and must write the same tokens, which is asserted.

The clock is unfair to ours: `python -m pretrain.prepare` is timed from the start of Python to
its exit, hashes and manifest included, and the peer from after its imports to its last byte.
Memory is the proportional set size of the whole process tree, on 1x and 10x the text, and of
ours on 30x: our cache of pieces is bounded, but 4 MB are read before it and the buffers are full.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.benchmarks.harness import Options, Result, result

ALLOCATORS = ("default",)
PEER = "Megatron-LM: pool and one writer"
TEXT_MB = 4
SHARDS = 4
VOCAB_SIZE = 8192
MOST_REPEATS = 2  # a round reads 40 MB on both sides


def _make_text(folder: Path) -> float:
    """Write prose of installed documentation as plain JSONL shards; return megabytes of text."""
    from tools.demo_text import collect, installed_sources

    folder.mkdir()
    rows = list(collect(installed_sources(), TEXT_MB * 1_000_000))
    size = 0
    for i in range(SHARDS):
        with open(folder / f"{i}.jsonl", "w", encoding="utf-8") as f:
            for row in rows[i::SHARDS]:
                f.write(json.dumps(row, ensure_ascii=False) + "\n")
                size += len(row["text"].encode())
    return size / 1e6


def _repeat(source: Path, folder: Path, times: int) -> None:
    folder.mkdir()
    for shard in sorted(source.iterdir()):
        (folder / shard.name).write_bytes(shard.read_bytes() * times)


def tree_bytes(pid: int) -> int:
    """Return the proportional set size of a process and everything below it (Linux)."""
    import psutil

    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    total = 0
    for process in processes:
        try:
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        except OSError:  # it has just ended
            continue
        total += sum(int(x.split()[1]) << 10 for x in rollup.splitlines() if x.startswith("Pss:"))
    return total


def _run(module: str, *arguments: object) -> tuple[float, int, str]:
    """Run `python -m`; return wall seconds, peak bytes of its process tree, and its output."""
    # Megatron warns of engines that a machine without a GPU lacks.
    command = [sys.executable, "-W", "ignore", "-m", module, *map(str, arguments)]
    environment = os.environ | {"GATEWRIGHT_QUIET": "1", "TOKENIZERS_PARALLELISM": "false"}
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        peak = 0
        stop = threading.Event()

        def watch() -> None:
            nonlocal peak
            while not stop.wait(0.1):
                peak = max(peak, tree_bytes(process.pid))

        watcher = threading.Thread(target=watch)
        watcher.start()
        out = process.communicate()[0]
        seconds = time.perf_counter() - start
        stop.set()
        watcher.join()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} left with code {process.returncode}")
    return seconds, peak, out


class _Sides:
    """Runs either side on a folder of shards, with new output each time."""

    def __init__(self, tokenizer: Path, scratch: Path, workers: int) -> None:
        self.tokenizer, self.scratch, self.workers, self.count = tokenizer, scratch, workers, 0

    def _out(self) -> Path:
        self.count += 1
        return self.scratch / f"out{self.count}"

    def ours(self, text: Path) -> tuple[float, int, Path]:
        out = self._out()
        seconds, peak, _ = _run(
            "pretrain.prepare", "--input", text, "--tokenizer", self.tokenizer, "--out", out,
            "--workers", self.workers,
        )  # fmt: skip
        return seconds, peak, out / "text"

    def peer(self, text: Path) -> tuple[float, int, Path]:
        out = self._out()
        _, peak, said = _run(__name__, text, self.tokenizer, out, self.workers)
        return float(said), peak, out


def run(options: Options) -> Iterator[Result]:
    with tempfile.TemporaryDirectory() as tmp:
        scratch = Path(tmp)
        small, large, tokenizer = scratch / "small", scratch / "large", scratch / "tokenizer"
        megabytes = _make_text(small)
        _repeat(small, large, 10)
        _run(
            "tokenizer.train", "--corpus", small, "--vocab-size", VOCAB_SIZE, "--out", tokenizer
        )  # fmt: skip
        sides = _Sides(tokenizer, scratch, options.threads)
        once_ours, once_peer = sides.ours(small), sides.peer(small)
        ours, peer = [], []
        for _ in range(min(options.repeats, MOST_REPEATS)):
            ours.append(sides.ours(large))
            peer.append(sides.peer(large))
        for suffix in (".bin", ".idx"):
            a, b = (Path(f"{side[-1][2]}{suffix}").read_bytes() for side in (ours, peer))
            assert a == b, f"the two sides wrote different {suffix} files"
        done = 10 * megabytes
        speed, peer_speed = (done / statistics.median(s for s, _, _ in x) for x in (ours, peer))
        yield result(options, "prepare", speed, peer_speed, "MB/s", PEER, more_is_better=True)
        for text_mb, x, y in ((TEXT_MB, [once_ours], [once_peer]), (10 * TEXT_MB, ours, peer)):
            peak, peer_peak = (max(p for _, p, _ in side) / 1e6 for side in (x, y))
            name = f"peak memory, {text_mb} MB of text"
            yield result(options, name, peak, peer_peak, "MB", PEER)
        huge = scratch / "huge"
        _repeat(small, huge, 30)
        peak = sides.ours(huge)[1] / 1e6
        yield result(options, f"peak memory, {30 * TEXT_MB} MB of text", peak, None, "MB")


# --- the peer, in a process of its own ----------------------------------------------------

_tokenizer: Any = None


def _start_worker(folder: str) -> None:
    global _tokenizer
    from transformers import AutoTokenizer

    _tokenizer = AutoTokenizer.from_pretrained(folder)


def _encode_line(line: str) -> list[int]:
    ids = _tokenizer(json.loads(line)["text"])["input_ids"]
    if ids:
        ids.append(_tokenizer.eos_token_id)
    return list(ids)


def _peer_main(text: Path, tokenizer: str, out: str, workers: int) -> None:
    import transformers  # noqa: F401  (before the clock starts, and shared by the pool)

    from gatewright.megatron.indexed import builder

    started = time.perf_counter()
    written = builder(out, VOCAB_SIZE)
    with multiprocessing.get_context("fork").Pool(workers, _start_worker, (tokenizer,)) as pool:
        for shard in sorted(text.iterdir()):
            with open(shard, encoding="utf-8") as f:
                for ids in pool.imap(_encode_line, f, 32):
                    if ids:
                        written.add_document(ids, [len(ids)])
    written.finalize(f"{out}.idx")
    print(time.perf_counter() - started)


if __name__ == "__main__":
    _peer_main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
