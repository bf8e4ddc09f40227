"""A real service for tests: a forked front process, its ranks, and requests to it."""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import openai

from benchmarks.service_process import PROMPT as PROMPT
from benchmarks.service_process import ServiceClient
from tests.dist import TORCHRUN, Ranks, free_port, make_rank_envs
from tests.frames import read_frames
from wan.cli.main import main

GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


def open_connection(port: int, sent: bytes = b"") -> socket.socket:
    """Opens a connection and sends some bytes."""
    client = socket.create_connection(("127.0.0.1", port), timeout=10)
    client.sendall(sent)
    return client


def receive_all(client: socket.socket) -> bytes:
    """Receives until the server closes the connection."""
    parts = []
    with suppress(ConnectionResetError):
        while part := client.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def make_post_request(length: int, content: bytes = b"", path: str = "/upload") -> bytes:
    """Returns the headers of a body of `length` bytes, and a part of the body."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n"
    return head.encode() + content


def generate_frames(path: Path, *flags: object, ranks: int = 1) -> np.ndarray:
    """Returns the frames that generate.py generates with the same settings."""
    argv = [*map(str, [*flags, "--save_file", path])]
    with Ranks(make_rank_envs(ranks) if ranks > 1 else [{}], main, argv) as processes:
        assert processes.wait_for_exit(300) == [0] * ranks, processes.format_outputs()
    return read_frames(path)


def _run_front(argv: Sequence[str], python: str) -> int:
    """Runs the front process. python: Starts the ranks."""
    from wan.serve.__main__ import run_service_cli

    sys.executable = python
    return run_service_cli(argv)


def _run_forked_rank(front: Path, modules: Path | None) -> int:
    """Runs a rank of the service, with the output of one that torchrun has started."""
    from wan.serve.ranks.__main__ import run_rank

    with (front.parent / "ranks.log").open("ab") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    if modules is not None:
        runpy.run_path(str(modules / "sitecustomize.py"))
    return run_rank(front)


_PYTHON = """#!PYTHON -S
# In place of Python with torchrun: the process of the tests forks the ranks, which is faster.
import socket, sys

with socket.create_connection(("127.0.0.1", PORT)) as link:
    link.sendall(" ".join(sys.argv).encode() + b"\\n")
    sys.exit(link.recv(1) != b"0")
"""


class RankForks:
    """Starts groups of ranks as torchrun does, by forks of a process that has imported torch.

    Attributes:
        python: The program that a front starts in place of Python.
        pids: Process ids of the last group.
    """

    def __init__(self, folder: Path, modules: Path | None) -> None:
        """Starts nothing; a front does. modules: As `path` of `ServiceProcess`."""
        self._modules, self.pids = modules, list[int]()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.python = folder / "python"
        text = _PYTHON.replace("PYTHON", sys.executable, 1)
        self.python.write_text(text.replace("PORT", str(self._listener.getsockname()[1])))
        self.python.chmod(0o755)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            link, _ = self._listener.accept()
            threading.Thread(target=self._run_group, args=(link,), daemon=True).start()

    def _run_group(self, link: socket.socket) -> None:
        """Runs ranks until all have ended; ends them if one fails, or if the program is killed."""
        with link, link.makefile() as file:
            argv = file.readline().split()
            (count,) = [int(x.partition("=")[2]) for x in argv if x.startswith("--nproc_per_node=")]
            work = _run_forked_rank, Path(argv[-1]), self._modules
            processes = Ranks(make_rank_envs(count), *work).processes
            self.pids = [process.pid for process in processes]
            link.setblocking(False)
            codes: list[int | None] = [None]
            while None in codes:
                time.sleep(0.02)
                codes = [process.exitcode for process in processes]
                if any(codes) or _is_closed(link):
                    for process in processes:
                        process.terminate()
            with suppress(OSError):
                link.sendall(b"1" if any(codes) else b"0")


def _is_closed(link: socket.socket) -> bool:
    try:
        return not link.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True


class ServiceProcess(ServiceClient):
    """A running service with its files in a folder; it can be killed and restarted."""

    def __init__(
        self,
        folder: Path,
        ranks: int = 1,
        options: Sequence[object] = (),
        flags: Sequence[object] = (),
        path: Path | None = None,
        key: str = "none",
        is_forked: bool = False,
    ) -> None:
        """Starts the service.

        Args:
            folder: The folder of --journal.
            ranks: Number of ranks.
            options: Further options of the service.
            flags: Flags of generate.py.
            path: A folder of modules, first in the import path of the ranks.
            key: The API key.
            is_forked: Whether `RankForks` starts the ranks, not torchrun.
        """
        super().__init__(folder, int(free_port()), key)
        paths = [*([str(path)] if path else []), TORCHRUN["PYTHONPATH"]]
        self._environment = TORCHRUN | {"PYTHONPATH": os.pathsep.join(paths)}
        service_args = ["--port", self.port, "--ranks", ranks, "--journal", folder, *options]
        sizes = ["--ulysses_size", ranks] if ranks > 1 else []
        self._argv = [*map(str, [*service_args, "--", *sizes, *flags])]
        self._forks = RankForks(folder.parent, path) if is_forked else None
        self.start()

    def start(self, seconds: float = 120) -> None:
        """Starts the front, and waits until its ranks are ready."""
        python = sys.executable if self._forks is None else str(self._forks.python)
        self._front = Ranks([self._environment], _run_front, self._argv, python)
        self.front = self._front.processes[0]
        self.wait(lambda: self.health().get("status") == "ok", seconds)

    def __enter__(self) -> ServiceProcess:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        code = self.stop()
        assert kind is not None or (code == 0 and not self.list_rank_pids()), self.read_logs()

    def is_running(self) -> bool:
        return bool(self.front.is_alive())

    def count_tracebacks(self) -> int:
        """Returns the number of tracebacks in the output of the front since its last start."""
        return self._front.texts[0].count("Traceback")

    def read_logs(self) -> str:
        """Returns the last lines of the output of the front and of the log of the ranks."""
        return f"{self._front.texts[0][-5000:]}\n{super().read_logs()}"

    def client(self) -> Any:
        """Returns OpenAI's client; its types allow only OpenAI's sizes."""
        return openai.OpenAI(api_key=self._key, base_url=f"{self.url}/v1")

    def list_rank_pids(self) -> list[int]:
        """Returns the process ids of the ranks."""
        if self._forks is not None:
            return sorted(pid for pid in self._forks.pids if Path(f"/proc/{pid}").exists())
        return super().list_rank_pids()

    def kill(self) -> None:
        """Kills the front."""
        self.front.kill()
        self.front.join()

    def stop(self) -> int:
        """Stops the service as an operator does; returns its exit code."""
        if self.front.is_alive():
            os.kill(self.front.pid, signal.SIGTERM)
        self.front.join(60)
        code: int | None = self.front.exitcode
        assert code is not None, self.read_logs()
        return code


_FAULTS = '''
import importlib, json, os, signal, sys

FAULT = os.path.join(os.path.dirname(__file__), "fault.json")

def _break(place):
    """Has a function fail once in this rank when a file asks for it."""
    module, _, name = place.partition(":")
    owner, (*outer, last) = importlib.import_module(module), name.split(".")
    for one in outer:
        owner = getattr(owner, one)
    original = getattr(owner, last)

    def broken(*args, **kwargs):
        if not os.path.exists(FAULT):
            return original(*args, **kwargs)
        with open(FAULT) as file:
            fault = json.load(file)
        if (fault["at"], fault["rank"]) != (place, int(os.environ["RANK"])):
            return original(*args, **kwargs)
        if fault["after"]:
            original(*args, **kwargs)
        os.unlink(FAULT)
        if fault["do"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise MemoryError if fault["do"] == "memory" else RuntimeError("a fault")

    setattr(owner, last, broken)

if os.environ.get("RANK") and "torch.distributed.run" not in " ".join(sys.orig_argv):
    for place in PLACES:
        _break(place)
'''


class Faults:
    """A folder of modules that make a function of a rank fail on demand."""

    def __init__(self, folder: Path, *targets: str) -> None:
        """Writes the modules. targets: The functions that can fail, as "module:name"."""
        self.path, self._file = folder, folder / "fault.json"
        folder.mkdir()
        text = _FAULTS.replace("PLACES", repr(targets))
        (folder / "sitecustomize.py").write_text(text)

    def arm(self, rank: int, at: str, do: str, after: bool = False) -> None:
        """Makes a function fail once in a rank.

        do: "kill", "raise" or "memory" (out of memory). after: Fail when the function returns.
        """
        fault = {"rank": rank, "at": at, "do": do, "after": after}
        written = self._file.with_name("new.json")
        written.write_text(json.dumps(fault))
        written.rename(self._file)

    @property
    def is_armed(self) -> bool:
        """Whether the fault has not happened yet."""
        return self._file.exists()
