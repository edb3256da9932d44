"""Our chat template and the tokens it is built from.

A chat is drawn like this (ChatML turns; assistant spans, on which the loss falls, in `[ ]`):

    <|im_start|>system
    You can call these functions:
    <tools>
    {"name": "add", "description": "Adds two numbers.", "parameters": {...}}
    </tools>
    To call one, write its name and arguments as JSON: ...<|im_end|>
    <|im_start|>user
    What is 2 + 3?<|im_end|>
    <|im_start|>assistant
    [<tool_call>
    {"name": "add", "arguments": {"a": 2, "b": 3}}
    </tool_call><|im_end|>]
    <|im_start|>user
    <tool_response>
    5
    </tool_response><|im_end|>
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

END_OF_DOCUMENT = "<|endoftext|>"
PAD = "<|pad|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"

CONTROL_TOKENS = [END_OF_DOCUMENT, PAD, TURN_START, TURN_END]
"""Special tokens: dropped by `decode(skip_special_tokens=True)`."""

STRUCTURE_TOKENS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
"""Single tokens that survive decoding, because the parser reads them."""

SPECIAL_TOKENS = CONTROL_TOKENS + STRUCTURE_TOKENS
"""Everything a tokenizer of ours holds besides BPE pieces, in order of token id."""

TEMPLATE: str = (Path(__file__).parent / "template.jinja").read_text(encoding="utf-8")
"""Jinja source, in the dialect of transformers' `apply_chat_template`."""


def end_of_document(vocab: Mapping[str, int], eos_token: str | None) -> int | None:
    """Return the id of the token that ends a document of pretraining text.

    A chat model's end-of-sequence token often ends a turn instead, so the customary names
    come first, and `eos_token` only if the vocabulary has none of them.
    """
    for name in (END_OF_DOCUMENT, "<|end_of_text|>", eos_token):
        if name is not None and name in vocab:
            return vocab[name]
    return None
