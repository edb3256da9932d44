"""The index is Megatron's, byte for byte, also where it is longer than one block."""

import os

import numpy as np
import pytest

from gatewright.megatron import indexed
from pretrain import corpus_index
from pretrain.corpus_index import append_file, token_dtype, write_index


@pytest.mark.parametrize("vocab_size", [65_499, 65_500])
@pytest.mark.parametrize("documents", [1, 7, 8, 20])
def test_equals_megatrons_writer(tmp_path, monkeypatch, vocab_size, documents):
    monkeypatch.setattr(corpus_index, "BLOCK", 8)
    dtype = token_dtype(vocab_size)
    assert dtype == (np.uint16 if vocab_size < 65_500 else np.int32)
    lengths = np.random.default_rng(documents).integers(1, 50, documents).astype(np.int32)
    theirs = indexed.builder(str(tmp_path / "theirs"), vocab_size)
    for n in lengths:
        theirs.add_document(list(range(n)), [int(n)])
    theirs.finalize(str(tmp_path / "theirs.idx"))
    lengths.tofile(tmp_path / "len")
    found = write_index(tmp_path / "len", tmp_path / "ours.idx", dtype)
    assert found == (documents, int(lengths.sum()))
    assert (tmp_path / "ours.idx").read_bytes() == (tmp_path / "theirs.idx").read_bytes()


@pytest.mark.parametrize("kernel_copies", [True, False])
def test_append(tmp_path, monkeypatch, kernel_copies):
    real = os.copy_file_range

    def partly(src, dst, n):
        """Move a few bytes, then say that it cannot."""
        if calls:
            raise OSError("not supported")
        calls.append(n)
        return real(src, dst, 3)

    calls = []
    if not kernel_copies:
        monkeypatch.setattr(os, "copy_file_range", partly)
    (tmp_path / "a").write_bytes(b"0123456789")
    (tmp_path / "b").write_bytes(b"abc")
    target = tmp_path / "t"
    assert append_file(tmp_path / "a", target, 0) == 10
    assert append_file(tmp_path / "b", target, 10) == 13
    assert target.read_bytes() == b"0123456789abc"
    assert append_file(tmp_path / "b", target, 4) == 7
    assert target.read_bytes() == b"0123abc"
    (tmp_path / "empty").write_bytes(b"")
    assert append_file(tmp_path / "empty", tmp_path / "new", 0) == 0
    assert (tmp_path / "new").read_bytes() == b""
