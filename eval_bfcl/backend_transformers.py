"""Greedy generation with transformers: prompts read once, answers written in batches.

The prompts of one question at several pool sizes begin alike and are read together (see
`eval_bfcl.prefill`), one row at a time, so nothing is padded and the last logits are the only
ones computed.  What the model remembers of each prompt waits until enough prompts of similar
length are there, and they are answered as one batch that shrinks as rows finish.  Llama writes
from its key-value cache, which has room for the answer and is never copied, Mamba-2 from its
recurrent state, whose cost per token does not depend on the context.  On a machine without
CUDA, Mamba-2 runs on the project's own kernels.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval_bfcl import prefill
from eval_bfcl.backend import Answer, Failure
from eval_bfcl.prompting import Request
from gatewright import processor
from gatewright.errors import UserError
from gatewright.models import load_hf_model

if TYPE_CHECKING:
    import torch

    from gatewright.chat import Renderer

CONTINUES_EXACTLY = ("mamba2",)
"""Recurrent models that read on from a state as if in one go.

transformers 5.24 does not for all: Bamba's logits move by 0.001.
"""

NO_TOKEN = -1
"""Stands for the next token where the model computed no finite number."""


@dataclasses.dataclass
class Waiting:
    """A prompt that has been read and is to be answered.

    Attributes:
        prompt: its tokens.
        requests: who asked it: more than one if the same prompt stands in several cells.
        first: the first token of the answer, or NO_TOKEN.
        cache: what the model remembers of the prompt.
        tokens: how many of its tokens take memory of their own.
        seconds: how long the reading took.
    """

    prompt: Sequence[int]
    requests: list[Request]
    first: int
    cache: Any
    tokens: int
    seconds: float


class TransformersBackend:
    """A causal language model of transformers, on CUDA if there is a device, else on CPU.

    Args:
        model: the model, in evaluation mode.
        renderer: draws prompts and knows the tokens that end a turn.
        max_new_tokens: limit of new tokens an answer.
        batch_size: most rows of a batch.
        batch_tokens: most prompt tokens that wait or are answered at a time, padding included;
            a longer prompt is answered alone.
    """

    def __init__(
        self,
        model: Any,
        renderer: Renderer,
        *,
        max_new_tokens: int,
        batch_size: int,
        batch_tokens: int,
    ) -> None:
        self.model = model
        self.tokenizer = renderer.tokenizer
        self.stop_ids = renderer.stop_ids
        if not self.stop_ids:
            raise UserError(f"{renderer.source}: its tokenizer has no end-of-sequence token")
        self.max_new_tokens = max_new_tokens
        self.batch_size = batch_size
        self.batch_tokens = batch_tokens
        parameters = inspect.signature(type(model).forward).parameters
        self.cache_name = "cache" if "cache" in parameters else "past_key_values"
        self.takes_positions = "position_ids" in parameters

    def run(self, requests: Sequence[Request]) -> Iterator[tuple[Request, Answer | Failure]]:
        from eval_bfcl import caches

        waiting: dict[int, list[Waiting]] = {}
        for group in groups(requests):
            for item in self._read_or_fail(group, waiting):
                if not isinstance(item, Waiting):
                    yield item
                    continue
                # Prompts of one length class waste little on padding in a batch.
                key = round(2 * math.log2(item.tokens)) if item.tokens else 0
                waiting.setdefault(key, []).append(item)
                while sum(map(padded_tokens, waiting.values())) > self.batch_tokens:
                    fullest = max(waiting, key=lambda k: padded_tokens(waiting[k]))
                    batch = waiting.pop(fullest)
                    if fullest == key and len(batch) > 1:
                        waiting[key] = [batch.pop()]
                    yield from self._write_or_fail(batch)
                full = len(waiting.get(key, ())) >= self.batch_size
                if full or (key in waiting and not caches.stackable(item.cache)):
                    yield from self._write_or_fail(waiting.pop(key))
        for batch in waiting.values():
            yield from self._write_or_fail(batch)

    def _read_or_fail(
        self, group: list[Request], waiting: dict[int, list[Waiting]]
    ) -> Iterator[Waiting | tuple[Request, Answer | Failure]]:
        """Read the prompts of one question; if memory runs out, first make room by answering."""
        import torch

        missing = group
        try:
            for item in self.read(group):
                missing = [r for r in missing if r not in item.requests]
                yield item
        except torch.OutOfMemoryError:
            for key in list(waiting):
                yield from self._write_or_fail(waiting.pop(key))
            torch.cuda.empty_cache()
            for request in missing:
                try:
                    yield from self.read([request])
                except torch.OutOfMemoryError as e:
                    said = f"out of memory at {len(request.prompt_ids)} tokens: {e}"
                    yield request, Failure(said, again=False)

    def _write_or_fail(self, batch: list[Waiting]) -> Iterator[tuple[Request, Answer | Failure]]:
        import torch

        try:
            answers = self.write(batch)
        except torch.OutOfMemoryError as e:
            torch.cuda.empty_cache()
            if len(batch) == 1:
                said = f"out of memory after {len(batch[0].prompt)} tokens: {e}"
                yield from ((r, Failure(said, again=False)) for r in batch[0].requests)
                return
            middle = len(batch) // 2
            yield from self._write_or_fail(batch[:middle])
            yield from self._write_or_fail(batch[middle:])
            return
        for item, answer in zip(batch, answers, strict=True):
            yield from ((r, answer) for r in item.requests)

    def read(self, requests: Sequence[Request]) -> Iterator[Waiting]:
        """Read the prompts of requests, each distinct one once, common beginnings once."""
        from eval_bfcl import caches

        alike: dict[tuple[int, ...], list[Request]] = {}
        for request in requests:
            alike.setdefault(tuple(request.prompt_ids), []).append(request)
        prompts, owners = list(alike), list(alike.values())
        if caches.croppable(caches.fresh(self.model.config)):
            found = prefill.read_cropping(prompts, self._read, caches.cropped)
        elif self.model.config.model_type in CONTINUES_EXACTLY:
            found = prefill.read_nested(prompts, self._read, caches.snapshot)
        else:
            found = ((i, *self._read(prompt, None)) for i, prompt in enumerate(prompts))
        started = time.perf_counter()
        for i, logits, cache in found:
            finite = math.isfinite(float(logits[0].max()))  # a NaN anywhere is the maximum
            first = int(logits[0].argmax()) if finite else NO_TOKEN
            now = time.perf_counter()
            tokens = caches.held_tokens(cache)
            yield Waiting(prompts[i], owners[i], first, cache, tokens, now - started)
            started = time.perf_counter()

    def _read(self, tokens: Sequence[int], cache: Any) -> tuple[torch.Tensor, Any]:
        import torch

        ids = torch.tensor([list(tokens)], device=self.model.device)
        if cache is None:
            from eval_bfcl import caches

            cache = caches.fresh(self.model.config)
        return self._forward(ids, cache, {})

    def _forward(
        self, ids: torch.Tensor, cache: Any, more: dict[str, Any]
    ) -> tuple[torch.Tensor, Any]:
        """Return the logits after the last token, shape (rows, vocabulary), and the cache."""
        import torch

        kwargs = {self.cache_name: cache, **more}
        with torch.inference_mode():
            out = self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **kwargs)
        return out.logits[:, -1], getattr(out, self.cache_name)

    def write(self, batch: Sequence[Waiting]) -> list[Answer | Failure]:
        """Return the greedy continuation of each prompt, which ends with the turn.

        Not with a call: what follows it (more calls, the end of a thought) counts too.  Where
        the model computes no finite number there is no next token, so no answer either.
        """
        import torch

        from eval_bfcl import caches

        started = time.perf_counter()
        device = self.model.device
        rows = [_Row(item.first) for item in batch]
        for row, item in zip(rows, batch, strict=True):
            self._take(row, item.first, 0.0)
        here = [n for n, row in enumerate(rows) if not row.stopped]  # rows in the cache
        if here and self.max_new_tokens > 1:
            cache = batch[here[0]].cache
            lengths = torch.tensor([len(batch[n].prompt) for n in here], device=device)
            # On CPU one column more than any prompt needs: a mask without a zero is dropped by
            # transformers, and attention then takes a path that repeats the keys of every group.
            width = int(lengths.max()) + (device.type == "cpu")
            if caches.stackable(cache):
                cache = caches.stack([batch[n].cache for n in here], width, self.max_new_tokens)
            else:
                width = len(batch[here[0]].prompt)
            mask = torch.ones(len(here), width + self.max_new_tokens, dtype=torch.long)
            for place, n in enumerate(here):
                mask[place, : width - len(batch[n].prompt)] = 0
            mask = mask.to(device)
            chosen = torch.tensor([rows[n].last for n in here], device=device)
            for step in range(1, self.max_new_tokens):
                more: dict[str, Any] = {}
                if self.takes_positions:
                    more["position_ids"] = (lengths + step - 1)[:, None]
                    if caches.held_tokens(cache):
                        more["attention_mask"] = mask[:, : width + step]
                logits, cache = self._forward(chosen[:, None], cache, more)
                chosen = logits.argmax(dim=-1)
                # Told apart on the device: one transfer a step, as for the tokens alone.
                told = torch.where(logits.amax(dim=-1).isfinite(), chosen, NO_TOKEN).tolist()
                now = time.perf_counter() - started
                for n, token in zip(here, told, strict=True):
                    if not rows[n].stopped:
                        self._take(rows[n], token, now)
                places = [p for p, n in enumerate(here) if not rows[n].stopped]
                if not places:
                    break
                if len(places) <= 0.75 * len(here):
                    keep = torch.tensor(places, device=device)
                    cache.reorder_cache(keep)
                    chosen, mask, lengths = chosen[keep], mask[keep], lengths[keep]
                    here = [here[p] for p in places]
        return [self._answer(row, item) for row, item in zip(rows, batch, strict=True)]

    def _answer(self, row: _Row, item: Waiting) -> Answer | Failure:
        if row.last == NO_TOKEN:
            return Failure(
                f"the model computes no finite number after {row.produced} tokens of the "
                "answer: its weights are damaged, or too large for --dtype",
                again=False,
            )
        return Answer(
            text=self._text(row.written),
            prompt_tokens=len(item.prompt),
            new_tokens=row.produced,
            latency_s=round(item.seconds + row.seconds, 4),
            finish="stop" if row.stopped else "length",
        )

    def _take(self, row: _Row, token: int, seconds: float) -> None:
        """Add a token to a row and see whether the row ends with it."""
        row.last, row.seconds = token, seconds
        if token == NO_TOKEN:
            row.stopped = True
            return
        row.produced += 1
        row.stopped = token in self.stop_ids
        if not row.stopped:
            row.written.append(token)

    def _text(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text


@dataclasses.dataclass
class _Row:
    """An answer in the making; `produced` counts the token that ends the turn, too."""

    last: int
    written: list[int] = dataclasses.field(default_factory=list)
    produced: int = 0
    stopped: bool = False
    seconds: float = 0.0


def padded_tokens(batch: Sequence[Waiting]) -> int:
    """Return how many tokens of keys and values a batch will hold."""
    return len(batch) * max(w.tokens for w in batch)


def groups(requests: Iterable[Request]) -> list[list[Request]]:
    """Return requests by question, the question with the longest prompt first.

    What does not fit into memory then fails at once.
    """
    by_id: dict[str, list[Request]] = {}
    for request in requests:
        by_id.setdefault(request.id, []).append(request)
    longest = {i: max(len(r.prompt_ids) for r in group) for i, group in by_id.items()}
    return [by_id[i] for i in sorted(by_id, key=lambda i: (-longest[i], i))]


def load(folder: Path, dtype: str) -> Any:
    """Return the model of a Hugging Face folder, ready to generate.

    Args:
        dtype: float32, bfloat16 or float16.

    Raises:
        UserError: the folder holds no model that transformers can load, or not all its weights.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    cuda = torch.cuda.is_available()
    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    except (OSError, ValueError, KeyError) as e:
        raise UserError(f"--model {folder}: transformers cannot load it ({e})") from e
    if config.model_type == "mamba2" and not cuda:
        from gatewright.kernels import bind_transformers

        bind_transformers()
    if dtype == "bfloat16":
        processor.warn_of_slow_bf16("--dtype float32", "cuda" if cuda else "cpu")
    model: Any = load_hf_model(
        AutoModelForCausalLM, folder, config=config, dtype=dtype, trust_remote_code=False
    )
    return model.to("cuda" if cuda else "cpu").eval()
