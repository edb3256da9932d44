"""Lines, files, flags and folders that `pretrain.prepare` refuses, and what it leaves."""

import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gatewright.errors import UserError
from pretrain import corpus_shards, prepare
from tests.pretrain.texts import ROOT, Stop, documents, jsonl, run, zstd_frames

BAD = [
    (b"{not json}\n", r"line 2: is not JSON"),
    (b'{"txt": "x"}\n', r"line 2: has no field 'text'"),
    (b'{"text": 5}\n', r"line 2: has int, not text, in field 'text'"),
    (b'["text"]\n', r"line 2: is a JSON list, not an object"),
    (b'{"text": "\xff"}\n', r"line 2: is not UTF-8"),
    (b'{"text": "\\ud800"}\n', r"line 2: has a broken UTF-16 surrogate"),
    (b"[" * 200_000 + b"\n", r"line 2: is not JSON"),
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_a_bad_line_is_named(tokenizer, tmp_path, line, message):
    shard = tmp_path / "in" / "bad.jsonl"
    shard.parent.mkdir()
    good = jsonl(["first"])
    shard.write_bytes(good + line + b"\n" + jsonl(["last"]))
    with pytest.raises(UserError, match=message) as caught:
        run(shard, tokenizer, tmp_path / "c")
    assert str(shard) in str(caught.value)
    assert "--skip-bad-lines N" in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["in"], "nothing half-written"
    extra = run(shard, tokenizer, tmp_path / "c", skip_bad_lines=1)["extra"]
    assert (extra["documents"], extra["bad_lines"]) == (2, 1)
    assert f"{shard}: line 2: " in extra["first_bad_lines"][0]


def test_the_limit_of_bad_lines_counts_over_all_shards(tokenizer, tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_bytes(jsonl(["x"]) + b"{}\n" + b"{}\n")
    pattern = tmp_path / "*.jsonl"
    with pytest.raises(UserError, match=r"4 bad lines, the last .*b\.jsonl: line 3"):
        run(pattern, tokenizer, tmp_path / "c", skip_bad_lines=3)
    assert run(pattern, tokenizer, tmp_path / "c", skip_bad_lines=4)["extra"]["bad_lines"] == 4


def killed_at(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the encoding of one shard end the run."""
    real = corpus_shards.ShardEncoder.encode

    def encode(self, path, index, consumed):
        if path.name == name:
            raise Stop
        return real(self, path, index, consumed)

    monkeypatch.setattr(corpus_shards.ShardEncoder, "encode", encode)


@pytest.mark.parametrize("merged", [True, False], ids=["appended", "finished only"])
@pytest.mark.parametrize("left", ["b", "c", None], ids=["two left", "one left", "none left"])
def test_a_lower_limit_of_bad_lines_holds_for_what_is_done(
    tokenizer, tmp_path, monkeypatch, left, merged
):
    """The shards of a killed run count, whether they were appended or not."""
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.jsonl").write_bytes(b"{}\n" * 3 + jsonl(["x"]))
    for name in "bc":
        (text / f"{name}.jsonl").write_bytes(jsonl(["y"]))
    if not merged:
        monkeypatch.setattr(prepare.Merge, "advance", lambda self: None)
    if left is None:
        monkeypatch.setattr(prepare, "summarise", lambda *a: (_ for _ in ()).throw(Stop))
        if not merged:
            monkeypatch.setattr(prepare, "encode_all", encode_and_stop(prepare.encode_all))
    else:
        killed_at(f"{left}.jsonl", monkeypatch)
    with pytest.raises(Stop):
        run(text, tokenizer, tmp_path / "c", skip_bad_lines=5)
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"3 bad lines, the last .*a\.jsonl: line 3") as caught:
        run(text, tokenizer, tmp_path / "c", skip_bad_lines=2)
    [work] = tmp_path.glob(".c.prepare-*")
    assert f"wait in {work} for the same command" in str(caught.value)
    assert run(text, tokenizer, tmp_path / "c", skip_bad_lines=3)["extra"]["bad_lines"] == 3


def encode_and_stop(real):
    def encode_all(*args):
        real(*args)
        raise Stop

    return encode_all


def test_a_worker_s_bad_line_ends_the_run(tokenizer, tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.jsonl").write_bytes(jsonl(["x"] * 5) + b"{}\n")
    with pytest.raises(UserError, match=r"line 6: has no field 'text'"):
        run(tmp_path, tokenizer, tmp_path / "c", workers=2)


def test_overlong_lines_are_bad_lines(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("gatewright.documents.MAX_LINE_BYTES", 3_000_000)
    (tmp_path / "a.jsonl").write_bytes(
        jsonl(["one"]) + jsonl(["y" * 5_000_000]) + jsonl(["two"]) + jsonl(["z" * 4_000_000])
    )
    extra = run(tmp_path / "a.jsonl", tokenizer, tmp_path / "c", skip_bad_lines=2)["extra"]
    assert extra["documents"] == 2
    assert [b.split(": ", 1)[1] for b in extra["first_bad_lines"]] == [
        "line 2: is longer than 2 MiB",
        "line 4: is longer than 2 MiB",
    ]


def test_a_compressed_file_cut_short_is_an_error(tokenizer, tmp_path):
    shard = tmp_path / "cut.jsonl.zst"
    shard.write_bytes(zstd_frames(jsonl(documents(50)), 2)[:-20])
    with pytest.raises(UserError, match=r"cut\.jsonl\.zst: cannot be read to its end"):
        run(shard, tokenizer, tmp_path / "c")
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "p.parquet")
    with pytest.raises(UserError, match="has no column 'text'; its columns: body"):
        run(tmp_path / "p.parquet", tokenizer, tmp_path / "c")
    (tmp_path / "q.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(UserError, match=r"q\.parquet: cannot be read as parquet"):
        run(tmp_path / "q.parquet", tokenizer, tmp_path / "c")


@pytest.mark.parametrize("content", [b"", jsonl([""])])
def test_a_corpus_without_text_is_refused_and_leaves_nothing(tokenizer, tmp_path, content):
    (tmp_path / "none.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=r"no document with text in .*none\.jsonl"):
        run(tmp_path / "none.jsonl", tokenizer, tmp_path / "c")
    assert [p.name for p in tmp_path.iterdir() if "prepare-" in p.name or p.name == "c"] == []


def test_null_rows_of_parquet_are_bad_rows(tokenizer, tmp_path):
    pq.write_table(pa.table({"text": ["a", None, "b"]}), tmp_path / "p.parquet")
    with pytest.raises(UserError, match=r"p\.parquet: row 2: has no 'text' \(null\)"):
        run(tmp_path / "p.parquet", tokenizer, tmp_path / "c")


def test_bad_flags_end_with_code_2(corpus, tokenizer, tmp_path):
    def stderr(*flags):
        done = subprocess.run(
            [sys.executable, "-m", "pretrain.prepare", *map(str, flags)],
            cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 2, done.stderr
        assert done.stderr.count("\n") == 1
        return done.stderr

    out = ("--out", tmp_path / "c")
    given = ("--input", corpus[0], "--tokenizer", tokenizer)
    assert "matches no file" in stderr(
        "--input", tmp_path / "*.none", "--tokenizer", tokenizer, *out
    )
    assert "unknown format" in stderr("--input", __file__, "--tokenizer", tokenizer, *out)
    assert "no tokenizer.json" in stderr("--input", corpus[0], "--tokenizer", tmp_path, *out)
    assert "did you mean '--workers'" in stderr(*given, *out, "--worker", 2)
    assert "did you mean 'nemotron_cc_hq'" in stderr(*given, *out, "--blend", "nemotron-cc-hq")
    assert "exists: remove it" in stderr(*given, "--out", tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{bad", "is not valid JSON"), ("[]", "is not a JSON object"), ("\xff", "is not valid JSON")],
)
def test_a_damaged_tokenizer_config_is_refused(corpus, tokenizer, tmp_path, content, message):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match=rf"tokenizer_config\.json: {message}"):
        run(corpus[0], folder, tmp_path / "c")


@pytest.mark.parametrize("out", ["file/c", "file/deep/c", "x" * 250, "/proc/none/c"])
def test_an_out_that_cannot_be_made_is_refused(corpus, tokenizer, tmp_path, out):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--out .*: cannot write beside it \("):
        run(corpus[0], tokenizer, tmp_path / out)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
