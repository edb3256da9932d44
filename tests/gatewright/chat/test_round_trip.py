"""All 400 gold answers survive template, tokenizer, parser and the official checker."""

from gatewright import bfcl


def assistant_turn(calls):
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}}
            for c in calls
        ],
    }


def test_400_gold_answers(any_renderer):
    """The masked tokens are decoded as generation would decode them, then read and checked."""
    tokenizer = any_renderer.tokenizer
    stops = set(any_renderer.stop_ids)
    right = 0
    questions = bfcl.load_split("simple_python")
    for question in questions:
        tools = [bfcl.to_openai_tool(schema) for schema in question.tools]
        chat = [*question.messages, assistant_turn(bfcl.gold_calls(question))]
        encoded = any_renderer.encode(chat, tools)
        start = encoded.assistant_mask.index(1)
        assert encoded.input_ids[:start] == any_renderer.prompt_ids(question.messages, tools)
        written = [t for t, on in zip(encoded.input_ids, encoded.assistant_mask, strict=True) if on]
        assert written[-1] in stops
        assert not stops & set(written[:-1])
        parsed = any_renderer.parse(tokenizer.decode(written[:-1], skip_special_tokens=True))
        right += bfcl.check(question, parsed.calls).valid
    assert (len(questions), right) == (400, 400)
