"""A running `python -m wan.serve`, and requests to it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
PROMPT = "a large green square moves up on a gray background"


class ServiceClient:
    """Sends requests to a service of this machine whose journal is in a folder."""

    def __init__(self, folder: Path, port: int, key: str = "none") -> None:
        """Sends nothing. folder: That of --journal. key: The API key."""
        self.folder, self.port, self._key = folder, port, key
        self.url = f"http://127.0.0.1:{port}"

    def is_running(self) -> bool:
        """Whether the HTTP process of the service runs."""
        return True

    def read_logs(self) -> str:
        """Returns the last lines of the log of the ranks."""
        log = self.folder / "ranks.log"
        return log.read_text()[-5000:] if log.exists() else ""

    def wait(self, whether: Callable[[], Any], seconds: float = 60) -> None:
        """Waits until a condition holds."""
        deadline = time.monotonic() + seconds
        while not whether():
            assert self.is_running(), f"the front has ended\n{self.read_logs()}"
            assert time.monotonic() < deadline, f"waited {seconds} s\n{self.read_logs()}"
            time.sleep(0.05)

    def request(
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

    def health(self) -> dict[str, Any]:
        """Returns the answer of /health, or {} if the service does not answer."""
        try:
            answer: dict[str, Any] = self.request("/health")[2]
        except OSError:
            return {}
        return answer

    def create(self, **fields: Any) -> str:
        """Queues a video and returns its id."""
        body = {"prompt": PROMPT, "num_frames": 5, "num_inference_steps": 2} | fields
        status, _, video = self.request("/v1/videos", body)
        assert status == 200, video
        return str(video["id"])

    def status(self, video: str) -> str:
        """Returns the status of a video."""
        return str(self.request(f"/v1/videos/{video}")[2]["status"])

    def wait_for_video(self, video: str, seconds: float = 90) -> dict[str, Any]:
        """Waits until a video is completed or has failed, and returns it."""
        self.wait(lambda: self.status(video) in ("completed", "failed"), seconds)
        answer: dict[str, Any] = self.request(f"/v1/videos/{video}")[2]
        return answer

    def list_rank_pids(self) -> list[int]:
        """Returns the process ids of the ranks."""
        pids = []
        for process in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                argv = process.read_bytes().decode(errors="replace").split("\0")
                is_rank = str(self.folder / "front.json") in argv
                if is_rank and "torch.distributed.run" not in argv:
                    pids.append(int(process.parent.name))
        return sorted(pids)


class LocalService(ServiceClient):
    """A service that can be killed and restarted; its output is beside its folder, front.log."""

    def __init__(self, folder: Path, ranks: int = 1, options: Sequence[object] = ()) -> None:
        """Starts the service.

        Args:
            folder: The folder of --journal.
            ranks: Number of ranks.
            options: Further options of the service.
        """
        with socket.create_server(("127.0.0.1", 0)) as probe:
            super().__init__(folder, probe.getsockname()[1])
        arguments = ["--port", self.port, "--ranks", ranks, "--journal", folder, *options]
        arguments += ["--", "--ulysses_size", ranks] if ranks > 1 else []
        self._command = [sys.executable, "-m", "wan.serve", *map(str, arguments)]
        self._log = folder.with_name(f"{folder.name}.front.log")
        self.start()

    def start(self, seconds: float = 120) -> None:
        """Starts the front, and waits until its ranks are ready."""
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with self._log.open("wb") as log:
            self.front = subprocess.Popen(
                self._command, stdout=log, stderr=log, cwd=REPO, env=environment
            )
        self.wait(lambda: self.health().get("status") == "ok", seconds)

    def is_running(self) -> bool:
        return self.front.poll() is None

    def read_logs(self) -> str:
        """Returns the last lines of the output of the front and of the log of the ranks."""
        return f"{self._log.read_text()[-5000:]}\n{super().read_logs()}"

    def count_tracebacks(self) -> int:
        """Returns the number of tracebacks in the output of the front since its last start."""
        return self._log.read_text().count("Traceback")

    def kill(self) -> None:
        """Kills the front."""
        self.front.kill()
        self.front.wait()

    def stop(self) -> int:
        """Stops the service as an operator does; returns its exit code."""
        self.front.terminate()
        return self.front.wait(60)
