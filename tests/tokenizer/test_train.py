"""A trained tokenizer is a Hugging Face tokenizer that loses nothing and can draw chats."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gatewright import artifact
from gatewright.chat import SPECIAL_TOKENS, Renderer
from gatewright.documents import BadLines
from gatewright.errors import UserError
from tokenizer import train

ROOT = Path(__file__).resolve().parents[2]


SAYING = (
    "gates decide what a state remembers, and for how long: 0.95 per token! It's so that strong "
    "gating forgets quickly while weak gating keeps everything, useful or otherwise; between them "
    "lies whichever length of memory the problem wants"
)


def rows(n: int) -> str:
    words = SAYING.split()
    return "".join(
        json.dumps({"text": " ".join(words[(i * 5 + j * j) % len(words)] for j in range(30))})
        + "\n"
        for i in range(n)
    )


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a.jsonl").write_text(rows(40))
    (folder / "b.jsonl").write_text(rows(80))
    return folder


@pytest.fixture(scope="module")
def trained(corpus) -> Path:
    out = corpus.parent / "trained"
    if not out.exists():
        train.main(train.Args(corpus=(str(corpus),), vocab_size=310, out=out))
    return out


def test_loads_with_auto_tokenizer(trained):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(trained)
    assert len(tokenizer) == 310
    assert tokenizer.eos_token == "<|endoftext|>"
    assert tokenizer.pad_token == "<|pad|>"
    assert tokenizer.is_fast
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}],
        tools=[tool],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert '<tools>\n{"name": "f", "parameters": {}}\n</tools>' in text
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.convert_tokens_to_ids(SPECIAL_TOKENS) == list(range(len(SPECIAL_TOKENS)))
    ids = tokenizer("<|im_start|><tool_call>x</tool_call><|im_end|>")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool_call>x</tool_call>"
    assert Renderer.load(trained).style == "hermes"


def test_manifest(trained):
    manifest = artifact.read_manifest(trained, "tokenizer")
    assert manifest["extra"]["vocab_size"] == 310
    assert manifest["extra"]["eod_id"] == 0
    assert manifest["extra"]["documents"] == 120
    assert list(manifest["parents"]) == ["input/0"]


@pytest.fixture(scope="module")
def backend(trained):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(trained / "tokenizer.json"))


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_loses_nothing(backend, text):
    ids = backend.encode(text, add_special_tokens=False).ids
    assert backend.decode(ids, skip_special_tokens=False) == text


def test_digits_stand_alone(backend):
    tokens = backend.encode("12345 and x99").tokens
    assert [t for t in tokens if any(c.isdigit() for c in t)] == list("1234599")


@pytest.mark.parametrize("threads", ["1", "2"])
def test_deterministic(corpus, trained, tmp_path, threads):
    out = tmp_path / "again"
    command = f"-m tokenizer.train --corpus {corpus}/*.jsonl --vocab-size 310 --out {out}"
    subprocess.run(
        [sys.executable, *command.split()],
        cwd=ROOT,
        check=True,
        env=os.environ | {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads},
    )
    assert artifact.read_manifest(out)["content_hash"] == artifact.content_hash(trained)


def test_budget_is_shared_by_the_shards(corpus):
    shards = sorted(corpus.glob("*.jsonl"))
    texts = [[json.loads(x)["text"] for x in s.read_text().splitlines()] for s in shards]
    size = [sum(map(len, t)) for t in texts]
    sample = train.Sample(shards, 2000, "text", BadLines())
    found = list(sample)
    taken = [sum(len(t) for t in found if t in texts[0])]
    assert 2000 <= sample.bytes < 2400
    assert found[0] == texts[0][0]
    assert taken[0] > 900
    assert sample.documents == len(found)
    # A shard with less than its share leaves the rest to the others.
    everything = train.Sample(shards, size[0] + size[1], "text", BadLines())
    assert list(everything) == texts[0] + texts[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"vocab_size": 200}, "--vocab-size 200: must be at least 265"),
        ({"vocab_size": 5000}, "the corpus supports only"),
        ({"max_mb": 0.0}, "--max-mb 0.0"),
        ({"corpus": ("/nonexistent/*.jsonl",)}, "--corpus /nonexistent/.*: matches no file"),
    ],
)
def test_bad_flags(corpus, tmp_path, flags, message):
    with pytest.raises(UserError, match=message):
        train.main(
            train.Args(
                **{"corpus": (str(corpus),), "vocab_size": 300, "out": tmp_path / "x"} | flags
            )
        )
    assert list(tmp_path.iterdir()) == []


def test_a_bad_line_is_named_or_skipped(tmp_path):
    shard = tmp_path / "in.jsonl"
    shard.write_text(rows(50) + '{"no": "text"}\n')
    args = {"corpus": (str(shard),), "vocab_size": 300, "out": tmp_path / "x"}
    with pytest.raises(UserError, match=r"in\.jsonl: line 51: has no field 'text'"):
        train.main(train.Args(**args))
    train.main(train.Args(**args, skip_bad_lines=1))
    assert len(artifact.read_manifest(tmp_path / "x")["extra"]["bad_lines"]) == 1
