"""Take any Hugging Face tokenizer folder as this pipeline's tokenizer.

    python -m tokenizer.adopt --from ~/models/SmolLM2 --template ours --out runs/tokenizer

Its vocabulary stays.  Its own chat template stays too if it marks the assistant's spans with
`{% generation %}`; otherwise `--template ours` puts the template of `gatewright.chat` in its
place and adds the tokens that it needs.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from gatewright import artifact, cli
from gatewright.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PROBE_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather.now",
            "description": "Returns the weather of a place.",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string", "description": "Name of the place."}},
                "required": ["place"],
            },
        },
    }
]
PROBE_CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "You are helpful."},
    {"role": "user", "content": "How is the weather in Zürich?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "type": "function",
                "function": {"name": "weather.now", "arguments": {"place": "Zürich"}},
            }
        ],
    },
    {"role": "tool", "content": '{"sky": "clear"}'},
    {"role": "assistant", "content": "The sky is clear."},
]


@dataclasses.dataclass(frozen=True)
class Args:
    """Flags of `python -m tokenizer.adopt`."""

    from_: Annotated[Path, tyro.conf.arg(name="from")]
    """Folder of the tokenizer (or of a model that carries one)."""
    out: Path
    """Folder to make."""
    template: Literal["own", "ours"] = "own"
    """own keeps the folder's chat template, which must mark assistant spans; ours replaces it."""


def install_ours(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Give a tokenizer our chat template; return the tokens that had to be added."""
    from tokenizers import AddedToken

    from gatewright.chat import PAD, STRUCTURE_TOKENS, TEMPLATE, TURN_END, TURN_START

    known = tokenizer.get_vocab()
    needed = [TURN_START, TURN_END, *STRUCTURE_TOKENS]
    if tokenizer.pad_token_id is None:
        needed.append(PAD)
    missing = [t for t in needed if t not in known]
    tokenizer.add_tokens(
        [AddedToken(t, special=t not in STRUCTURE_TOKENS, normalized=False) for t in missing]
    )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = PAD
    tokenizer.chat_template = TEMPLATE
    return missing


def check(tokenizer: PreTrainedTokenizerFast, source: Path) -> dict[str, Any]:
    """Draw a chat with a call, read the call back, and return what was learned.

    Raises:
        UserError: the template marks no spans, leaves out the tools or the call, or marks
            tokens that are not the assistant's.
    """
    from gatewright.chat import Renderer

    if tokenizer.eos_token_id is None:
        raise UserError(f"--from {source}: has no end-of-sequence token; set eos_token in it")
    renderer = Renderer(tokenizer)
    if not renderer.has_spans:
        raise UserError(
            f"--from {source}: its chat template has no {{% generation %}} spans; "
            "take ours with --template ours"
        )
    encoded = renderer.encode(PROBE_CHAT, PROBE_TOOLS)
    spans = [
        tokenizer.decode(ids, skip_special_tokens=False)
        for ids in masked_runs(encoded.input_ids, encoded.assistant_mask)
    ]
    first = renderer.parse(spans[0]) if spans else None
    wanted = {"place": "Zürich"}
    if (
        len(spans) != 2
        or first is None
        or [(c.name, c.arguments) for c in first.calls] != [("weather.now", wanted)]
        or not spans[1].strip().startswith("The sky is clear.")
    ):
        raise UserError(
            f"--from {source}: its chat template does not mark exactly the assistant's calls and "
            "answers; take ours with --template ours"
        )
    if "Returns the weather" not in renderer.prompt(PROBE_CHAT[:2], PROBE_TOOLS):
        raise UserError(
            f"--from {source}: its chat template leaves the tools out; take --template ours"
        )
    return {
        "vocab_size": len(tokenizer),
        "eod_id": tokenizer.eos_token_id,
        "chat_style": renderer.style,
        "stop_ids": renderer.stop_ids,
    }


def masked_runs(ids: list[int], mask: list[int]) -> list[list[int]]:
    """Return the ids of each unbroken run of ones in a mask."""
    runs: list[list[int]] = []
    before = 0
    for token, on in zip(ids, mask, strict=True):
        if on:
            if not before:
                runs.append([])
            runs[-1].append(token)
        before = on
    return runs


def main(args: Args) -> None:
    """Take a Hugging Face tokenizer folder as it is, with a chat template that can train."""
    from gatewright.chat.renderer import load_tokenizer

    tokenizer = load_tokenizer(args.from_)
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(f"--from {args.from_}: is not a fast tokenizer (no tokenizer.json)")
    extra: dict[str, Any] = {}
    with artifact.create(
        args.out, kind="tokenizer", config=args, parents={"from": args.from_}, extra=extra
    ) as folder:
        added = install_ours(tokenizer) if args.template == "ours" else []
        extra.update(check(tokenizer, args.from_), added_tokens=added)
        tokenizer.save_pretrained(str(folder))
    print(
        f"{args.out}: {extra['vocab_size']} tokens, {extra['chat_style']} calls"
        + (f", {len(added)} tokens added: {' '.join(added)}" if added else "")
    )
    if added:
        print("a model of this vocabulary needs its embedding resized to the new size")


if __name__ == "__main__":
    cli.run(main, Args, prog="python -m tokenizer.adopt")
