"""Greedy generation with transformers, in length-sorted batches that shrink as rows finish.

Prompts of similar length share a batch (left-padded, the padding masked), the last logits are
the only ones computed in the prefill, and rows that have ended leave the cache.  Llama decodes
from its key-value cache, Mamba-2 from its recurrent state, whose cost per token does not
depend on the context.  On a machine without CUDA, Mamba-2 runs on the project's own kernels.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval_bfcl.backend import Answer, Failure
from eval_bfcl.prompting import Request
from gatewright.errors import UserError

if TYPE_CHECKING:
    import torch

    from gatewright.chat import Renderer


class TransformersBackend:
    """A causal language model of transformers, on CUDA if there is a device, else on CPU.

    Args:
        model: the model, in evaluation mode.
        renderer: draws prompts and knows the tokens that end a turn.
        max_new_tokens: limit of new tokens an answer.
        batch_size: most rows of a batch.
        batch_tokens: most prompt tokens of a batch, padding included.
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
        closing = self.tokenizer.encode("</tool_call>", add_special_tokens=False)
        self.closing_id = closing[0] if len(closing) == 1 else None
        parameters = inspect.signature(type(model).forward).parameters
        self.cache_name = "cache" if "cache" in parameters else "past_key_values"
        self.takes_positions = "position_ids" in parameters

    def batches(self, requests: Sequence[Request]) -> list[list[Request]]:
        """Return requests in batches, longest prompts first (what does not fit fails at once)."""
        out: list[list[Request]] = []
        for item in sorted(requests, key=lambda r: (-len(r.prompt_ids), r.cell, r.id)):
            batch = out[-1] if out else []
            width = len(batch[0].prompt_ids) if batch else 0
            full = len(batch) >= self.batch_size or width * (len(batch) + 1) > self.batch_tokens
            if not batch or full:
                out.append([item])
            else:
                batch.append(item)
        return out

    def run(self, requests: Sequence[Request]) -> Iterator[tuple[Request, Answer | Failure]]:
        for batch in self.batches(requests):
            yield from self._run_batch(batch)

    def _run_batch(self, batch: list[Request]) -> Iterator[tuple[Request, Answer | Failure]]:
        import torch

        try:
            answers = self.generate([r.prompt_ids for r in batch], [r.single_call for r in batch])
        except torch.OutOfMemoryError as e:
            if len(batch) == 1:
                yield batch[0], Failure(f"out of memory at {len(batch[0].prompt_ids)} tokens: {e}")
                return
            torch.cuda.empty_cache()
            middle = len(batch) // 2
            yield from self._run_batch(batch[:middle])
            yield from self._run_batch(batch[middle:])
            return
        yield from zip(batch, answers, strict=True)

    def generate(
        self, prompts: Sequence[Sequence[int]], single_call: Sequence[bool]
    ) -> list[Answer]:
        """Return the greedy continuation of each prompt.

        Args:
            prompts: token ids, a list per row.
            single_call: rows in which a second closed call decides the outcome, so that
                generation may end there.
        """
        import torch

        started = time.perf_counter()
        device = self.model.device
        width = max(map(len, prompts))
        pad = self.stop_ids[0]
        ids = torch.full((len(prompts), width), pad, dtype=torch.long)
        mask = torch.zeros((len(prompts), width), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt, dtype=torch.long)
            mask[row, width - len(prompt) :] = 1
        ids, mask = ids.to(device), mask.to(device)

        written: list[list[int]] = [[] for _ in prompts]
        finished_after = [0.0] * len(prompts)
        stopped = [False] * len(prompts)
        produced = [0] * len(prompts)  # the token that ends a turn included
        closed = [0] * len(prompts)
        alive = list(range(len(prompts)))  # rows of `prompts` that are still in the cache
        in_cache = list(alive)
        cache: Any = None
        with torch.inference_mode():
            for step in range(self.max_new_tokens):
                logits, cache = self._forward(ids, mask, cache, padded=step == 0)
                chosen = logits.argmax(dim=-1)
                now = time.perf_counter() - started
                for place, token in enumerate(chosen.tolist()):
                    row = in_cache[place]
                    if stopped[row]:
                        continue
                    finished_after[row] = now
                    produced[row] += 1
                    if token in self.stop_ids:
                        stopped[row] = True
                        continue
                    written[row].append(token)
                    closed[row] += token == self.closing_id
                    stopped[row] = closed[row] >= 2 and single_call[row]
                alive = [row for row in in_cache if not stopped[row]]
                if not alive:
                    break
                ids = chosen[:, None]
                mask = torch.cat([mask, mask.new_ones((len(mask), 1))], dim=1)
                if len(alive) <= 0.75 * len(in_cache):
                    keep = torch.tensor(
                        [p for p, row in enumerate(in_cache) if not stopped[row]], device=device
                    )
                    cache.reorder_cache(keep)
                    ids, mask, in_cache = ids[keep], mask[keep], alive
        return [
            Answer(
                text=self.tokenizer.decode(
                    written[row], skip_special_tokens=False, clean_up_tokenization_spaces=False
                ),
                prompt_tokens=len(prompts[row]),
                new_tokens=produced[row],
                latency_s=round(finished_after[row], 4),
                finish="stop" if stopped[row] else "length",
            )
            for row in range(len(prompts))
        ]

    def _forward(
        self, ids: torch.Tensor, mask: torch.Tensor, cache: Any, *, padded: bool
    ) -> tuple[torch.Tensor, Any]:
        """Return the logits after the last token, shape (rows, vocabulary), and the cache.

        A recurrent model needs the mask in the prefill only: there is no padding afterwards.
        """
        kwargs: dict[str, Any] = {self.cache_name: cache} if cache is not None else {}
        if self.takes_positions:
            positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
            kwargs |= {"attention_mask": mask, "position_ids": positions[:, -ids.shape[1] :]}
        elif padded and not bool(mask.all()):
            kwargs["attention_mask"] = mask
        out = self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **kwargs)
        return out.logits[:, -1], getattr(out, self.cache_name)


def load(folder: Path, dtype: str) -> Any:
    """Return the model of a Hugging Face folder, ready to generate.

    Args:
        dtype: `auto` (float32 on CPU, the checkpoint's own on CUDA), float32 or bfloat16.

    Raises:
        UserError: the folder holds no model that transformers can load.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    cuda = torch.cuda.is_available()
    if dtype == "auto":
        dtype = "auto" if cuda else "float32"
    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
        if config.model_type == "mamba2" and not cuda:
            from gatewright.kernels import bind_transformers

            bind_transformers()
        model = AutoModelForCausalLM.from_pretrained(
            str(folder), config=config, dtype=dtype, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as e:
        raise UserError(f"--model {folder}: transformers cannot load it ({e})") from e
    return model.to("cuda" if cuda else "cpu").eval()
