"""A headless Chromium, spoken to through its debugging pipe: stdlib only."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--remote-debugging-pipe", "--window-size=1280,900"),
)

# The browser reads commands from descriptor 3 and answers on 4.
LAUNCH = """
import os, sys
os.dup2(int(sys.argv[1]), 100)
os.dup2(int(sys.argv[2]), 101)
os.dup2(100, 3)
os.dup2(101, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Page:
    """One tab, driven by Chrome DevTools Protocol messages."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._buffer = b""
        self._id = 0
        self.events: list[dict[str, Any]] = []
        target = self._send("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = self._send("Target.attachToTarget", {"targetId": target, "flatten": True})
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._send(method, params or {}, self._session)

    def _send(
        self, method: str, params: dict[str, Any], session: str | None = None
    ) -> dict[str, Any]:
        self._id += 1
        message: dict[str, Any] = {"id": self._id, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._receive()
            if reply.get("id") == self._id:
                assert "error" not in reply, reply["error"]
                return reply["result"]
            self.events.append(reply)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._read, 1 << 20)
            assert part, "Chromium closed the pipe"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        reply = self.send("Runtime.evaluate", {"expression": expression, "returnByValue": True})
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def open(self, path: Path) -> None:
        self.send("Page.navigate", {"url": path.resolve().as_uri()})
        deadline = time.monotonic() + 300
        while self.run("document.body && document.body.dataset.ready") != "yes":
            assert time.monotonic() < deadline, "the page did not become ready"
            time.sleep(0.05)

    def press(self, key: str, text: str = "") -> None:
        code = {"Tab": 9, "Enter": 13, "ArrowDown": 40, "ArrowUp": 38, "Home": 36, "End": 35}
        params = {"key": key, "code": key, "windowsVirtualKeyCode": code.get(key, 0)}
        if text:
            params |= {"text": text}
        self.send("Input.dispatchKeyEvent", {"type": "keyDown", **params})
        self.send("Input.dispatchKeyEvent", {"type": "keyUp", **params})

    def scheme(self, value: str) -> None:
        """Choose the reader's colour scheme: light or dark."""
        features = [{"name": "prefers-color-scheme", "value": value}]
        self.send("Emulation.setEmulatedMedia", {"features": features})

    def screenshot(self, path: Path) -> None:
        import base64

        data = self.send("Page.captureScreenshot", {"captureBeyondViewport": True})["data"]
        path.write_bytes(base64.b64decode(data))


@contextlib.contextmanager
def chromium() -> Iterator[Page]:
    """Start Chromium with an empty profile and yield a tab of it."""
    assert CHROMIUM is not None
    # Chromium's helper processes may still be writing into the profile while it is removed.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        to_browser, our_write = os.pipe()
        our_read, from_browser = os.pipe()
        start = [sys.executable, "-c", LAUNCH, str(to_browser), str(from_browser)]
        process = subprocess.Popen(
            [*start, CHROMIUM, *FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        try:
            yield Page(our_read, our_write)
        finally:
            process.kill()
            process.wait()
            os.close(our_write)
            os.close(our_read)
