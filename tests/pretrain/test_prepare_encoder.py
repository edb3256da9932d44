"""The short cut gives exactly the tokenizer's tokens, for every tokenizer it is used with."""

import random

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from pretrain import corpus_encoder
from pretrain.corpus_encoder import Encoder, ShortCutError, _parts, ascii_pattern
from tokenizer.train import PIECES, train

U16 = np.dtype(np.uint16)
TEXT = [
    "The gate's decay: 0.95 (a_log = -3.5e-2); it won't  forget 1234 things.\n\n\tDone!\r\n",
    "Größe, naïve café — “quoted” … Москва Ελλάς 日本語 テスト x² ½ 🌦",
] * 30
LLAMA3_LIKE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def gpt2_like() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def llama3_like() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_LIKE), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


FRAGMENTS = ["don't", "I'LL", "", "x1", "\n\n", "_a", "²", "é", "e\u0301", "<tool_call>"]
KINDS = {"ours": lambda: train(iter(TEXT), 330), "gpt2": gpt2_like, "llama3": llama3_like}


@pytest.fixture(scope="module", params=list(KINDS))
def tokenizer(request) -> Tokenizer:
    out = KINDS[request.param]()
    out.encode_special_tokens = True
    return out


def same(tokenizer: Tokenizer, encoder: Encoder, text: str) -> None:
    found = np.frombuffer(encoder.encode(text), dtype=U16).tolist()
    assert found == tokenizer.encode(text, add_special_tokens=False).ids, repr(text)


@settings(max_examples=150, deadline=None)
@given(
    texts=st.lists(
        st.text(max_size=30)
        | st.text(st.sampled_from(" \t\n\r'sStlLvE.,-_(){}0123ab"), max_size=40)
        | st.lists(
            st.sampled_from(["don't", "I'LL", "", "x1", "\n\n", "_a", "²", "é", "é", "<tool_call>"])
        ).map(" ".join),
        min_size=1,
        max_size=4,
    )
)
def test_any_text(tokenizer, texts):
    encoder = Encoder(tokenizer, U16)
    assert encoder.has_short_cut
    for text in texts:
        same(tokenizer, encoder, text)


def test_every_settled_character_in_context(tokenizer, monkeypatch):
    """Both regular expression engines agree on every character that may take the short cut."""
    monkeypatch.setattr(corpus_encoder, "CHECK_EVERY", 1 << 60)
    encoder = Encoder(tokenizer, U16)
    encoder._count = 1
    shuffle = random.Random(0)
    settled = [
        chr(c)
        for c in range(0x110000)
        if not 0xD800 <= c < 0xE000 and not corpus_encoder._UNSETTLED.search(chr(c))
    ]
    assert len(settled) > 22_000
    shuffle.shuffle(settled)
    for i in range(0, len(settled), 97):
        block = settled[i : i + 97]
        text = "".join(f"a{c}1 {c}{c}\n{c} 's" for c in block)
        if encoder._nfc:
            text = normalizers.NFC().normalize_str(text)
        if encoder._settled(text):
            same(tokenizer, encoder, text)
    assert len(encoder._pieces) > 10_000, "the short cut was taken"


@settings(max_examples=150, deadline=None)
@given(text=st.text(st.characters(max_codepoint=127), max_size=80))
def test_any_ascii_text(tokenizer, text):
    same(tokenizer, Encoder(tokenizer, U16), text)


def test_ascii_pattern():
    for pattern in (PIECES, corpus_encoder.GPT2_PATTERN, LLAMA3_LIKE):
        narrow = ascii_pattern(pattern)
        assert narrow is not None
        assert narrow.groups == 0
        assert narrow.findall("it's 12") == regex.compile(pattern).findall("it's 12")
    assert ascii_pattern(r"\p{L}[\p{N}_\]\p{L}]").pattern == r"[A-Za-z][0-9_\]A-Za-z]"
    assert ascii_pattern(r"\p{Lu}+") is None
    assert ascii_pattern(r"[\P{L}]") is None
    assert ascii_pattern(r"[a[b]]") is None, "nested sets mean something else to regex"
    assert ascii_pattern(r"(?<name") is None


@pytest.mark.parametrize(
    "change",
    [
        lambda t: setattr(t, "normalizer", normalizers.Lowercase()),
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Whitespace()),
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        lambda t: setattr(
            t,
            "pre_tokenizer",
            pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            ),
        ),
        lambda t: setattr(t.model, "dropout", 0.1),
    ],
)
def test_other_tokenizers_have_no_short_cut(change):
    tokenizer = gpt2_like()
    change(tokenizer)
    encoder = Encoder(tokenizer, U16)
    assert not encoder.has_short_cut
    if not tokenizer.model.dropout:
        same(tokenizer, encoder, "The gate's decay 12 it won't forget.")


def test_added_tokens_stay_whole():
    tokenizer = gpt2_like()
    tokenizer.add_tokens([AddedToken("<call>", special=False)])
    same(tokenizer, Encoder(tokenizer, U16), "a <call> b")
    assert tokenizer.token_to_id("<call>") in tokenizer.encode("a <call> b").ids


def test_a_wrong_short_cut_is_noticed():
    encoder = Encoder(gpt2_like(), U16)
    encoder._pieces[" gate"] = b"\x01\x00"
    with pytest.raises(ShortCutError):
        encoder.encode("the gate")


def test_the_cache_is_bounded(monkeypatch):
    monkeypatch.setattr(corpus_encoder, "MAX_CACHED", 50)
    tokenizer = gpt2_like()
    encoder = Encoder(tokenizer, U16)
    for i in range(300):
        same(tokenizer, encoder, f"w{i} " + "x" * (i % 100))
        assert len(encoder._pieces) <= 50


def test_long_texts_are_cut_at_line_breaks(monkeypatch):
    monkeypatch.setattr(corpus_encoder, "LONG_CHARS", 10)
    assert list(_parts("0123456789")) == ["0123456789"]
    assert list(_parts("abc\ndefg\nhijklmn\nopq")) == ["abc\ndefg\n", "hijklmn\n", "opq"]
    assert list(_parts("x" * 25)) == ["x" * 10, "x" * 10, "x" * 5]
    tokenizer = gpt2_like()
    text = "The gate forgets.\nIt decays.\n" * 5
    slow = Encoder(tokenizer, U16, short_cut=False)
    assert Encoder(tokenizer, U16).encode(text) == slow.encode(text)
    tokenizer.decoder = decoders.ByteLevel()
    assert tokenizer.decode(np.frombuffer(slow.encode(text), dtype=U16).tolist()) == text
