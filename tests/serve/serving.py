"""A real service for tests: `python -m wan.serve` in processes of its own, and requests to it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai

from tests.dist import TORCHRUN

PROMPT = "a large green square moves up on a gray background"


class Served:
    """A service in a folder; it may be killed and started again."""

    def __init__(
        self,
        folder: Path,
        ranks: int = 1,
        options: Sequence[object] = (),
        flags: Sequence[object] = (),
        path: Path | None = None,
        key: str = "none",
    ) -> None:
        """Starts it. path: a folder of modules that Python finds first. key: for its interface."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.folder, self.url, self._key = folder, f"http://127.0.0.1:{self.port}", key
        paths = [*([str(path)] if path else []), TORCHRUN["PYTHONPATH"]]
        own = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(paths)}
        own |= {"HOME": os.environ.get("HOME", "/root")}
        self._environment = TORCHRUN | own
        own_options = ["--port", self.port, "--ranks", ranks, "--journal", folder, *options]
        sizes = ["--ulysses_size", ranks] if ranks > 1 else []
        self._command = [sys.executable, "-m", "wan.serve", *own_options, "--", *sizes, *flags]
        self.start()

    def start(self) -> None:
        """Starts the front, and waits until its ranks can make videos."""
        with (self.folder.parent / f"{self.folder.name}.log").open("ab") as log:
            self.front = subprocess.Popen(
                [*map(str, self._command)], env=self._environment, stdout=log, stderr=log
            )
        self.wait(lambda: self.health().get("status") == "ok", 120)

    def wait(self, whether: Callable[[], Any], seconds: float = 60) -> None:
        """Waits until something holds."""
        deadline = time.monotonic() + seconds
        while not whether():
            assert self.front.poll() is None, f"the front has ended\n{self.said()}"
            assert time.monotonic() < deadline, f"waited {seconds} s\n{self.said()}"
            time.sleep(0.05)

    def said(self) -> str:
        """Returns the ends of both logs."""
        logs = (self.folder.parent / f"{self.folder.name}.log", self.folder / "ranks.log")
        return "\n".join(log.read_text()[-5000:] for log in logs if log.exists())

    def ask(
        self, path: str, body: Any = None, method: str | None = None, **headers: str
    ) -> tuple[int, Any, Any]:
        """Returns status, headers and content, which is decoded where it is JSON."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, method=method)
        request.add_header("Content-Type", "application/json")
        for name, value in {"Authorization": f"Bearer {self._key}", **headers}.items():
            request.add_header(name.replace("_", "-"), value)
        try:
            answer = urllib.request.urlopen(request, timeout=60)
        except urllib.error.HTTPError as error:
            answer = error
        content = answer.read()
        is_json = answer.headers.get_content_type() == "application/json"
        return answer.status, answer.headers, json.loads(content) if is_json else content

    def form(self, path: str, fields: Mapping[str, Any]) -> tuple[int, Any, Any]:
        """Asks with a form of texts, of bytes, which are files, and of lists of them."""
        lines = []
        each = {name: one if isinstance(one, list) else [one] for name, one in fields.items()}
        for name, value in ((name, value) for name, values in each.items() for value in values):
            end = f'; filename="{name}"' if isinstance(value, bytes) else ""
            head = f'--edge\r\nContent-Disposition: form-data; name="{name}"{end}\r\n\r\n'
            content = value if isinstance(value, bytes) else value.encode()
            lines += [head.encode(), content, b"\r\n"]
        body = b"".join([*lines, b"--edge--\r\n"])
        return self.ask(path, body, Content_Type="multipart/form-data; boundary=edge")

    def health(self) -> dict[str, Any]:
        """Returns what /health says, {} while nobody answers."""
        try:
            return self.ask("/health")[2]
        except OSError:
            return {}

    def client(self) -> openai.OpenAI:
        """Returns the real client."""
        return openai.OpenAI(api_key=self._key, base_url=f"{self.url}/v1")

    def create(self, **fields: Any) -> str:
        """Queues a video and returns its id."""
        body = {"prompt": PROMPT, "num_frames": 5, "num_inference_steps": 2} | fields
        status, _, video = self.ask("/v1/videos", body)
        assert status == 200, video
        return video["id"]

    def status(self, video: str) -> str:
        """Returns the status of a video."""
        return self.ask(f"/v1/videos/{video}")[2]["status"]

    def ended(self, video: str, seconds: float = 90) -> dict[str, Any]:
        """Waits until a video is completed or has failed, and returns it."""
        self.wait(lambda: self.status(video) in ("completed", "failed"), seconds)
        return self.ask(f"/v1/videos/{video}")[2]

    def ranks(self) -> list[int]:
        """Returns the processes of the ranks."""
        found = []
        for process in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                words = process.read_bytes().decode(errors="replace").split("\0")
                own = str(self.folder / "front.json") in words
                if own and "torch.distributed.run" not in words:
                    found.append(int(process.parent.name))
        return sorted(found)

    def kill(self) -> None:
        """Kills the front."""
        self.front.send_signal(signal.SIGKILL)
        self.front.wait()

    def stop(self) -> int:
        """Stops the service as an operator does; returns its exit code."""
        if self.front.poll() is None:
            self.front.send_signal(signal.SIGTERM)
        return self.front.wait(60)


_FAULTS = '''
import importlib, json, os, signal, sys

def _break(fault, path):
    """Fails once in this rank where a file asks for it."""
    module, _, name = fault["at"].partition(":")
    owner, (*outer, last) = importlib.import_module(module), name.split(".")
    for one in outer:
        owner = getattr(owner, one)
    original = getattr(owner, last)

    def broken(*args, **kwargs):
        if not os.path.exists(path):
            return original(*args, **kwargs)
        if fault["after"]:
            original(*args, **kwargs)
        os.unlink(path)
        if fault["do"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise MemoryError if fault["do"] == "memory" else RuntimeError("a fault")

    setattr(owner, last, broken)

if os.environ.get("RANK") and "torch.distributed.run" not in " ".join(sys.orig_argv):
    path = os.path.join(os.path.dirname(__file__), "fault.json")
    if os.path.exists(path):
        with open(path) as file:
            fault = json.load(file)
        if int(os.environ["RANK"]) == fault["rank"]:
            _break(fault, path)
'''


def breaking(folder: Path, **fault: Any) -> Path:
    """Returns a folder of modules with which one rank fails once: kill, raise, or no memory left.

    fault: rank; at: "module:name"; do: "kill", "raise" or "memory"; after: when that has returned.
    """
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_FAULTS)
    (folder / "fault.json").write_text(json.dumps(fault))
    return folder
