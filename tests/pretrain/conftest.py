"""Texts, inputs and a finished run that the tests of this stage share."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gatewright import artifact
from tests.gatewright.megatron import tiny
from tests.pretrain.texts import documents, jsonl, zstd_frames
from tests.pretrain.training import MAMBA, command, finish, start
from tokenizer import train as tokenizer_train


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tokenizer folder and a corpus folder with the manifests that their stages write."""
    from tokenizers import Tokenizer, models

    folder = tmp_path_factory.mktemp("inputs")
    tokenizer, corpus = folder / "tokenizer", folder / "corpus"
    with artifact.create(tokenizer, kind="tokenizer") as tmp:
        vocabulary = {f"t{i}": i for i in range(tiny.VOCAB)}
        Tokenizer(models.WordLevel(vocabulary, unk_token="t0")).save(str(tmp / "tokenizer.json"))
    extra = {"eod_id": tiny.EOD, "unigram_entropy_nats": 5.5, "vocab_size": tiny.VOCAB}
    with artifact.create(
        corpus, kind="corpus", parents={"tokenizer": tokenizer}, extra=extra
    ) as tmp:
        tiny.write_corpus(tmp)
    return {"tokenizer": tokenizer, "corpus": corpus}


@pytest.fixture(scope="session")
def whole(inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted Mamba-2 run."""
    out = tmp_path_factory.mktemp("whole") / "run"
    printed = finish(start(command(inputs, out, MAMBA)))
    assert "final loss" in printed
    assert "unigram entropy of the corpus 5.500" in printed
    return out


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tok") / "tokenizer"
    with artifact.create(folder, kind="tokenizer") as tmp:
        tokenizer_train.write_folder(tokenizer_train.train(iter(documents(400)), 340), tmp)
    return folder


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> tuple[Path, list[str]]:
    """One shard of every format; the documents in the order of the sorted file names."""
    folder = tmp_path_factory.mktemp("text")
    texts = documents(140)
    (folder / "a.jsonl").write_bytes(jsonl(texts[:30]).rstrip(b"\n"))
    (folder / "b.jsonl.gz").write_bytes(
        gzip.compress(jsonl(texts[30:40])) + gzip.compress(jsonl(texts[40:60]))
    )
    (folder / "c.jsonl.zst").write_bytes(zstd_frames(jsonl(texts[60:90]), 5))
    (folder / "d.jsonl.zstd").write_bytes(
        zstd_frames(jsonl([*texts[90:100], "", *texts[100:110]]), 3)
    )
    table = pa.table({"text": texts[110:], "id": list(range(30))})
    pq.write_table(table, folder / "e.parquet", row_group_size=7)
    (folder / "README.md").write_text("not a shard")
    return folder, texts
