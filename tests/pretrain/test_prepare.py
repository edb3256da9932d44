"""Text becomes the tokens that the tokenizer gives, readable by Megatron's own reader."""

import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from gatewright import artifact
from gatewright.errors import UserError
from pretrain import corpus_shards, prepare
from tests.pretrain.texts import (
    ROOT,
    Stop,
    documents,
    expected_ids,
    jsonl,
    read_with_megatron,
    run,
    zstd_frames,
)


def test_megatron_reads_what_the_tokenizer_says(corpus, tokenizer, tmp_path):
    folder, texts = corpus
    extra = run(folder, tokenizer, tmp_path / "c")["extra"]
    want = expected_ids(tokenizer, texts)
    assert read_with_megatron(tmp_path / "c" / "text") == want
    flat = [i for ids in want for i in ids]
    assert extra["tokens"] == len(flat)
    assert extra["documents"] == len(texts)
    assert extra["empty_documents"] == 1
    assert extra["text_bytes"] == sum(len(t.encode()) for t in texts)
    assert (extra["vocab_size"], extra["eod_id"], extra["dtype"]) == (340, 0, "uint16")
    shares = [c / len(flat) for c in Counter(flat).values()]
    entropy = -sum(p * math.log(p) for p in shares)
    assert extra["unigram_entropy_nats"] == pytest.approx(entropy, rel=1e-12)


def test_number_of_workers_and_short_cut_change_nothing(corpus, tokenizer, tmp_path):
    one = run(corpus[0], tokenizer, tmp_path / "1")
    two = run(corpus[0], tokenizer, tmp_path / "2", workers=2)
    slow = run(corpus[0], tokenizer, tmp_path / "3", short_cut=False)
    assert one["content_hash"] == two["content_hash"] == slow["content_hash"]
    assert one["extra"]["shards_without_short_cut"] == 0
    assert slow["extra"]["shards_without_short_cut"] == 5
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_large_vocabularies_are_int32(tokenizer, tmp_path):
    from tokenizers import Tokenizer

    big = tmp_path / "big"
    big.mkdir()
    tok = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    tok.add_tokens([f"<extra {i}>" for i in range(66_000)])
    tok.save(str(big / "tokenizer.json"))
    (big / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|endoftext|>"}}')
    (tmp_path / "t.jsonl").write_bytes(jsonl(["a <extra 65999> b", "c"]))
    extra = run(tmp_path / "t.jsonl", big, tmp_path / "c")["extra"]
    assert (extra["dtype"], extra["vocab_size"]) == ("int32", 66_340)
    found = read_with_megatron(tmp_path / "c" / "text")
    assert 66_339 in found[0]
    assert found[1][-1] == 0


def partitioned(folder: Path) -> dict[str, list[str]]:
    texts = {}
    for n, (name, path) in enumerate(
        {
            "high-actual": "quality=high/kind=actual/kind2=actual",
            "high-diverse_qa_pairs": "quality=high/kind=synthetic/kind2=diverse_qa_pairs",
            "high-distill": "quality=high/kind=synthetic/kind2=distill",
            "low-actual": "quality=low/kind=actual/kind2=actual",
        }.items()
    ):
        (folder / path).mkdir(parents=True)
        texts[name] = documents(12 + n, start=100 * n)
        for i in range(2):
            shard = folder / path / f"CC-MAIN-2024-10-part-0000{i}.jsonl.zstd"
            shard.write_bytes(zstd_frames(jsonl(texts[name][i::2]), 2))
    return texts


def test_named_blend_of_nemotron_cc(tokenizer, tmp_path):
    texts = partitioned(tmp_path / "data")
    extra = run(
        tmp_path / "data", tokenizer, tmp_path / "c", blend="nemotron_cc_hq", workers=2,
        weights=("high-diverse_qa_pairs=2",),
    )["extra"]  # fmt: skip
    assert sorted(p.name for p in (tmp_path / "c").glob("*.bin")) == [
        "high-actual.bin",
        "high-diverse_qa_pairs.bin",
    ]
    count = Counter()
    shares = {}
    for name, weight in (("high-actual", 1), ("high-diverse_qa_pairs", 2)):
        want = expected_ids(tokenizer, texts[name][::2] + texts[name][1::2])
        assert read_with_megatron(tmp_path / "c" / name) == want
        for ids in want:
            count.update({i: weight * c for i, c in Counter(ids).items()})
        shares[name] = weight * sum(map(len, want))
    total = sum(shares.values())
    assert extra["blend"] == pytest.approx({n: s / total for n, s in shares.items()})
    entropy = -sum(c / total * math.log(c / total) for c in count.values())
    assert extra["unigram_entropy_nats"] == pytest.approx(entropy, rel=1e-12)


def test_partitions_may_be_called_by_numbers(tokenizer, tmp_path):
    """As the shards of the work folder are."""
    texts = {name: documents(20, start=100 * int(name)) for name in "0123"}
    for name, written in texts.items():
        (tmp_path / "data" / name).mkdir(parents=True)
        for i in range(2):
            (tmp_path / "data" / name / f"{i}.jsonl").write_bytes(jsonl(written[i::2]))
    run(tmp_path / "data", tokenizer, tmp_path / "c", blend="partitions")
    for name, written in texts.items():
        want = expected_ids(tokenizer, written[::2] + written[1::2])
        assert read_with_megatron(tmp_path / "c" / name) == want


def test_partitions_of_v2_are_folders(tokenizer, tmp_path):
    for name in ("High-Quality", "Diverse-QA", "Medium-Quality"):
        (tmp_path / "v2" / name).mkdir(parents=True)
        pq.write_table(
            pa.table({"text": documents(9)}), tmp_path / "v2" / name / "part_000000.parquet"
        )
    extra = run(tmp_path / "v2", tokenizer, tmp_path / "c", blend="nemotron_cc_hq")["extra"]
    assert sorted(extra["parts"]) == ["Diverse-QA", "High-Quality"]
    extra = run(tmp_path / "v2", tokenizer, tmp_path / "d", blend="partitions")["extra"]
    assert extra["documents"] == 27
    with pytest.raises(UserError, match="holds no shard of Diverse-QA"):
        run(tmp_path / "v2" / "High-Quality", tokenizer, tmp_path / "e", blend="nemotron_cc_hq")
    with pytest.raises(UserError, match="did you mean 'High-Quality'"):
        run(
            tmp_path / "v2",
            tokenizer,
            tmp_path / "e",
            blend="partitions",
            weights=("high-quality=1",),
        )


@pytest.mark.parametrize("stop_after", [1, 3, 5])
def test_a_failed_run_continues_at_the_shard(corpus, tokenizer, tmp_path, monkeypatch, stop_after):
    whole = run(corpus[0], tokenizer, tmp_path / "whole")
    encoded = []
    real = corpus_shards.ShardEncoder.encode

    def counting(self, path, index, consumed):
        if len(encoded) == stop_after:
            raise Stop
        encoded.append(index)
        return real(self, path, index, consumed)

    monkeypatch.setattr(corpus_shards.ShardEncoder, "encode", counting)
    if stop_after < 5:
        with pytest.raises(Stop):
            run(corpus[0], tokenizer, tmp_path / "c")
    else:  # all shards are there, and the end of the run fails
        monkeypatch.setattr(prepare.Merge, "publish", lambda *a: (_ for _ in ()).throw(Stop))
        with pytest.raises(Stop):
            run(corpus[0], tokenizer, tmp_path / "c")
        monkeypatch.undo()
        monkeypatch.setattr(corpus_shards.ShardEncoder, "encode", counting)
    assert not (tmp_path / "c").exists()
    stop_after = 99
    again = run(corpus[0], tokenizer, tmp_path / "c")
    assert encoded == [0, 1, 2, 3, 4], "each shard once"
    assert again["content_hash"] == whole["content_hash"]


def test_a_torn_append_is_cut_back(corpus, tokenizer, tmp_path, monkeypatch):
    """The process dies between the bytes of a shard and the commit that counts them."""
    whole = run(corpus[0], tokenizer, tmp_path / "whole")
    real = artifact.write_json

    def dying(path, value):
        if path.name == "commit.json" and value["text"]["shards"] == 3:
            with open(path.parent / "part-text.bin", "ab") as f:
                f.write(b"half of the next shard")
            raise Stop
        real(path, value)

    monkeypatch.setattr(artifact, "write_json", dying)
    with pytest.raises(Stop):
        run(corpus[0], tokenizer, tmp_path / "c")
    monkeypatch.undo()
    assert run(corpus[0], tokenizer, tmp_path / "c")["content_hash"] == whole["content_hash"]


def test_changed_input_is_not_continued(corpus, tokenizer, tmp_path, monkeypatch):
    source = tmp_path / "in"
    source.mkdir()
    for name in "ab":
        (source / f"{name}.jsonl").write_bytes(jsonl(documents(10)))
    monkeypatch.setattr(prepare.Merge, "publish", lambda *a: (_ for _ in ()).throw(Stop))
    with pytest.raises(Stop):
        run(source, tokenizer, tmp_path / "c")
    monkeypatch.undo()
    (source / "a.jsonl").write_bytes(jsonl(documents(5, start=50)))
    run(source, tokenizer, tmp_path / "c")
    want = expected_ids(tokenizer, documents(5, start=50) + documents(10))
    assert read_with_megatron(tmp_path / "c" / "text") == want
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "in"]


def test_kill_9_and_again(tokenizer, tmp_path):
    """A real kill of a run with two workers, in the middle; the orphans leave too."""
    source = tmp_path / "in"
    source.mkdir()
    data = jsonl(documents(4000))
    for i in range(8):
        (source / f"{i}.jsonl").write_bytes(data)
    command = [
        sys.executable, "-m", "pretrain.prepare", "--input", str(source),
        "--tokenizer", str(tokenizer), "--out", str(tmp_path / "c"), "--workers", "2",
    ]  # fmt: skip
    killed = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob(".c.prepare-*/commit.json")):
        assert killed.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not (tmp_path / "c").exists()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "continuing: " in done.stdout
    one = expected_ids(tokenizer, documents(4000))
    found = np.fromfile(tmp_path / "c" / "text.bin", dtype=np.uint16)
    assert found.tolist() == [i for ids in one for i in ids] * 8


def test_two_runs_of_one_folder_are_refused(corpus, tokenizer, tmp_path):
    code = (
        "import sys, time, pathlib; from pretrain.prepare import only_one\n"
        f"with only_one(pathlib.Path({str(tmp_path / 'c')!r})):\n"
        "    print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match="another run is preparing it"):
            run(corpus[0], tokenizer, tmp_path / "c")
        other.kill()
    run(corpus[0], tokenizer, tmp_path / "c")


def test_a_dead_worker_is_noticed(corpus, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(
        corpus_shards.ShardEncoder, "encode", lambda *a: os.kill(os.getpid(), signal.SIGKILL)
    )
    with pytest.raises(RuntimeError, match="a worker died .exit code -9"):
        run(corpus[0], tokenizer, tmp_path / "c", workers=2)


def test_memory_does_not_grow_with_the_input(tokenizer, tmp_path):
    """Peak memory of a process that prepares 1 MB of text in one shard, and 10 MB."""
    block = zstandard.ZstdCompressor().compress(jsonl(documents(10_000)))
    code = (
        "import resource, sys; from pathlib import Path; from pretrain import prepare\n"
        "prepare.main(prepare.Args(input=(sys.argv[1],), tokenizer=Path(sys.argv[2]),"
        " out=Path(sys.argv[3]), workers=1))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    peaks, sizes = [], []
    for times in (1, 10):
        shard, out = tmp_path / f"{times}.jsonl.zst", tmp_path / f"c{times}"
        shard.write_bytes(block * times)
        command = [sys.executable, "-c", code, str(shard), str(tokenizer), str(out)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout.split()[-1]) / 1024)
        sizes.append(artifact.read_manifest(out)["extra"]["text_bytes"] / 1e6)
    assert sizes[1] == pytest.approx(10 * sizes[0])
    assert sizes[0] > 0.5
    assert peaks[1] - peaks[0] < 8, (peaks, sizes)
