"""A small OpenAI-compatible server of one transformers model, for the tests: stdlib only.

    python tests/eval_bfcl/chat_server.py MODEL_DIR

Prints its port, then serves `/v1/chat/completions` until it is killed.  The model's name in a
request chooses the behaviour: `tiny` answers with text, `tiny-parsed` moves parsed calls into
`tool_calls` as vLLM does, `flaky` fails the first time it sees a question, `broken` sends
something that is not a chat completion, `full` refuses as for a prompt that is too long.
"""

import hashlib
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

from eval_bfcl.backend_transformers import load
from gatewright.chat import Renderer, parse_calls


class Handler(BaseHTTPRequestHandler):
    model: Any
    renderer: Renderer
    lock = threading.Lock()
    seen: ClassVar[set[str]] = set()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = hashlib.sha256(json.dumps(body["messages"]).encode()).hexdigest()
        with self.lock:
            first = key not in self.seen
            self.seen.add(key)
        if self.path != "/v1/chat/completions" or body["temperature"] != 0:
            self.reply(404, b"{}")
        elif self.headers.get("Authorization") != "Bearer secret":
            self.reply(401, b'{"error": "no key"}')
        elif body["model"] == "full":
            self.reply(400, b'{"error": "This model\'s maximum context length is 7 tokens"}')
        elif body["model"] == "broken":
            self.reply(200, b'{"choices": [')
        elif body["model"] == "flaky" and first:
            self.reply(503, b"busy")
        else:
            self.reply(200, json.dumps(self.complete(body)).encode())

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = self.renderer.prompt_ids(body["messages"], body.get("tools"))
        with self.lock:
            import torch

            new = self.model.generate(
                torch.tensor([ids]),
                max_new_tokens=body["max_tokens"],
                do_sample=False,
                eos_token_id=self.renderer.stop_ids,
            )[0, len(ids) :].tolist()
        stopped = new[-1] in self.renderer.stop_ids
        text = self.renderer.tokenizer.decode(new[:-1] if stopped else new)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if body["model"] == "tiny-parsed":
            # A random model writes no calls: call the first tool with its text as argument.
            name = body["tools"][0]["function"]["name"]
            text = f'<tool_call>{{"name": "{name}", "arguments": {json.dumps({"said": text})}}}'
            message["content"] = None
            message["tool_calls"] = [
                {
                    "id": "0",
                    "type": "function",
                    "function": {"name": c.name, "arguments": json.dumps(c.arguments)},
                }
                for c in parse_calls(text).calls
            ]
        return {
            "choices": [{"message": message, "finish_reason": "stop" if stopped else "length"}],
            "usage": {"prompt_tokens": len(ids), "completion_tokens": len(new)},
        }

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def main(folder: str) -> None:
    from pathlib import Path

    Handler.model = load(Path(folder), "float32")
    Handler.renderer = Renderer.load(folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1])
