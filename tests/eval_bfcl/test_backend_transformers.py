from pathlib import Path
from typing import Any

import pytest
import torch

from eval_bfcl import backend_transformers
from eval_bfcl.backend import Answer
from eval_bfcl.backend_transformers import TransformersBackend
from eval_bfcl.prompting import Request
from gatewright.chat import Renderer
from gatewright.kernels import bind_transformers

PROMPTS = ["Find the area.", "x", "What is the weather in Paris today, and how is the sea?" * 5]


def backend(folder: Path, **flags: Any) -> TransformersBackend:
    sizes = {"max_new_tokens": 24, "batch_size": 8, "batch_tokens": 4096, **flags}
    model = backend_transformers.load(folder, "float32")
    return TransformersBackend(model, Renderer.load(folder), **sizes)


def requests(b: TransformersBackend, texts: list[str]) -> list[Request]:
    return [
        Request(str(n), "cell", [], [], text, b.tokenizer(text)["input_ids"])
        for n, text in enumerate(texts)
    ]


def plain_generate(folder: Path, texts: list[str], new_tokens: int) -> list[list[int]]:
    """Continue each prompt alone with transformers' own generate() and its own kernels."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    binding = bind_transformers()  # the one that is active, if any
    binding.undo()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    stop = Renderer.load(folder).stop_ids
    out = []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        new = model.generate(ids, max_new_tokens=new_tokens, do_sample=False, eos_token_id=stop)
        out.append(new[0, ids.shape[1] :].tolist())
    return out


@pytest.mark.parametrize("family", ["mamba2", "llama"])
def test_batched_answers_equal_plain_generate_one_by_one(
    family: str, models: dict[str, Path]
) -> None:
    expected = plain_generate(models[family], PROMPTS, 24)
    b = backend(models[family])
    answers = {r.id: a for r, a in b.run(requests(b, PROMPTS)) if isinstance(a, Answer)}
    for n, ids in enumerate(expected):
        text = b.tokenizer.decode([i for i in ids if i not in b.stop_ids])
        assert answers[str(n)].text == text
        assert answers[str(n)].new_tokens == len(ids)
        assert answers[str(n)].prompt_tokens == len(b.tokenizer(PROMPTS[n])["input_ids"])
        assert answers[str(n)].finish == ("stop" if ids[-1] in b.stop_ids else "length")


class Scripted(torch.nn.Module):
    """A model that writes a given text per row, told apart by the prompt's last token."""

    def __init__(self, scripts: dict[int, list[int]], vocab: int) -> None:
        super().__init__()
        self.scripts, self.vocab = scripts, vocab
        self.device = torch.device("cpu")
        self.rows_seen: list[int] = []

    def forward(
        self,
        input_ids: torch.Tensor,
        past_key_values: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        use_cache: bool = True,
        logits_to_keep: int = 0,
    ) -> Any:
        cache = past_key_values or Cache(input_ids[:, -1].tolist())
        logits = torch.zeros(len(input_ids), 1, self.vocab)
        for row, key in enumerate(cache.keys):
            logits[row, 0, self.scripts[key][cache.step]] = 1
        cache.step += 1
        self.rows_seen.append(len(input_ids))
        return Out(logits, cache)


class Cache:
    def __init__(self, keys: list[int]) -> None:
        self.keys, self.step = keys, 0

    def reorder_cache(self, keep: torch.Tensor) -> None:
        self.keys = [self.keys[i] for i in keep.tolist()]


class Out:
    def __init__(self, logits: torch.Tensor, cache: Cache) -> None:
        self.logits, self.past_key_values = logits, cache


def test_rows_end_at_their_own_token_and_leave_the_batch(models: dict[str, Path]) -> None:
    renderer = Renderer.load(models["llama"])
    tokenizer, stop = renderer.tokenizer, renderer.stop_ids[0]
    open_, close = (tokenizer.convert_tokens_to_ids(t) for t in ("<tool_call>", "</tool_call>"))
    a, b, c, d = (tokenizer.convert_tokens_to_ids(t) for t in ("a", "b", "c", "d"))
    endless = [a] * 40
    scripts = {
        a: [b, stop, *endless],
        b: [open_, a, close, open_, a, close, *endless],  # a second call decides the outcome
        c: [open_, a, close, stop, *endless],
        d: endless,
    }
    model = Scripted(scripts, len(tokenizer))
    backend = TransformersBackend(
        model, renderer, max_new_tokens=12, batch_size=8, batch_tokens=999
    )
    answers = backend.generate([[5, a], [6, 7, b], [c], [d]], [True, True, True, True])
    assert [x.text for x in answers] == [
        "b",
        "<tool_call>a</tool_call><tool_call>a</tool_call>",
        "<tool_call>a</tool_call>",
        "a" * 12,
    ]
    assert [x.finish for x in answers] == ["stop", "stop", "stop", "length"]
    assert [x.new_tokens for x in answers] == [2, 6, 4, 12]
    assert model.rows_seen[0] == 4
    assert model.rows_seen[-1] == 1
    both = backend.generate([[b]], [False])  # parallel questions may call more than once
    assert both[0].finish == "length"


def test_batches_are_sorted_by_length_and_bounded(models: dict[str, Path]) -> None:
    b = backend(models["llama"], batch_size=3, batch_tokens=100)
    lengths = [5, 60, 7, 90, 8, 6, 30, 40]
    items = [Request(str(n), "c", [], [], "", [1] * n) for n in lengths]
    batches = b.batches(items)
    sizes = [[len(r.prompt_ids) for r in batch] for batch in batches]
    assert sizes == [[90], [60], [40, 30], [8, 7, 6], [5]]


def test_running_out_of_memory_halves_the_batch_and_names_a_row_that_never_fits(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    b = backend(models["llama"])
    whole = b.generate

    def scarce(prompts: list[list[int]], single: list[bool]) -> list[Answer]:
        if len(prompts) > 1 or len(prompts[0]) > 50:
            raise torch.OutOfMemoryError("no room")
        return whole(prompts, single)

    monkeypatch.setattr(b, "generate", scarce)
    done = {r.id: a for r, a in b.run(requests(b, PROMPTS))}
    assert isinstance(done["0"], Answer)
    assert isinstance(done["1"], Answer)
    assert "out of memory at" in done["2"].error  # type: ignore[union-attr]


def cache_bytes(folder: Path, context: int) -> int:
    """Return the bytes that decoding reads at every token after a context."""
    b = backend(folder)
    ids = torch.arange(context)[None] % 500
    with torch.inference_mode():
        _, cache = b._forward(ids, torch.ones_like(ids), None, padded=True)
    found: list[torch.Tensor] = []
    for layer in cache.layers:
        for value in vars(layer).values():
            parts = value.values() if isinstance(value, dict) else [value]
            found += [p for p in parts if isinstance(p, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in found)


def test_what_mamba2_keeps_does_not_grow_with_the_context(models: dict[str, Path]) -> None:
    """A token's cost is what it reads; `tools.bench bfcl` measures the time."""
    short, long = (cache_bytes(models["mamba2"], n) for n in (64, 640))
    assert short == long > 0
    short, long = (cache_bytes(models["llama"], n) for n in (64, 640))
    assert long == 10 * short > 0
