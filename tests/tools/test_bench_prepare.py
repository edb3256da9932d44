"""The benchmark's own measuring is right: whose memory, and that both sides must agree."""

import mmap
import os
import subprocess
import sys

import pytest

from tools.benchmarks import prepare


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_a_process_tree():
    before = prepare.tree_bytes(os.getpid())
    block = mmap.mmap(-1, 64 << 20)  # not from malloc, which may have freed memory to hand out
    block.write(b"x" * len(block))
    with_block = prepare.tree_bytes(os.getpid())
    assert 60e6 < with_block - before < 80e6
    code = "x = bytearray(50_000_000); print('ready', flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "ready\n"
    assert prepare.tree_bytes(os.getpid()) - with_block > 45e6
    child.communicate("\n")
    block.close()


def test_a_side_that_fails_stops_the_benchmark():
    with pytest.raises(SystemExit, match="left with code 2"):
        prepare._run("pretrain.prepare", "--no-such-flag")


def test_the_peer_writes_what_we_write(tmp_path):
    """On a few lines, both sides of the benchmark give the same bytes."""
    text, tokenizer = tmp_path / "text", tmp_path / "tokenizer"
    text.mkdir()
    (text / "0.jsonl").write_text(
        "".join(f'{{"text": "The gate number {i} forgets, café “{i}”."}}\n' for i in range(300))
    )
    prepare._run("tokenizer.train", "--corpus", text, "--vocab-size", 280, "--out", tokenizer)
    sides = prepare._Sides(tokenizer, tmp_path, 1)
    _, _, ours = sides.ours(text)
    seconds, peak, peer = sides.peer(text)
    assert seconds > 0
    assert peak > 1e6
    for suffix in (".bin", ".idx"):
        a, b = (side.with_name(side.name + suffix).read_bytes() for side in (ours, peer))
        assert a == b
