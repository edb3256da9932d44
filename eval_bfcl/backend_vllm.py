"""Greedy generation with vLLM, which batches and schedules by itself (needs a GPU)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from eval_bfcl.backend import Answer, Failure
from eval_bfcl.prompting import Request
from gatewright.errors import UserError

CHUNK = 512
"""Requests handed over at a time: what a stopped run loses at most."""


class VLLMBackend:
    """A model served in this process by vLLM.

    Args:
        dtype: float32, float16 or bfloat16.
        max_new_tokens: limit of new tokens an answer.
        max_model_len: most tokens of a prompt and its answer.  Without it vLLM takes 2048 for
            models that have no limit of positions.
        tensor_parallel: GPUs that share the model.

    Raises:
        UserError: vLLM is not installed, or refuses the model.
    """

    def __init__(
        self,
        folder: Path,
        renderer: Any,
        *,
        dtype: str,
        max_new_tokens: int,
        max_model_len: int,
        tensor_parallel: int,
    ) -> None:
        try:
            from vllm import LLM, SamplingParams
        except ImportError as e:
            raise UserError(
                "--backend vllm: vLLM is not installed (pip install 'gatewright[gpu]' on a "
                "machine with CUDA); --backend transformers needs nothing more"
            ) from e
        self.sampling = SamplingParams(
            temperature=0.0,
            max_tokens=max_new_tokens,
            stop_token_ids=renderer.stop_ids,
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
        )
        self.max_model_len = max_model_len
        try:
            self.llm = LLM(
                model=str(folder),
                dtype=dtype,
                max_model_len=max_model_len,
                tensor_parallel_size=tensor_parallel,
                enable_prefix_caching=False,
                trust_remote_code=False,
            )
        except ValueError as e:
            raise UserError(f"--model {folder}: vLLM cannot load it ({e})") from e
        self.tokenizer = renderer.tokenizer
        self.stop_ids = set(renderer.stop_ids)

    def run(self, requests: Sequence[Request]) -> Iterator[tuple[Request, Answer | Failure]]:
        fitting = []
        for request in requests:
            tokens = len(request.prompt_ids)
            if tokens < self.max_model_len:  # room for one token at least
                fitting.append(request)
            else:
                said = f"prompt of {tokens} tokens: vLLM takes fewer than {self.max_model_len}"
                yield request, Failure(said, again=False)
        for at in range(0, len(fitting), CHUNK):
            yield from self._chunk(fitting[at : at + CHUNK])

    def _chunk(self, chunk: Sequence[Request]) -> Iterator[tuple[Request, Answer | Failure]]:
        """Answer requests together; if vLLM refuses one of them, one by one."""
        started = time.perf_counter()
        prompts = [{"prompt_token_ids": r.prompt_ids} for r in chunk]
        try:
            outputs = self.llm.generate(prompts, self.sampling, use_tqdm=False)
        except ValueError as e:
            if len(chunk) == 1:
                yield chunk[0], Failure(f"vLLM refuses the prompt: {e}", again=False)
                return
            for request in chunk:
                yield from self._chunk([request])
            return
        seconds = time.perf_counter() - started
        # Outputs come in the order of their numbers; what a refused chunk left behind is first.
        for request, output in zip(chunk, outputs[-len(chunk) :], strict=True):
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
