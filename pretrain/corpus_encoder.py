"""Text to token bytes, much faster than one call of the tokenizer per document.

A byte-level BPE cuts a text into pieces with a regular expression and then encodes each piece
by itself.  English repeats its pieces, so the tokens of a piece are kept as bytes and a
document becomes `b"".join(map(cached, pattern.findall(text)))`: no list of Python integers,
no offsets, no alignment.  The tokenizer itself is asked only for pieces that are new.

The pattern is run by the `regex` package (on ASCII text by `re`) instead of the tokenizer's
Oniguruma.  They could differ in which rare characters they call letters, so a document with
characters outside long-settled blocks, or with an added token written in it, or any document
of a tokenizer that is built otherwise, goes through the tokenizer.  Every `CHECK_EVERY`-th
document goes both ways and must agree, or the shard is encoded anew without the short cut.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gatewright.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CHECK_EVERY = 512
MAX_CACHED = 1 << 18
"""Pieces kept per process, about 60 MB; then the cache starts anew."""
MAX_PIECE_CHARS = 64
"""Longer pieces are seldom met twice."""
LONG_CHARS = 1 << 20
"""Longer documents are encoded in parts, so that memory stays bounded."""

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Latin with its extensions (without the long s, which folds to s), punctuation, Greek,
# Cyrillic, currency, arrows, mathematics, boxes, kana and the older ideographs: blocks whose
# letters and digits no Unicode version of this decade has moved.
_UNSETTLED = re.compile(
    "[^\x00-\x1b\x20-\u017e\u0180-\u024f\u0391-\u03a1\u03a3-\u03ce\u0410-\u044f"
    "\u2010-\u2027\u2030-\u205e\u20a0-\u20bf\u2190-\u23ff\u2500-\u27bf"
    "\u3001-\u3003\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uff01-\uff0f\U0001f300-\U0001f64f]"
)


class ShortCutError(Exception):
    """The short cut gave other tokens than the tokenizer."""


def load(folder: Path) -> tuple[Tokenizer, int, int]:
    """Return the tokenizer of a folder, its vocabulary size and its end-of-document id.

    Raises:
        UserError: no fast tokenizer there, or no end-of-document token in it.
    """
    from tokenizers import Tokenizer

    from gatewright.chat.template import end_of_document

    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"--tokenizer {folder}: holds no tokenizer.json; see tokenizer.adopt")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as e:
        raise UserError(f"--tokenizer {path}: cannot be read ({e})") from e
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # A document that writes "<|endoftext|>" out does not end there.
    tokenizer.encode_special_tokens = True
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    eos: Any = None
    config = Path(folder) / "tokenizer_config.json"
    if config.is_file():
        try:
            settings = json.loads(config.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as e:
            raise UserError(f"--tokenizer {config}: is not valid JSON ({e}); mend it") from e
        if not isinstance(settings, dict):
            raise UserError(f"--tokenizer {config}: is not a JSON object; mend it")
        eos = settings.get("eos_token")
        eos = eos.get("content") if isinstance(eos, dict) else eos
    eod = end_of_document(vocab, eos)
    if eod is None:
        raise UserError(f"--tokenizer {folder}: has no end-of-document token; set its eos_token")
    return tokenizer, max(vocab.values()) + 1, eod


def _piece_pattern(spec: dict[str, Any]) -> str | None:
    """Return the pattern that cuts pieces, or None for a tokenizer that is built otherwise."""
    pre, model, normalizer = spec["pre_tokenizer"], spec["model"], spec["normalizer"]
    if model["type"] != "BPE" or model.get("dropout") or pre is None:
        return None
    if normalizer is not None and normalizer["type"] != "NFC":
        return None
    steps = pre["pretokenizers"] if pre["type"] == "Sequence" else [pre]
    last = steps[-1]
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return None
    if len(steps) == 1 and last.get("use_regex", True):
        return GPT2_PATTERN
    if len(steps) == 2 and steps[0]["type"] == "Split" and not last.get("use_regex", True):
        split = steps[0]
        if split["behavior"] == "Isolated" and not split["invert"]:
            return split["pattern"].get("Regex")
    return None


def ascii_pattern(pattern: str) -> re.Pattern[str] | None:
    """Return what a pattern comes to on ASCII text, for the standard library's `re`.

    `re` runs it twice as fast, but knows neither `\\p{L}` nor `\\p{N}`; on ASCII text those are
    A-Z, a-z and 0-9.  None if the pattern holds other properties or anything else `re` refuses.
    """
    out, in_class, at = [], False, 0
    while at < len(pattern):
        ranges = {r"\p{L}": "A-Za-z", r"\p{N}": "0-9"}.get(pattern[at : at + 5])
        if ranges is not None:
            out.append(ranges if in_class else f"[{ranges}]")
            at += 5
            continue
        width = 2 if pattern[at] == "\\" else 1
        piece = pattern[at : at + width]
        if piece in (r"\p", r"\P") or (piece == "[" and in_class):
            return None
        in_class = (in_class or piece == "[") and piece != "]"
        out.append(piece)
        at += width
    try:
        return re.compile("".join(out), re.ASCII)
    except re.error:
        return None


class _Pieces(dict[str, bytes]):
    """Token bytes by piece; a missing piece is encoded by the model and kept."""

    def __init__(self, tokenizer: Tokenizer, dtype: np.dtype) -> None:
        from tokenizers.pre_tokenizers import ByteLevel

        super().__init__()
        self._model = tokenizer.model
        self._spelled = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
        self._dtype = dtype

    def __missing__(self, piece: str) -> bytes:
        tokens = self._model.tokenize(self._spelled(piece)[0][0])
        found = np.array([t.id for t in tokens], dtype=self._dtype).tobytes()
        if len(piece) <= MAX_PIECE_CHARS:
            if len(self) >= MAX_CACHED:
                self.clear()
            self[piece] = found
        return found


def _parts(text: str) -> Iterator[str]:
    """Cut a very long text after line breaks (or anywhere, if it has none)."""
    start = 0
    while len(text) - start > LONG_CHARS:
        cut = text.rfind("\n", start + 1, start + LONG_CHARS) + 1 or start + LONG_CHARS
        yield text[start:cut]
        start = cut
    yield text[start:]


class Encoder:
    """Encodes documents of one shard.

    Args:
        tokenizer: from `load`.
        dtype: u16 or i32.
        short_cut: False sends every document through the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, dtype: np.dtype, *, short_cut: bool = True) -> None:
        self._tokenizer = tokenizer
        self._dtype = dtype
        spec = json.loads(tokenizer.to_str())
        pattern = _piece_pattern(spec) if short_cut else None
        self._nfc = spec["normalizer"] is not None
        added = [t["content"] for t in spec["added_tokens"] if not t["special"]]
        self._added = re.compile("|".join(map(re.escape, added)) or r"(?!)")
        self._findall: Callable[[str], list[str]] | None = None
        if pattern is not None:
            import regex

            compiled = regex.compile(pattern)
            if not compiled.groups:
                self._findall = compiled.findall
                narrow = ascii_pattern(pattern)
                self._findall_ascii = compiled.findall if narrow is None else narrow.findall
                self._pieces = _Pieces(tokenizer, dtype)
        self._count = 0

    @property
    def has_short_cut(self) -> bool:
        return self._findall is not None

    def _slow(self, text: str) -> bytes:
        return b"".join(
            np.array(
                self._tokenizer.encode(part, add_special_tokens=False).ids, dtype=self._dtype
            ).tobytes()
            for part in _parts(text)
        )

    def _settled(self, text: str) -> bool:
        return (
            not _UNSETTLED.search(text)
            and not self._added.search(text)
            and (not self._nfc or unicodedata.is_normalized("NFC", text))
        )

    def encode(self, text: str) -> bytes:
        """Return a document's tokens as bytes of `dtype`, without an end-of-document token.

        Raises:
            ShortCutError: a checked document came out differently from the tokenizer.
        """
        if self._findall is None or not self._settled(text):
            return self._slow(text)
        get = self._pieces.__getitem__
        findall = self._findall_ascii if text.isascii() else self._findall
        out = []
        for part in _parts(text):
            pieces = findall(part)
            if sum(map(len, pieces)) != len(part):  # the pattern leaves something out
                return self._slow(text)
            out.append(b"".join(map(get, pieces)))
        tokens = out[0] if len(out) == 1 else b"".join(out)
        if self._count % CHECK_EVERY == 0 and tokens != self._slow(text):
            raise ShortCutError
        self._count += 1
        return tokens
