"""Small tokenizers with the chat templates that the world uses, written in our own words."""

import json
from pathlib import Path

import pytest

from gatewright.chat import TEMPLATE, Renderer
from tokenizer.train import train

TEXT = """A renderer draws chats as text, and a tokenizer turns the text into numbers.
The weather in Paris is clear today; the temperature is 21.5 degrees, and it will stay so.
{"name": "get_weather", "arguments": {"place": "Paris", "unit": "celsius", "days": 3}}
{"type": "object", "properties": {"place": {"type": "string", "description": "The place."}}}
"""

SPECIALS = {
    "ours": ([], "<|endoftext|>"),
    "hermes": ([], "<|endoftext|>"),
    "llama3": (
        [
            "<|begin_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
            "<|eom_id|>",
        ],
        "<|eot_id|>",
    ),
    "nemotron": (["<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"], "<SPECIAL_12>"),
}
FOREIGN = {p.stem: p.read_text() for p in (Path(__file__).parent / "templates").glob("*.jinja")}
TEMPLATES = {"ours": TEMPLATE, **dict(sorted(FOREIGN.items()))}


def build(name: str, template: str | None = None):
    """Return a small fast tokenizer that carries one of the four templates."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    backend = train(iter([TEXT]), 300)
    added, eos = SPECIALS[name]
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in added])
    names = {"bos_token": "<|begin_of_text|>"} if name == "llama3" else {}
    out = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=eos, pad_token="<|pad|>", **names
    )
    out.chat_template = template or TEMPLATES[name]
    return out


@pytest.fixture(scope="session", params=list(TEMPLATES))
def any_renderer(request) -> Renderer:
    return Renderer(build(request.param))


@pytest.fixture(scope="session")
def renderer() -> Renderer:
    return Renderer(build("ours"))


@pytest.fixture(scope="session")
def build_tokenizer():
    return build


def call(name: str, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Says how the weather is.",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string", "description": "The place."}},
                "required": ["place"],
            },
        },
    }
]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How is the weather in Zürich? 🌦"},
    {"role": "assistant", "content": "", "tool_calls": [call("get_weather", place="Zürich 🌦")]},
    {"role": "tool", "content": json.dumps({"sky": "clear"})},
    {"role": "assistant", "content": "It is clear. ☀"},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "Welcome!"},
]


@pytest.fixture
def tools():
    return json.loads(json.dumps(TOOLS))


@pytest.fixture
def chat():
    return json.loads(json.dumps(CHAT))
