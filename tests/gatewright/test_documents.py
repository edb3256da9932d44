"""Shards are found once, read as a stream, split on line feeds only, and named when wrong."""

import gzip
import json
import tracemalloc

import pytest
import zstandard

from gatewright import artifact
from gatewright.documents import BadLines, chunks, documents, find_shards, input_parents, lines
from gatewright.errors import UserError


def test_find_shards(tmp_path):
    for name in ("b.jsonl", "a.jsonl.zst", "sub/c.parquet", "sub/d.jsonl.zstd", "notes.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
    (tmp_path / "odd[1].jsonl").write_bytes(b"")

    def names(*patterns):
        return [str(p.relative_to(tmp_path)) for p in find_shards(patterns, "--input")]

    everything = ["a.jsonl.zst", "b.jsonl", "odd[1].jsonl", "sub/c.parquet", "sub/d.jsonl.zstd"]
    assert names(tmp_path) == everything
    assert names(f"{tmp_path}/**/*.jsonl*", tmp_path)[:3] == everything[:3], "each once"
    assert names(f"{tmp_path}/odd[1].jsonl") == ["odd[1].jsonl"], "a path before a pattern"
    assert names(f"{tmp_path}/*/d.*") == ["sub/d.jsonl.zstd"]
    with pytest.raises(UserError, match=r"--input .*none\*: matches no file"):
        names(f"{tmp_path}/none*")
    with pytest.raises(UserError, match=r"notes\.txt: unknown format"):
        names(f"{tmp_path}/notes.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"holds no \.jsonl"):
        names(tmp_path / "empty")


SEPARATORS = "a\u2028b\u0085c\x0bd\x1ee\rf"


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst", ".zstd"])
def test_lines_end_at_line_feeds_only(tmp_path, suffix):
    rows = [{"text": SEPARATORS}, {"text": "z" * 3_000_000}, {"text": "last"}]
    raw = "\n".join(json.dumps(r, ensure_ascii=False) for r in rows).encode()
    compress = {".gz": gzip.compress, "": bytes}.get(suffix, zstandard.ZstdCompressor().compress)
    path = tmp_path / f"x.jsonl{suffix}"
    path.write_bytes(compress(raw[:1000]) + compress(raw[1000:]))
    assert list(documents(path)) == [r["text"] for r in rows]
    assert [n for n, _ in lines(path)] == [1, 2, 3]


def test_a_position_is_reported_and_reaches_the_end(tmp_path):
    path = tmp_path / "x.jsonl.zst"
    path.write_bytes(zstandard.ZstdCompressor().compress(b'{"text": "x"}\n' * 300_000))
    seen = []
    assert sum(1 for _ in documents(path, consumed=seen.append)) == 300_000
    assert seen == sorted(seen)
    assert seen[-1] == path.stat().st_size


def test_memory_is_bounded_by_the_chunk_not_the_file(tmp_path):
    """40 MB of lines in a few kB of zstd: reading holds a few megabytes."""
    path = tmp_path / "x.jsonl.zst"
    path.write_bytes(zstandard.ZstdCompressor().compress(b'{"text": "' + b"y" * 90 + b'"}\n') * 1)
    frame = zstandard.ZstdCompressor().compress((b'{"text": "' + b"y" * 90 + b'"}\n') * 100_000)
    path.write_bytes(frame * 4)
    tracemalloc.start()
    count = sum(1 for _ in documents(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 400_000
    assert peak < 8 << 20


def test_bad_lines_up_to_a_limit(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": null}\nnope\n{"text": "b"}\n{}\n')
    bad = BadLines(limit=2, flag="--forgive")
    found = documents(path, bad=bad)
    assert [next(found), next(found)] == ["a", "b"]
    with pytest.raises(UserError, match=r"line 6: has no field 'text' \(2 others were skipped\)"):
        next(found)
    assert [b.split(": ", 1)[1] for b in bad.found] == [
        "line 3: has NoneType, not text, in field 'text'",
        "line 4: is not JSON (Expecting value)",
    ]


def test_damaged_files_are_named(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(b"this is no gzip")
    with pytest.raises(UserError, match=r"x\.jsonl\.gz: cannot be read to its end"):
        list(chunks(path))
    with pytest.raises(UserError, match=r"absent\.jsonl: cannot be read"):
        list(documents(tmp_path / "absent.jsonl"))


def test_input_parents_hash_only_what_is_small_or_finished(tmp_path, monkeypatch):
    (tmp_path / "small.jsonl").write_bytes(b"x" * 10)
    (tmp_path / "large.jsonl").write_bytes(b"x" * 100)
    with artifact.create(tmp_path / "done", kind="text") as folder:
        (folder / "a.jsonl").write_bytes(b"x" * 100)
    monkeypatch.setattr("gatewright.documents.HASHED_BYTES", 50)
    given = [tmp_path / n for n in ("small.jsonl", "large.jsonl", "done", "*.jsonl")]
    assert input_parents(given) == {
        "input/0": tmp_path / "small.jsonl",
        "input/2": tmp_path / "done",
    }
