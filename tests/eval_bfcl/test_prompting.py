import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from eval_bfcl import pools, prompting
from gatewright import bfcl
from gatewright.chat import Renderer, parse_calls
from gatewright.errors import UserError


@pytest.fixture(scope="module")
def renderer(models: dict[str, Path]) -> Renderer:
    return Renderer.load(models["llama"])


@pytest.fixture(scope="module")
def without_tools(models: dict[str, Path]) -> Renderer:
    """A chat template that knows no tools, like SmolLM2's."""
    tokenizer = AutoTokenizer.from_pretrained(models["llama"])
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return Renderer(tokenizer)


def request(pools_folder: Path, n: int, dots: prompting.Dots = "keep") -> prompting.Request:
    _, cells = pools.load(pools_folder)
    cell = cells[-1]
    question = bfcl.load_split("simple_python")[n]
    return prompting.request(question, cell, cell.rows[n], dots)


def shown_tools(prompt: str) -> list[str]:
    block = prompt.split("<tools>\n", 1)[1].split("</tools>")[0]
    return [json.loads(line)["name"] for line in block.strip().splitlines()]


def test_the_template_draws_the_pool_best_first(pools_1_4: Path, renderer: Renderer) -> None:
    item = request(pools_1_4, 1)
    prompting.draw(item, renderer, "template")
    row = pools.load(pools_1_4)[1][-1].rows[1]
    assert shown_tools(item.prompt) == row.names
    assert item.prompt.endswith("<|im_start|>assistant\n")
    assert renderer.tokenizer.decode(item.prompt_ids) == item.prompt
    underscored = request(pools_1_4, 1, "underscore")
    prompting.draw(underscored, renderer, "template")
    assert shown_tools(underscored.prompt) == [n.replace(".", "_") for n in row.names]


def test_tools_can_stand_in_a_system_message(pools_1_4: Path, without_tools: Renderer) -> None:
    with pytest.raises(UserError, match="its chat template draws no tools; --prompt system"):
        prompting.check_kind(without_tools, "template")
    prompting.check_kind(without_tools, "system")
    item = request(pools_1_4, 0)
    prompting.draw(item, without_tools, "system")
    row = pools.load(pools_1_4)[1][-1].rows[0]
    assert shown_tools(item.prompt) == row.names
    assert item.prompt.count("<|im_start|>") == 3  # system, user, assistant
    assert "<tool_call>\n{" in item.prompt  # the tags are whole, as a model must write them
    shot = request(pools_1_4, 0)
    prompting.draw(shot, without_tools, "system_one_shot")
    assert shown_tools(shot.prompt) == row.names
    answered = shot.prompt.split("<|im_start|>assistant\n")[1].split("<|im_end|>")[0]
    (call,) = parse_calls(answered).calls
    assert call.name not in {q.tools[0]["name"] for q in bfcl.load_split("simple_python")}


def test_the_questions_own_system_message_stays(make_pools: Callable[..., Path]) -> None:
    folder = make_pools(split="live_simple", retriever="oracle", pool_sizes="1")
    _, (cell,) = pools.load(folder)
    n, question = next(
        (n, q) for n, q in enumerate(bfcl.load_split("live_simple")) if len(q.messages) == 2
    )
    item = prompting.request(question, cell, cell.rows[n], "keep")
    messages = prompting.with_tools_in_system(item, one_shot=True)
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user"]
    assert messages[0]["content"].startswith(question.messages[0]["content"])


def test_java_questions_ask_for_literals(make_pools: Callable[..., Path]) -> None:
    folder = make_pools(split="simple_java", retriever="bm25", pool_sizes="8")
    _, (cell,) = pools.load(folder)
    item = prompting.request(bfcl.load_split("simple_java")[0], cell, cell.rows[0], "keep")
    assert all("Java literal" in json.dumps(t) for t in item.tools if t["function"]["parameters"])
