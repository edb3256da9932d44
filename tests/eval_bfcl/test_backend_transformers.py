import itertools
import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eval_bfcl import backend_transformers, pools, prefill
from eval_bfcl.backend import Answer, Failure
from eval_bfcl.backend_transformers import TransformersBackend
from eval_bfcl.outcomes import judge
from eval_bfcl.prompting import Request
from gatewright import bfcl
from gatewright.chat import Renderer
from gatewright.errors import UserError
from gatewright.kernels import bind_transformers
from tests.eval_bfcl.gold import gold_text

WEIGHTS = "model.safetensors"
LONG = "What is the weather in Paris today, and how is the sea?" * 5
PROMPTS = ["Find the area.", "x", LONG, LONG + " And in Rome?", LONG + " And?", LONG[:200] + "!"]


def backend(folder: Path, **flags: Any) -> TransformersBackend:
    sizes = {"max_new_tokens": 24, "batch_size": 8, "batch_tokens": 4096, **flags}
    model = backend_transformers.load(folder, "float32")
    return TransformersBackend(model, Renderer.load(folder), **sizes)


def requests(b: TransformersBackend, texts: list[str]) -> list[Request]:
    return [
        Request("one question", str(n), [], [], text, b.tokenizer(text)["input_ids"])
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
    answers = {r.cell: a for r, a in b.run(requests(b, PROMPTS)) if isinstance(a, Answer)}
    for n, ids in enumerate(expected):
        text = b.tokenizer.decode([i for i in ids if i not in b.stop_ids])
        assert answers[str(n)].text == text
        assert answers[str(n)].new_tokens == len(ids)
        assert answers[str(n)].prompt_tokens == len(b.tokenizer(PROMPTS[n])["input_ids"])
        assert answers[str(n)].finish == ("stop" if ids[-1] in b.stop_ids else "length")


def hybrid(kind: str, vocab: int) -> Any:
    """Return a small model with attention and recurrent layers, or one with sliding windows."""
    from transformers import AutoModelForCausalLM, BambaConfig, MistralConfig, NemotronHConfig

    attention = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"vocab_size": vocab, "hidden_size": 64, "intermediate_size": 128, **attention}
    configs: dict[str, Any] = {
        "bamba": lambda: BambaConfig(
            **sizes,
            **{"num_hidden_layers": 3, "attn_layer_indices": [1], "mamba_n_heads": 8},
            **{"mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16},
        ),
        "nemotron_h": lambda: NemotronHConfig(
            **sizes,
            **{"layers_block_type": ["linear_attention", "full_attention", "mlp"], "head_dim": 16},
            **{"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1},
            chunk_size=16,
        ),
        "mistral": lambda: MistralConfig(**sizes, num_hidden_layers=2, sliding_window=32),
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(configs[kind]()).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(4)
    return model


@pytest.mark.parametrize("kind", ["bamba", "nemotron_h", "mistral"])
def test_hybrids_and_sliding_windows_answer_as_alone(kind: str, models: dict[str, Path]) -> None:
    renderer = Renderer.load(models["llama"])
    model = hybrid(kind, len(renderer.tokenizer))
    b = TransformersBackend(model, renderer, max_new_tokens=12, batch_size=8, batch_tokens=4096)
    items = requests(b, [LONG, LONG + " And in Rome?", "x", LONG[:200] + "!"])
    answers = {r.cell: a for r, a in b.run(items)}
    for item in items:
        ids = torch.tensor([item.prompt_ids])
        new = model.generate(
            ids, max_new_tokens=12, do_sample=False, eos_token_id=renderer.stop_ids
        )
        left = [i for i in new[0, ids.shape[1] :].tolist() if i not in renderer.stop_ids]
        assert answers[item.cell].text == b.tokenizer.decode(left)  # type: ignore[union-attr]


@pytest.mark.parametrize("family", ["mamba2", "llama"])
def test_what_prompts_share_is_read_once(
    family: str, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    b = backend(models[family])
    items = requests(b, PROMPTS)
    read: list[int] = []
    whole = b._read

    def counting(tokens: Sequence[int], cache: Any) -> Any:
        read.append(len(tokens))
        return whole(tokens, cache)

    monkeypatch.setattr(b, "_read", counting)
    assert len(list(b.read(items))) == len(items)
    beginnings = {tuple(r.prompt_ids[:n]) for r in items for n in range(1, len(r.prompt_ids) + 1)}
    assert len(beginnings) <= sum(read) <= len(beginnings) + 8  # at least one token of each
    assert sum(read) < 0.6 * sum(len(r.prompt_ids) for r in items)


def test_the_same_prompt_in_several_cells_is_answered_once(models: dict[str, Path]) -> None:
    b = backend(models["llama"])
    items = requests(b, [LONG, LONG, "x", LONG])
    assert sorted(len(w.requests) for w in b.read(items)) == [1, 3]
    answers = {r.cell: a for r, a in b.run(items)}
    assert answers.keys() == {"0", "1", "2", "3"}
    assert answers["0"] == answers["1"] == answers["3"]


def forward(tokens: Sequence[int], cache: Any) -> Any:
    """A model whose cache is what it has read, and whose logits are its length."""
    cache = list(cache or [])
    cache.extend(tokens)
    return len(cache), cache


@pytest.mark.parametrize("seed", range(20))
def test_every_prompt_is_read_whole_whatever_is_shared(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "SHARED_TOKENS", 2)
    rng = random.Random(seed)
    prompts: list[list[int]] = [[1]]
    for _ in range(rng.randrange(12)):
        begin = rng.choice(prompts)
        rest = [rng.randrange(3) for _ in range(rng.randrange(1, 9))]
        prompts.append(begin[: rng.randrange(len(begin) + 1)] + rest)
    prompts = [list(p) for p in dict.fromkeys(map(tuple, prompts))]
    rng.shuffle(prompts)
    for found in (
        prefill.read_cropping(prompts, forward, lambda cache, n: cache[:n]),
        prefill.read_nested(prompts, forward, list),
    ):
        kept = {i: (logits, list(cache)) for i, logits, cache in found}
        assert kept == {i: (len(p), p) for i, p in enumerate(prompts)}


class Scripted(torch.nn.Module):
    """A model that writes a given text per row, told apart by the prompt's last token.

    Its cache is a real one of attention; the values hold that token, the keys the step.
    """

    def __init__(self, scripts: dict[int, list[int]], vocab: int) -> None:
        from transformers import LlamaConfig

        super().__init__()
        self.scripts, self.vocab = scripts, vocab
        self.config = LlamaConfig(num_hidden_layers=1)
        self.device = torch.device("cpu")
        self.rows_seen: list[int] = []
        self.masks: list[torch.Tensor] = []

    def forward(
        self,
        input_ids: torch.Tensor,
        past_key_values: Any,
        attention_mask: Any = None,
        position_ids: Any = None,
        use_cache: bool = True,
        logits_to_keep: int = 0,
    ) -> Any:
        layer = past_key_values.layers[0]
        key, step = input_ids[:, -1], torch.zeros(len(input_ids))
        if layer.get_seq_length():
            key, step = layer.values[:, 0, -1, 0].long(), layer.keys[:, 0, -1, 0] + 1
        like = torch.ones(len(input_ids), 1, input_ids.shape[1], 1)
        past_key_values.update(like * step[:, None, None, None], like * key[:, None, None, None], 0)
        logits = torch.zeros(len(input_ids), 1, self.vocab)
        for row, (k, n) in enumerate(zip(key.tolist(), step.long().tolist(), strict=True)):
            logits[row, 0, self.scripts[k][n]] = 1
        self.rows_seen.append(len(input_ids))
        if attention_mask is not None:
            self.masks.append(attention_mask)
        return SimpleNamespace(logits=logits, past_key_values=past_key_values)


def write(b: TransformersBackend, prompts: list[list[int]]) -> list[Answer]:
    items = [Request(str(n), "c", [], [], "", ids) for n, ids in enumerate(prompts)]
    done = {r.id: a for r, a in b.run(items)}
    answers = [done[str(n)] for n in range(len(prompts))]
    assert all(isinstance(a, Answer) for a in answers)
    return answers  # type: ignore[return-value]


def test_rows_end_at_their_own_token_and_leave_the_batch(models: dict[str, Path]) -> None:
    renderer = Renderer.load(models["llama"])
    tokenizer, stop = renderer.tokenizer, renderer.stop_ids[0]
    open_, close = (tokenizer.convert_tokens_to_ids(t) for t in ("<tool_call>", "</tool_call>"))
    a, b, c, d, e = (tokenizer.convert_tokens_to_ids(t) for t in "abcde")
    endless = [a] * 40
    scripts = {
        a: [b, stop, *endless],
        b: [*[open_, a, close] * 3, stop, *endless],  # all calls count
        c: [open_, a, close, stop, *endless],
        d: endless,
        e: [stop, *endless],
    }
    model = Scripted(scripts, len(tokenizer))
    it = TransformersBackend(model, renderer, max_new_tokens=30, batch_size=8, batch_tokens=999)
    prompts = [[5, a], [6, b], [7, c], [8, d], [9, e]]
    answers = write(it, prompts)
    assert [x.text for x in answers] == [
        "b",
        "<tool_call>a</tool_call>" * 3,
        "<tool_call>a</tool_call>",
        "a" * 30,
        "",
    ]
    assert [x.finish for x in answers] == ["stop", "stop", "stop", "length", "stop"]
    assert [x.new_tokens for x in answers] == [2, 10, 4, 30, 1]
    assert model.rows_seen[:5] == [1] * 5  # prompts, a row each
    assert model.rows_seen[5] == 4  # what ended at once is not in the batch
    assert model.rows_seen[-1] == 1
    # Grouped heads are slow on CPU without a mask, and one without a zero counts as none.
    assert len(model.masks) == len(model.rows_seen) - 5
    assert all(not bool(row.all()) for mask in model.masks for row in mask)


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (
            "<think>\n<tool_call>{}</tool_call> or <tool_call>{}</tool_call>?\n</think>\nGOOD",
            "correct",
        ),
        ('GOOD GOOD <tool_call>{"name": "made_up", "arguments": {}}</tool_call>', "hallucinated"),
        ('GOOD GOOD <tool_call>{"name": broken', "unparseable"),
    ],
)
def test_no_call_ends_the_answer_because_what_follows_decides(
    answer: str, outcome: str, models: dict[str, Path], pools_1_4: Path
) -> None:
    renderer = Renderer.load(models["llama"])
    question = bfcl.load_split("simple_python")[0]
    text = answer.replace("GOOD", gold_text(question))
    ids = renderer.tokenizer(text, add_special_tokens=False)["input_ids"]
    model = Scripted({7: [*ids, renderer.stop_ids[0]]}, len(renderer.tokenizer))
    it = TransformersBackend(model, renderer, max_new_tokens=400, batch_size=8, batch_tokens=999)
    (got,) = write(it, [[5, 7]])
    row = pools.load(pools_1_4)[1][1].rows[0]
    assert judge(question, row, got.text, "hermes", "keep").outcome == outcome


def test_a_model_without_finite_numbers_is_no_behaviour(models: dict[str, Path]) -> None:
    it = backend(models["llama"])
    with torch.no_grad():
        it.model.get_input_embeddings().weight.fill_(float("nan"))
    done = [answer for _, answer in it.run(requests(it, PROMPTS))]
    assert len(done) == len(PROMPTS)
    for failed in done:
        assert isinstance(failed, Failure)
        assert "the model computes no finite number after 0 tokens of the answer" in failed.error
        assert "--dtype" in failed.error
        assert not failed.again


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_row_whose_numbers_end_is_no_answer_and_leaves_the_others_theirs(
    number: float, models: dict[str, Path]
) -> None:
    renderer = Renderer.load(models["llama"])
    stop = renderer.stop_ids[0]
    scripts = {k: [10, 11, 12, 13, 14, stop] for k in range(4)}
    model = Scripted(scripts, len(renderer.tokenizer))
    it = TransformersBackend(model, renderer, max_new_tokens=9, batch_size=8, batch_tokens=999)
    written = it._forward

    def ending(ids: torch.Tensor, cache: Any, more: dict[str, Any]) -> Any:
        logits, cache = written(ids, cache, more)
        steps = cache.layers[0].keys[:, 0, -1, 0]
        broken = (cache.layers[0].values[:, 0, -1, 0] == 2) & (steps == 3)
        return logits.masked_fill(broken[:, None], number), cache

    it._forward = ending  # type: ignore[method-assign]
    items = [Request(str(n), "c", [], [], "", [5, n]) for n in range(4)]
    done = {r.id: answer for r, answer in it.run(items)}
    failed = done.pop("2")
    assert isinstance(failed, Failure)
    assert "no finite number after 3 tokens of the answer" in failed.error
    assert not failed.again
    text = renderer.tokenizer.decode([10, 11, 12, 13, 14])
    assert [a.text for a in done.values() if isinstance(a, Answer)] == [text] * 3


def without(part: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        kept = {n: t for n, t in load_file(folder / WEIGHTS).items() if part not in n}
        save_file(kept, folder / WEIGHTS, metadata={"format": "pt"})

    return change


def cut_short(folder: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[: len(whole) // 2])


def configured(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"state_size": 8}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("A_log"), r"lack 2 of the tensors .* backbone.layers.0.mixer.A_log among them"),
        (configured, r"of shape \[.*\], and its config.json asks for \["),
        (cut_short, r"its weights are damaged \(.*\); copy or make the folder again"),
    ],
)
def test_no_weight_is_made_up(
    damage: Callable[[Path], None], message: str, models: dict[str, Path], tmp_path: Path
) -> None:
    """Random gates would answer like a model's own: transformers only prints what it fills in."""
    folder = shutil.copytree(models["mamba2"], tmp_path / "m")
    damage(folder)
    with pytest.raises(UserError, match=f"--model .*/m: .*{message}"):
        backend_transformers.load(folder, "float32")


def test_batches_are_bounded_and_of_similar_length(models: dict[str, Path]) -> None:
    renderer = Renderer.load(models["llama"])
    tokenizer = renderer.tokenizer
    model = Scripted(dict.fromkeys(range(9), [7] * 9), len(tokenizer))
    b = TransformersBackend(model, renderer, max_new_tokens=2, batch_size=3, batch_tokens=100)
    lengths = [4, 60, 4, 90, 4, 4, 30, 33, 30, 4]
    batches: list[list[int]] = []
    whole, read = b.write, b.read
    held = most = 0

    def reading(items: Sequence[Request]) -> Any:
        nonlocal held, most
        for item in read(items):
            yield item
            held += len(item.prompt)
            most = max(most, held)

    def watching(batch: Sequence[Any]) -> list[Answer | Failure]:
        nonlocal held
        batches.append(sorted(len(w.prompt) for w in batch))
        held -= sum(batches[-1])
        return whole(batch)

    b.read, b.write = reading, watching  # type: ignore[method-assign, assignment]
    write(b, [[n % 9] * length for n, length in enumerate(lengths)])
    assert sorted(batches) == [[4, 4], [4, 4, 4], [30, 30], [33], [60], [90]]
    assert most <= 100  # what waits in all length classes together
    assert sorted(itertools.chain(*batches)) == sorted(lengths)


def test_running_out_of_memory_makes_room_and_names_a_prompt_that_never_fits(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    b = backend(models["llama"])
    expected = {r.cell: a for r, a in b.run(requests(b, PROMPTS))}
    too_long = len(b.tokenizer(LONG + " And in Rome?")["input_ids"])
    read, write_ = b._read, b.write
    written: list[int] = []

    def scarce_read(tokens: Sequence[int], cache: Any) -> Any:
        if len(tokens) >= too_long:
            raise torch.OutOfMemoryError("no room")
        return read(tokens, cache)

    def scarce_write(batch: Sequence[Any]) -> list[Answer | Failure]:
        if len(batch) > 1:
            raise torch.OutOfMemoryError("no room")
        written.append(len(batch))
        return write_(batch)

    monkeypatch.setattr(b, "_read", scarce_read)
    monkeypatch.setattr(b, "write", scarce_write)
    done = {r.cell: a for r, a in b.run(requests(b, PROMPTS))}
    assert done.keys() == expected.keys()
    for cell, answer in done.items():
        if cell == "3":
            assert f"out of memory at {too_long} tokens" in answer.error  # type: ignore[union-attr]
        else:
            assert answer.text == expected[cell].text  # type: ignore[union-attr]
    assert len(written) == len(PROMPTS) - 1


def cache_bytes(folder: Path, context: int) -> int:
    """Return the bytes that decoding reads at every token after a context."""
    b = backend(folder)
    _, cache = b._read([i % 500 for i in range(context)], None)
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
