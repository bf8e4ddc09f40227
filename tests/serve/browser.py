"""Chromium without a window, driven over the pipes of its DevTools protocol."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--window-size=1400,1000", "--no-first-run"),
    *("--autoplay-policy=no-user-gesture-required", "--remote-debugging-pipe"),
)


class Browser:
    """A browser with one page."""

    def __init__(self, profile: Path) -> None:
        """Starts the browser. profile: A folder that it creates."""
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()

        def use_descriptors() -> None:  # commands are read from 3, and answered on 4
            copies = os.dup(commands), os.dup(answers)
            for copy, number in zip(copies, (3, 4), strict=True):
                os.dup2(copy, number)

        self._process = subprocess.Popen(
            ["chromium", *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            close_fds=False,
            preexec_fn=use_descriptors,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._file, self._last_id, self._session = os.fdopen(self._answers, "rb"), 0, ""

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        self._file.close()

    def open(self, url: str) -> None:
        """Opens an address in the page."""
        target = self._send("Target.createTarget", url=url)["targetId"]
        attached = self._send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]

    def evaluate(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression in the page."""
        answer = self._send("Runtime.evaluate", expression=expression, returnByValue=True)
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float) -> None:
        """Waits until a JavaScript expression is true."""
        deadline = time.monotonic() + seconds
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, self.evaluate("document.body.innerText")
            time.sleep(0.1)

    def _send(self, method: str, **params: Any) -> dict[str, Any]:
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = json.loads(self._read_message())
            if answer.get("id") == self._last_id:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def _read_message(self) -> bytes:
        parts = bytearray()
        while (byte := self._file.read(1)) != b"\0":
            assert byte, "the browser has ended"
            parts += byte
        return bytes(parts)
