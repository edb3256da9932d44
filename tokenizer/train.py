"""Train a byte-level BPE tokenizer on a corpus.

    python -m tokenizer.train --corpus runs/text --vocab-size 8192 --out runs/tokenizer

The result is a Hugging Face tokenizer folder: `tokenizer.json`, `tokenizer_config.json` and
`chat_template.jinja` (the tool-calling template of `gatewright.chat`).  Ids 0 to 7 are the
special tokens, then 256 bytes, then merges in the order in which they were learned.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gatewright import artifact, cli
from gatewright.documents import BadLines, documents, find_shards, input_parents
from gatewright.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Words take the one space or sign before them; digits stand alone, so that numbers are spelled
# the same wherever they occur; line breaks never join what follows, so that a turn's header
# ends in the same token whatever the answer begins with.
PIECES = (
    r"'(?:[sdmt]|ll|ve|re)"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)
BYTES = 256


@dataclasses.dataclass(frozen=True)
class Args:
    """Flags of `python -m tokenizer.train`."""

    corpus: tuple[str, ...]
    """Files, globs or folders: .jsonl, .jsonl.gz, .jsonl.zst(d) or .parquet."""
    vocab_size: int
    """Tokens in all, special tokens and the 256 bytes included."""
    out: Path
    """Folder to make."""
    max_mb: float = 1024.0
    """Megabytes of text to learn from, taken evenly from the start of every shard."""
    text_field: str = "text"
    """JSON key or parquet column that holds a document."""
    skip_bad_lines: int = 0
    """Lines that may be bad (not JSON, no text) before the run stops."""

    def __post_init__(self) -> None:
        from gatewright.chat.template import SPECIAL_TOKENS

        least = BYTES + len(SPECIAL_TOKENS) + 1
        if self.vocab_size < least:
            raise UserError(f"--vocab-size {self.vocab_size}: must be at least {least}")
        if not self.max_mb > 0:
            raise UserError(f"--max-mb {self.max_mb}: give a positive number of megabytes")
        if self.skip_bad_lines < 0:
            raise UserError(f"--skip-bad-lines {self.skip_bad_lines}: give 0 or more")


class Sample:
    """Documents from every shard, up to an equal number of UTF-8 bytes from each.

    A shard that holds less leaves its share to those after it.  `bytes` and `documents`
    count what was yielded.
    """

    def __init__(self, shards: list[Path], max_bytes: int, field: str, bad: BadLines) -> None:
        self.shards, self.max_bytes, self.field, self.bad = shards, max_bytes, field, bad
        self.bytes = 0
        self.documents = 0

    def __iter__(self) -> Iterator[str]:
        for i, shard in enumerate(self.shards):
            share = (self.max_bytes - self.bytes) // (len(self.shards) - i)
            until = self.bytes + share
            for text in documents(shard, field=self.field, bad=self.bad):
                if self.bytes >= until:
                    break
                self.bytes += len(text.encode("utf-8"))
                self.documents += 1
                yield text


def new_tokenizer() -> Tokenizer:
    """Return an untrained byte-level BPE that loses nothing: decode(encode(s)) == s."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    # Offsets keep leading spaces, so that assistant masks are exact.
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def train(texts: Iterator[str], vocab_size: int, show_progress: bool = False) -> Tokenizer:
    """Learn `vocab_size` tokens from documents.

    Raises:
        UserError: the text is too short or uniform to give that many.
    """
    from tokenizers import AddedToken, Tokenizer, pre_tokenizers, trainers

    from gatewright.chat.template import SPECIAL_TOKENS, STRUCTURE_TOKENS

    tokenizer = new_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(t, normalized=False, special=True) for t in SPECIAL_TOKENS],
        show_progress=show_progress,
    )
    tokenizer.train_from_iterator(texts, trainer)
    found = tokenizer.get_vocab_size()
    if found != vocab_size:
        raise UserError(
            f"--vocab-size {vocab_size}: the corpus supports only {found} tokens; "
            "ask for fewer or give more text"
        )
    # The trainer knows only special tokens; those that the parser reads must survive decoding.
    raw = json.loads(tokenizer.to_str())
    for token in raw["added_tokens"]:
        token["special"] = token["content"] not in STRUCTURE_TOKENS
    return Tokenizer.from_str(json.dumps(raw))


def write_folder(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a trained tokenizer and our chat template in the Hugging Face layout."""
    from gatewright.chat.template import END_OF_DOCUMENT, PAD, TEMPLATE

    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_DOCUMENT,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(1e30),  # the field's way to say: no limit of its own
    }
    artifact.write_json(folder / "tokenizer_config.json", config)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def main(args: Args) -> None:
    """Train a byte-level BPE tokenizer with a tool-calling chat template."""
    from gatewright.chat.template import END_OF_DOCUMENT

    shards = find_shards(args.corpus, "--corpus")
    bad = BadLines(args.skip_bad_lines)
    sample = Sample(shards, int(args.max_mb * 1e6), args.text_field, bad)
    parents = input_parents(args.corpus)
    extra: dict[str, Any] = {}
    with artifact.create(
        args.out, kind="tokenizer", config=args, parents=parents, extra=extra
    ) as folder:
        tokenizer = train(iter(sample), args.vocab_size, show_progress=sys.stderr.isatty())
        write_folder(tokenizer, folder)
        extra.update(
            vocab_size=args.vocab_size,
            eod_id=tokenizer.token_to_id(END_OF_DOCUMENT),
            chat_style="hermes",
            documents=sample.documents,
            text_bytes=sample.bytes,
            bad_lines=bad.found,
        )
    print(
        f"{args.out}: {args.vocab_size} tokens learned from {sample.documents} documents, "
        f"{sample.bytes / 1e6:.1f} MB in {len(shards)} shards"
    )
    if bad.found:
        print(f"skipped {len(bad.found)} bad lines, the first: {bad.found[0]}")


if __name__ == "__main__":
    cli.run(main, Args, prog="python -m tokenizer.train")
