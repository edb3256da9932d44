"""Generation by any OpenAI-compatible server (`/chat/completions`), several requests at a time.

The server draws the prompt.  If it parses tool calls itself, its answer's `tool_calls` are
written back as text in the Hermes form, arguments exactly as the string it sent, so that one
parser judges every backend; what it could not parse arrives as `content` and is kept as it is.
"""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, Any

from eval_bfcl.backend import Answer, Failure
from eval_bfcl.prompting import Request
from gatewright.errors import UserError

if TYPE_CHECKING:
    from eval_bfcl.generate import Args

TRY_LATER = (408, 409, 425, 429)
"""Answers in the 400s that are no verdict on the request: time, conflict and rate limits."""

MAX_BODY_BYTES = 16_000_000
"""Longest answer that is read from a server."""


class OpenAIBackend:
    """A server that speaks OpenAI's chat-completions protocol.

    Raises:
        UserError: --base-url is not an http(s) address.
    """

    def __init__(self, args: Args) -> None:
        if not args.base_url.startswith(("http://", "https://")):
            raise UserError(f"--base-url {args.base_url}: give an address like http://host:port/v1")
        self.url = args.base_url.rstrip("/") + "/chat/completions"
        self.model = args.model
        self.max_new_tokens = args.max_new_tokens
        self.concurrency = args.concurrency
        self.timeout_s = args.timeout_s
        self.key = os.environ.get(args.api_key_env, "")

    def run(self, requests: Sequence[Request]) -> Iterator[tuple[Request, Answer | Failure]]:
        with ThreadPoolExecutor(self.concurrency) as threads:
            waiting = {threads.submit(self.ask, r): r for r in requests}
            try:
                for future in as_completed(waiting):
                    yield waiting[future], future.result()
            finally:  # a run that is stopped does not wait for what has not begun
                threads.shutdown(wait=False, cancel_futures=True)

    def ask(self, item: Request) -> Answer | Failure:
        """Send one request; whatever goes wrong on the way is a Failure, not an answer."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": item.messages,
            "temperature": 0,
            "max_tokens": self.max_new_tokens,
        }
        if item.tools:
            body["tools"] = item.tools
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(
            self.url, data=json.dumps(body).encode(), headers=headers, method="POST"
        )
        started = time.perf_counter()
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
                raw = response.read(MAX_BODY_BYTES + 1)
        except urllib.error.HTTPError as e:
            said = e.read(2000).decode("utf-8", "replace")
            refused = 400 <= e.code < 500 and e.code not in TRY_LATER
            return Failure(f"HTTP {e.code}: {' '.join(said.split())[:300]}", again=not refused)
        except (OSError, http.client.HTTPException) as e:
            return Failure(f"{type(e).__name__}: {e}")
        if len(raw) > MAX_BODY_BYTES:
            return Failure(f"the answer is longer than {MAX_BODY_BYTES} bytes")
        return read_answer(raw, time.perf_counter() - started)


def read_answer(raw: bytes, seconds: float) -> Answer | Failure:
    """Read a chat completion; anything that is not one is a Failure."""
    try:
        reply = json.loads(raw)
        choice = reply["choices"][0]
        message = choice["message"]
        usage = reply.get("usage") or {}
        text = _as_text(message)
        tokens = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as e:
        return Failure(f"not a chat completion: {type(e).__name__}: {e}")
    finish = "length" if choice.get("finish_reason") == "length" else "stop"
    return Answer(text, *tokens, round(seconds, 4), finish)  # type: ignore[arg-type]


def _as_text(message: dict[str, Any]) -> str:
    parts = []
    if message.get("content"):
        if not isinstance(message["content"], str):
            raise TypeError("content is not text")
        parts.append(message["content"])
    for call in message.get("tool_calls") or []:
        function = call["function"]
        value = {"name": function["name"], "arguments": function["arguments"]}
        parts.append(f"<tool_call>\n{json.dumps(value)}\n</tool_call>")
    return "\n".join(parts)
