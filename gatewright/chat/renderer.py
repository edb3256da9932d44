"""From messages and tools to token ids, with the assistant's own tokens marked."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gatewright.chat.bounded_json import JSONError, read_value
from gatewright.chat.parser import Parsed, parse_calls
from gatewright.chat.template import STRUCTURE_TOKENS
from gatewright.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Message = Mapping[str, Any]
Tool = Mapping[str, Any]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE_ANSWER = "Probe answer."
# Llama 3.1 templates write a date into the prompt, today's unless told: a prompt must not
# change overnight.
_FIXED = {"date_string": "26 Jul 2024"}

_TEMPLATE_SLIPS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""What a template's own expressions raise: `|items` of a list, a number added to text."""


@dataclasses.dataclass(frozen=True)
class Encoded:
    """One chat as tokens; both lists have one entry per token.

    `assistant_mask` is 1 on the tokens that the assistant writes (its end-of-turn token
    included) and 0 elsewhere.
    """

    input_ids: list[int]
    assistant_mask: list[int]


def template_style(template: str) -> str:
    """Return the call style that a chat template writes: hermes, llama3 or nemotron."""
    if "<TOOLCALL>" in template:
        return "nemotron"
    if "<tool_call>" in template:
        return "hermes"
    if "ipython" in template or "<|python_tag|>" in template:
        return "llama3"
    return "hermes"


class Renderer:
    """Draws chats with a tokenizer's own chat template.

    Messages and tools are in OpenAI's form: roles `system`, `user`, `assistant` (with
    `tool_calls`, arguments as dict or JSON string) and `tool`; tools as
    `{"type": "function", "function": {"name", "description", "parameters"}}`.

    A special token written out in a message ("<|im_end|>") could end a turn that its author
    never owned, so it is taken apart by a space after its first character.

    Args:
        tokenizer: a fast Hugging Face tokenizer with a chat template.
        reasoning: draw `reasoning_content` too (our template: `<think>` in the assistant span).
        template_kwargs: further variables for the template.

    Raises:
        UserError: the tokenizer has no chat template, or is not a fast one.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        reasoning: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        source = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
        if not getattr(tokenizer, "is_fast", False):
            raise UserError(f"{source}: is not a fast tokenizer (no tokenizer.json); convert it")
        if not tokenizer.chat_template:
            raise UserError(
                f"{source}: has no chat template; tokenizer.adopt --template ours adds one"
            )
        self.tokenizer = tokenizer
        self.source = str(source)
        self.reasoning = reasoning
        self.template: str = tokenizer.get_chat_template(None, [{}])
        self.style = template_style(self.template)
        self.has_spans = bool(_GENERATION.search(self.template))
        self._kwargs = {
            **tokenizer.special_tokens_map,
            **_FIXED,
            "render_reasoning": reasoning,
            **(template_kwargs or {}),
        }
        special = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
        self._control = _alternatives(special)
        self._control_and_structure = _alternatives([*special, *STRUCTURE_TOKENS])
        self._stop_ids: list[int] | None = None

    @classmethod
    def load(cls, path: Path | str, **kwargs: Any) -> Renderer:
        """Return a renderer for a tokenizer or model folder.

        Raises:
            UserError: the folder holds no tokenizer that transformers can load, or one
                without a chat template.
        """
        return cls(load_tokenizer(Path(path)), **kwargs)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> str:
        """Return the text up to where the assistant's next turn begins."""
        return self._render(messages, tools, prompt=True)[0]

    def prompt_ids(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None
    ) -> list[int]:
        """Return the token ids of `prompt`."""
        return list(self._tokenize(self.prompt(messages, tools))["input_ids"])

    def encode(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> Encoded:
        """Return a whole chat as tokens, the assistant's marked.

        Raises:
            UserError: the template marks no assistant spans, or it refuses the chat.
        """
        if not self.has_spans:
            raise UserError(
                f"{self.source}: its chat template has no {{% generation %}} spans, so the "
                "assistant's tokens are unknown; python -m tokenizer.adopt --template ours "
                "gives it one that has"
            )
        text, spans = self._render(messages, tools, prompt=False)
        out = self._tokenize(text, return_offsets_mapping=True)
        return Encoded(list(out["input_ids"]), overlap_mask(out["offset_mapping"], spans))

    def parse(self, text: str) -> Parsed:
        """Read the tool calls of a generated text in this template's style."""
        return parse_calls(text, self.style)

    @property
    def stop_ids(self) -> list[int]:
        """Tokens that end an answer: the one the template puts after it, and end-of-sequence."""
        if self._stop_ids is None:
            chat = [
                {"role": "user", "content": "Probe question."},
                {"role": "assistant", "content": _PROBE_ANSWER},
            ]
            text = self._render(chat, None, prompt=False)[0]
            after = self._tokenize(text[text.rindex(_PROBE_ANSWER) + len(_PROBE_ANSWER) :])
            special = set(self.tokenizer.all_special_ids) | {
                i for i, t in self.tokenizer.added_tokens_decoder.items() if t.special
            }
            ends = [i for i in after["input_ids"] if i in special][:1]
            # Llama 3 ends a turn that calls a tool with another token than one that does not.
            ends.append(self.tokenizer.get_vocab().get("<|eom_id|>"))
            ends.append(self.tokenizer.eos_token_id)
            self._stop_ids = [i for i in dict.fromkeys(ends) if i is not None]
        return list(self._stop_ids)

    def _tokenize(self, text: str, **kwargs: Any) -> Any:
        return self.tokenizer(
            text, add_special_tokens=False, return_attention_mask=False, verbose=False, **kwargs
        )

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, *, prompt: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text and the character spans that the assistant wrote."""
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        track = self.has_spans and not prompt
        plain_messages = [self._plain_message(m) for m in messages]
        plain_tools = [_defuse(dict(t), self._control_and_structure) for t in tools or ()]
        try:
            rendered, spans = render_jinja_template(
                conversations=[plain_messages],
                tools=plain_tools or None,
                chat_template=self.template,
                return_assistant_tokens_mask=track,
                add_generation_prompt=prompt,
                **self._kwargs,
            )
        except (TemplateError, *_TEMPLATE_SLIPS) as e:
            raise UserError(f"{self.source}: its chat template refuses this chat: {e}") from e
        return rendered[0], list(spans[0]) if track else []

    def _plain_message(self, message: Message) -> dict[str, Any]:
        """Return a message with arguments as objects, no null fields and no live tokens."""
        out = {k: v for k, v in message.items() if v is not None}
        if not self.reasoning:
            out.pop("reasoning_content", None)
        if out.get("tool_calls"):
            out["tool_calls"] = [_with_arguments(call) for call in out["tool_calls"]]
        assistant = out.get("role") == "assistant"
        out = _defuse(out, self._control if assistant else self._control_and_structure)
        # Templates concatenate content; an assistant that only calls tools has none.
        out.setdefault("content", "")
        return out


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Return the Hugging Face tokenizer in a folder; no code of the folder is run.

    Raises:
        UserError: there is no folder, or no tokenizer in it that can be loaded.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder (a tokenizer or model folder is needed)")
    if not any((folder / f).is_file() for f in ("tokenizer.json", "tokenizer.model")):
        raise UserError(f"{folder}: holds no tokenizer (no tokenizer.json)")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"{folder}: its tokenizer cannot be loaded ({e})") from e


def overlap_mask(offsets: Iterable[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[int]:
    """Return 1 for each token that overlaps a span, 0 for the others.

    Args:
        offsets: (start, end) characters of each token, in order.
        spans: (start, end) characters of each span, in order and disjoint.
    """
    mask: list[int] = []
    i = 0
    for start, end in offsets:
        while i < len(spans) and start >= spans[i][1]:
            i += 1
        mask.append(1 if i < len(spans) and end > spans[i][0] else 0)
    return mask


def _alternatives(tokens: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted({t for t in tokens if len(t) > 1}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _defuse(value: Any, live: re.Pattern[str]) -> Any:
    """Return a copy in which every live token inside a string is taken apart by a space."""
    if isinstance(value, str):
        return live.sub(lambda m: f"{m.group()[0]} {m.group()[1:]}", value)
    if isinstance(value, Mapping):
        return {_defuse(k, live): _defuse(v, live) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_defuse(v, live) for v in value]
    return value


def _with_arguments(call: Any) -> dict[str, Any]:
    """Return a tool call whose arguments are an object, read from a JSON string if need be."""
    if not isinstance(call, Mapping):
        raise UserError(f"a tool call must be an object, not a {type(call).__name__}")
    inner = call.get("function", call)
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        raise UserError('a tool call needs a "function" with a "name"')
    arguments = inner.get("arguments")
    if isinstance(arguments, str):
        text = arguments.strip() or "{}"
        try:
            arguments, end = read_value(text)
        except JSONError as e:
            raise UserError(f"arguments of {inner['name']!r} are not JSON: {e}") from e
        if text[end:].strip():
            raise UserError(f"arguments of {inner['name']!r}: text after the JSON value")
    plain = {**inner, "arguments": {} if arguments is None else arguments}
    return {**call, "function": plain} if "function" in call else plain
