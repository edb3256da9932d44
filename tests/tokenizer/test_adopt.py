"""Foreign tokenizers are taken as they are, or refused in one line that says the way out."""

import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from gatewright import artifact
from gatewright.chat import Renderer
from gatewright.errors import UserError
from tokenizer import adopt

ROOT = Path(__file__).resolve().parents[2]

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
SPANS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson '
    "}}}</tool_call>{% endfor %}<|end|>{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>\n{% endif %}"
)


@pytest.fixture
def foreign(tmp_path):
    """A GPT-2-like tokenizer folder: trims offsets, no padding token, its own end token."""

    def make(template=None, eos="<|end|>", name="foreign"):
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
        trainer = trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<|end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(["the weather is clear in Zürich today"] * 9, trainer)
        out = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos)
        out.chat_template = template
        out.save_pretrained(tmp_path / name)
        return tmp_path / name

    return make


def run(source, out, template="own"):
    adopt.main(adopt.Args(from_=source, out=out, template=template))
    return artifact.read_manifest(out, "tokenizer")["extra"]


def test_own_template_with_spans_stays(foreign, tmp_path):
    source = foreign(SPANS)
    extra = run(source, tmp_path / "out")
    assert extra["added_tokens"] == []
    assert extra["chat_style"] == "hermes"
    renderer = Renderer.load(tmp_path / "out")
    assert renderer.template == SPANS
    assert extra["stop_ids"] == renderer.stop_ids == [0]
    assert extra["vocab_size"] == len(renderer.tokenizer)


def test_ours_brings_its_tokens(foreign, tmp_path):
    extra = run(foreign(PLAIN), tmp_path / "out", template="ours")
    assert extra["added_tokens"] == [
        "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>",
        "<tool_response>", "</tool_response>", "<|pad|>",
    ]  # fmt: skip
    renderer = Renderer.load(tmp_path / "out")
    assert renderer.tokenizer.eos_token == "<|end|>"
    assert renderer.tokenizer.pad_token == "<|pad|>"
    encoded = renderer.encode(adopt.PROBE_CHAT, adopt.PROBE_TOOLS)
    runs = adopt.masked_runs(encoded.input_ids, encoded.assistant_mask)
    assert [renderer.tokenizer.decode(r) for r in runs] == [
        '<tool_call>\n{"name": "weather.now", "arguments": {"place": "Zürich"}}\n</tool_call>'
        "<|im_end|>",
        "The sky is clear.<|im_end|>",
    ]
    again = run(tmp_path / "out", tmp_path / "again")
    assert again["added_tokens"] == []
    assert again["vocab_size"] == extra["vocab_size"]


NO_TOOLS = SPANS.replace("{% if tools %}{{ tools | tojson }}{% endif %}", "")
NO_CALLS = SPANS.replace("m.tool_calls or []", "[]")
WIDE = "{% generation %}" + PLAIN + "{% endgeneration %}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        (PLAIN, "no {% generation %} spans; take ours with --template ours"),
        (NO_TOOLS, "leaves the tools out"),
        (NO_CALLS, "does not mark exactly the assistant's calls"),
        (WIDE, "does not mark exactly the assistant's calls"),
        ("{{ raise_exception('never') }}{% generation %}{% endgeneration %}", "refuses this chat"),
    ],
)
def test_templates_that_cannot_train_are_refused(foreign, tmp_path, template, message):
    source = foreign(template)
    with pytest.raises(UserError) as caught:
        run(source, tmp_path / "out")
    assert message in str(caught.value)
    assert str(source) in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["foreign"]


def test_no_end_token(foreign, tmp_path):
    with pytest.raises(UserError, match="has no end-of-sequence token"):
        run(foreign(SPANS, eos=None), tmp_path / "out")


def test_command_line_errors(tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    for source, message in [
        (tmp_path / "absent", "no such folder"),
        (tmp_path, "holds no tokenizer"),
        (tmp_path / "broken", "cannot be loaded"),
    ]:
        done = subprocess.run(
            [sys.executable, *f"-m tokenizer.adopt --from {source} --out {tmp_path}/x".split()],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2, done.stderr
        assert message in done.stderr
        assert done.stderr.count("\n") == 1
