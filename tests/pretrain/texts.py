"""Texts, shards of them, and the corpora that `pretrain.prepare` makes."""

import json
from pathlib import Path

import zstandard

from gatewright import artifact
from pretrain import prepare

ROOT = Path(__file__).resolve().parents[2]
SAYING = "the gate of a state space model decides how long it remembers what it has read"
WORDS = SAYING.split()


class Stop(Exception):
    pass


def documents(n: int, start: int = 0) -> list[str]:
    """Return n different documents with spaces, signs, digits and separators other than \\n."""
    odd = ["\u2028", "\u0085", "é", "🌦", "日本", "\r\n", "<|endoftext|>", "\x1c", "\t\t"]
    return [
        " ".join(WORDS[(i * 7 + j) % len(WORDS)] for j in range(5 + i % 11))
        + f" {i}.{odd[i % len(odd)]}\nNext line, {i * 37 % 1000}!"
        for i in range(start, start + n)
    ]


def jsonl(texts) -> bytes:
    return b"".join(
        json.dumps({"warc_record_id": "x", "text": t}, ensure_ascii=False).encode() + b"\n"
        for t in texts
    )


def zstd_frames(data: bytes, frames: int) -> bytes:
    """Compress in several frames that end in the middle of lines."""
    step = len(data) // frames + 1
    return b"".join(
        zstandard.ZstdCompressor().compress(data[i : i + step]) for i in range(0, len(data), step)
    )


def run(corpus, tokenizer, out, **flags) -> dict:
    prepare.main(
        prepare.Args(input=(str(corpus),), tokenizer=tokenizer, out=out, **{"workers": 1, **flags})
    )
    return artifact.read_manifest(out, "corpus")


def expected_ids(tokenizer: Path, texts) -> list[list[int]]:
    from tokenizers import Tokenizer

    tok = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    tok.encode_special_tokens = True
    return [[*tok.encode(t, add_special_tokens=False).ids, 0] for t in texts]


def read_with_megatron(prefix: Path) -> list[list[int]]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    assert len(dataset.document_indices) == len(dataset) + 1
    return [dataset[i].tolist() for i in range(len(dataset))]
