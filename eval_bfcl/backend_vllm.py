"""Greedy generation with vLLM, which batches and schedules by itself (needs a GPU)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval_bfcl.backend import Answer, Failure
from eval_bfcl.prompting import Request
from gatewright.errors import UserError

if TYPE_CHECKING:
    from eval_bfcl.generate import Args

CHUNK = 512
"""Requests handed over at a time: what a stopped run loses at most."""


class VLLMBackend:
    """A model served in this process by vLLM.

    Raises:
        UserError: vLLM is not installed.
    """

    def __init__(self, folder: Path, renderer: Any, args: Args) -> None:
        try:
            from vllm import LLM, SamplingParams
        except ImportError as e:
            raise UserError(
                "--backend vllm: vLLM is not installed (pip install 'gatewright[gpu]' on a "
                "machine with CUDA); --backend transformers needs nothing more"
            ) from e
        self.sampling = SamplingParams(
            temperature=0.0,
            max_tokens=args.max_new_tokens,
            stop_token_ids=renderer.stop_ids,
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
        )
        self.llm = LLM(
            model=str(folder),
            dtype=args.dtype,
            tensor_parallel_size=args.tensor_parallel,
            enable_prefix_caching=False,
            trust_remote_code=False,
        )
        self.tokenizer = renderer.tokenizer
        self.stop_ids = set(renderer.stop_ids)

    def run(self, requests: Sequence[Request]) -> Iterator[tuple[Request, Answer | Failure]]:
        for at in range(0, len(requests), CHUNK):
            chunk = requests[at : at + CHUNK]
            started = time.perf_counter()
            prompts = [{"prompt_token_ids": r.prompt_ids} for r in chunk]
            outputs = self.llm.generate(prompts, self.sampling, use_tqdm=False)
            seconds = time.perf_counter() - started
            for request, output in zip(chunk, outputs, strict=True):
                yield request, self._answer(output, seconds)

    def _answer(self, output: Any, seconds: float) -> Answer | Failure:
        if not output.outputs:
            return Failure("vLLM returned no output")
        best = output.outputs[0]
        ids = list(best.token_ids)
        while ids and ids[-1] in self.stop_ids:
            ids.pop()
        metrics = getattr(output, "metrics", None)
        latency = seconds
        if metrics is not None and getattr(metrics, "finished_time", None):
            latency = metrics.finished_time - metrics.arrival_time
        return Answer(
            text=self.tokenizer.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            ),
            prompt_tokens=len(output.prompt_token_ids or []),
            new_tokens=len(best.token_ids),
            latency_s=round(latency, 4),
            finish="length" if best.finish_reason == "length" else "stop",
        )
