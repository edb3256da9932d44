"""Generation by any OpenAI-compatible server (`/chat/completions`), several requests at a time.

The server draws the prompt.  If it parses tool calls itself, its answer's `tool_calls` are
written back as text in the form that --style names, arguments exactly as the string it sent, so
that one parser judges every backend; what it could not parse arrives as `content` and is kept as
it is.  What the server did not end as an answer (an error, a content filter) is none.
"""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.parse
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

STOPS = (
    *("stop", "tool_calls", "function_call", None),
    *("eos", "eos_token", "stop_sequence", "end_turn", "tool_use"),
)
"""Values of `finish_reason` at the end of the model's turn: OpenAI's own, then those of servers
that pass on their engine's word."""
LIMITS = ("length", "max_tokens")
"""Values of `finish_reason` at the limit of new tokens."""
BROKEN_OFF = ("error", "abort")
"""Values of `finish_reason` that another try may change."""

SPEAKS = (
    *("content", "refusal", "tool_calls", "function_call"),
    *("reasoning_content", "reasoning"),  # all tokens spent on thoughts: an empty answer
)
"""Fields of a message one of which every answer has, be it empty or null."""

MAX_BODY_BYTES = 16_000_000
"""Longest answer that is read from a server."""


class OpenAIBackend:
    """A server that speaks OpenAI's chat-completions protocol.

    Args:
        style: how calls are written that the server has parsed.

    Raises:
        UserError: --base-url is no address of a server, or the key can be in no HTTP header.
    """

    def __init__(self, args: Args, style: str) -> None:
        check_base_url(args.base_url)
        self.url = args.base_url.rstrip("/") + "/chat/completions"
        self.model = args.model
        self.style = style
        self.max_new_tokens = args.max_new_tokens
        self.concurrency = args.concurrency
        self.timeout_s = args.timeout_s
        self.key = os.environ.get(args.api_key_env, "")
        if not (self.key.isascii() and self.key.isprintable()):  # the key itself is never shown
            raise UserError(
                f"--api-key-env {args.api_key_env}: the key in this environment variable holds a "
                "line break or another character that keys do not have; set it again"
            )

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
        deadline = time.monotonic() + self.timeout_s
        try:
            try:
                with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
                    raw = _read(response, MAX_BODY_BYTES + 1, deadline)
            except urllib.error.HTTPError as e:
                said = _read(e, 2000, deadline).decode("utf-8", "replace")
                refused = 400 <= e.code < 500 and e.code not in TRY_LATER
                return Failure(f"HTTP {e.code}: {' '.join(said.split())[:300]}", again=not refused)
        except TimeoutError:
            return Failure(f"no whole answer within --timeout-s {self.timeout_s:g}")
        except ValueError as e:  # a redirect to what is no address
            return Failure(f"the server cannot be asked ({type(e).__name__})", again=False)
        except (OSError, http.client.HTTPException) as e:
            return Failure(f"{type(e).__name__}: {e}")
        if len(raw) > MAX_BODY_BYTES:
            return Failure(f"the answer is longer than {MAX_BODY_BYTES} bytes")
        return read_answer(raw, time.perf_counter() - started, self.style)


def check_base_url(url: str) -> None:
    """Refuse what no request can be sent to, before anything is asked.

    Raises:
        UserError: not the address of an http(s) server, or one with more than host, port, path.
    """
    given = f"--base-url {url if url.isprintable() and url.strip() else repr(url)}"
    try:
        parts = urllib.parse.urlsplit(url)
        if "@" in parts.netloc:
            given = "--base-url"  # what stands there may be a password
            raise ValueError("user names and passwords are not sent; see --api-key-env")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("no host of http or https")
        if not (url.isascii() and url.isprintable()) or " " in url:
            raise ValueError("blanks and characters outside ASCII are in no address")
        if parts.query or parts.fragment:
            raise ValueError("the path of each request is added to its end")
        parts.hostname.encode("idna")  # labels of 1 to 63 characters
        _ = parts.port  # a number below 65536
    except ValueError as e:
        raise UserError(f"{given}: give an address like http://host:port/v1 ({e})") from e


def _read(response: Any, most: int, deadline: float) -> bytes:
    """Return the first bytes of a body; the socket's own timeout bounds each piece of it.

    Raises:
        TimeoutError: the deadline (time.monotonic) has passed: the server sends drop by drop.
    """
    body = bytearray()
    while len(body) < most and (piece := response.read1(most - len(body))):
        body += piece
        if time.monotonic() > deadline:
            raise TimeoutError
    return bytes(body)


def read_answer(raw: bytes, seconds: float, style: str) -> Answer | Failure:
    """Read a chat completion; anything that is not one is a Failure."""
    try:
        reply = json.loads(raw)
        if reply.get("error"):
            return _reported(reply["error"])
        choice = reply["choices"][0]
        if choice.get("error"):
            return _reported(choice["error"])
        message = choice["message"]
        if not any(field in message for field in SPEAKS):
            raise ValueError("its message has neither content nor calls")
        usage = reply.get("usage") or {}
        content, calls = _content(message), _calls(message)
        tokens = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
    except (
        *(ValueError, KeyError, IndexError, TypeError, AttributeError),
        *(OverflowError, RecursionError),
    ) as e:
        return Failure(f"not a chat completion: {type(e).__name__}: {e}")
    reason = choice.get("finish_reason")
    if reason not in (*STOPS, *LIMITS):
        said = f"the server ended the answer with finish_reason {reason!r:.100}"
        return Failure(said, again=reason in BROKEN_OFF)
    if calls and style == "python":
        said = "the server parses calls itself: give --style hermes, not python"
        return Failure(said, again=False)
    finish = "length" if reason in LIMITS else "stop"
    return Answer(written(content, calls, style), *tokens, round(seconds, 4), finish)  # type: ignore[arg-type]


def _reported(error: Any) -> Failure:
    return Failure(f"the server reports an error: {' '.join(str(error).split())[:300]}")


def written(content: str, calls: Sequence[dict[str, Any]], style: str) -> str:
    """Return an answer as a model of this style would have written it."""
    if not calls:
        return content
    if style == "llama3":  # knows no text beside calls
        return "; ".join(
            json.dumps({"name": c["name"], "parameters": c["arguments"]}) for c in calls
        )
    if style == "nemotron":
        parts = [f"<TOOLCALL>{json.dumps(calls)}</TOOLCALL>"]
    else:
        parts = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls]
    return "\n".join([content, *parts] if content else parts)


def _content(message: dict[str, Any]) -> str:
    """Return the model's text, which may come in parts; a refusal is one too."""
    text = message.get("content") or message.get("refusal") or ""
    if isinstance(text, list):
        if any(part["type"] != "text" for part in text):
            raise TypeError("content has parts that are not text")
        text = "".join(part["text"] for part in text)
    if not isinstance(text, str):
        raise TypeError("content is not text")
    return text


def _calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    functions = [call["function"] for call in message.get("tool_calls") or []]
    if message.get("function_call"):  # the protocol's older form
        functions.append(message["function_call"])
    found = []
    for function in functions:
        arguments = function.get("arguments")
        if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
            arguments = {}  # no arguments, as some servers write it
        found.append({"name": function["name"], "arguments": arguments})
    return found
