"""The vLLM backend against a stand-in module with vLLM's ways: it cannot run without a GPU."""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from eval_bfcl import generate
from eval_bfcl.backend import Answer, Failure
from eval_bfcl.backend_vllm import VLLMBackend
from eval_bfcl.prompting import Request
from gatewright.errors import UserError

BAD = 666
"""A token that the stand-in refuses, as vLLM does one outside the vocabulary."""


class LLM:
    """Refuses as vLLM 0.11 does: a prompt without room, or a bad one, costs the whole call.

    What had been queued before the bad one is answered by the next call.
    """

    made: list[dict[str, Any]]

    def __init__(self, **settings: Any) -> None:
        if "unknown" in settings["model"]:
            raise ValueError("Model architectures ['X'] are not supported")
        self.made.append(settings)
        self.most = settings["max_model_len"]
        self.queued: list[list[int]] = []

    def generate(self, prompts: Sequence[Any], sampling: Any, use_tqdm: bool) -> list[Any]:
        for prompt in prompts:
            ids = prompt["prompt_token_ids"]
            if len(ids) >= self.most or BAD in ids:
                raise ValueError("refused")
            self.queued.append(ids)
        ready, self.queued = self.queued, []
        return [
            SimpleNamespace(
                prompt_token_ids=ids,
                outputs=[SimpleNamespace(token_ids=[ids[0], 2], finish_reason="stop")],
            )
            for ids in ready
        ]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Put the stand-in in vLLM's place; return what models are made with."""
    module: Any = ModuleType("vllm")
    LLM.made = []
    module.LLM, module.SamplingParams = LLM, SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", module)
    return LLM.made


class Letters:
    """A renderer whose tokens are numbers."""

    stop_ids = (2,)
    tokenizer = SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids)))


def backend(folder: str = "m", max_model_len: int = 8) -> VLLMBackend:
    return VLLMBackend(
        Path(folder),
        Letters(),
        dtype="bfloat16",
        max_new_tokens=3,
        max_model_len=max_model_len,
        tensor_parallel=1,
    )


@pytest.mark.usefixtures("made")
def test_a_prompt_that_vllm_refuses_costs_no_other_its_answer() -> None:
    prompts = [[5], [6] * 8, [7, 7], [BAD], [9], [10]]
    items = [Request(str(n), "c", [], [], "", ids) for n, ids in enumerate(prompts)]
    got = {r.id: a for r, a in backend().run(items)}
    texts = {i: a.text for i, a in got.items() if isinstance(a, Answer)}
    assert texts == {"0": "5", "2": "7", "4": "9", "5": "10"}
    failed = {i: a for i, a in got.items() if isinstance(a, Failure)}
    assert "prompt of 8 tokens" in failed["1"].error
    assert "vLLM refuses the prompt: refused" in failed["3"].error
    assert not any(f.again for f in failed.values())


@pytest.mark.usefixtures("made")
def test_a_model_that_vllm_does_not_know_is_one_line() -> None:
    with pytest.raises(UserError, match="--model unknown: vLLM cannot load it .*not supported"):
        backend("unknown")


@pytest.mark.parametrize(("family", "limit"), [("mamba2", None), ("llama", 600)])
def test_a_model_has_room_for_the_longest_prompt(
    family: str,
    limit: int | None,
    made: list[dict[str, Any]],
    models: dict[str, Path],
    pools_1_4: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM would take 2048 tokens for a Mamba-2, whatever is asked."""
    if limit:
        short = {**generate.model_facts(models[family]), "context_tokens": limit}
        monkeypatch.setattr(generate, "model_facts", lambda folder: short)
    args = generate.Args(
        str(models[family]), pools_1_4, tmp_path, "vllm", limit=4, max_new_tokens=2000
    )
    plan = generate.make_plan(args)
    assert (plan.run["dtype"], plan.run["device"]) == ("bfloat16", "cuda")
    generate.make_backend(args, plan)
    longest = max(len(r.prompt_ids) for r in plan.requests)
    (settings,) = made
    assert settings["max_model_len"] == (limit or longest + 2000)
    assert settings["dtype"] == "bfloat16"
