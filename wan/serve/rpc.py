"""Connection of a rank to the front: lines of JSON over a TCP socket.

The front sends {"do": "make", ...}, {"do": "cancel", "job": ...} or {"do": "stop"} to rank 0.
Every rank sends {"is": "hello", ...} first, {"is": "ready"} after loading, {"is": "step", ...}
before each denoising step and after the last, {"is": "alive", ...} every two seconds, and
{"is": "lost", ...} before it exits because of an error that ends the whole group. Rank 0 also sends
{"is": "stage", ...} when a stage of a video begins, {"is": "preview", ...} after it has written
one, {"is": "done", ...} and {"is": "failed", ...}.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from wan.serve.monitor import HEARTBEAT
from wan.settings.errors import InputError


def read_front_file(file: Path) -> dict[str, Any]:
    """Reads front.json: host, port, secret, settings, and texts (the number of cached prompts).

    Raises:
        InputError: The file is missing or invalid.
    """
    try:
        front = json.loads(file.read_text())
        return {name: front[name] for name in ("host", "port", "secret", "settings", "texts")}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise _make_front_error(str(file), error) from error


def _make_front_error(front: str, error: Exception) -> InputError:
    remedy = "start python -m wan.serve, which starts the ranks"
    return InputError(f"The front of {front} does not answer ({error})", "", remedy)


class FrontLink:
    """Sends messages of a rank to the front and receives its commands.

    Attributes:
        cancelled: Ids of cancelled jobs.
        stop_event: Set when the front sends "stop" or closes the connection.
    """

    def __init__(self, front: Mapping[str, Any], rank: int, node: int) -> None:
        """Connects to the front.

        Args:
            front: The result of `read_front_file`.
            rank: Rank of this process.
            node: Node of this process; 0 is the machine of the front.

        Raises:
            InputError: The front does not answer.
        """
        self.cancelled: set[str] = set()
        self.stop_event = threading.Event()
        self._commands: queue.Queue[dict[str, Any]] = queue.Queue()
        self._send_lock = threading.Lock()
        try:
            self._socket = socket.create_connection((front["host"], front["port"]), timeout=10)
        except OSError as error:
            raise _make_front_error(f"{front['host']}:{front['port']}", error) from error
        self._socket.settimeout(None)
        self.send("hello", secret=front["secret"], rank=rank, node=node, pid=os.getpid())
        threading.Thread(target=self._read_commands, daemon=True).start()
        threading.Thread(target=self._send_heartbeats, daemon=True).start()

    def next_command(self, seconds: float) -> dict[str, Any] | None:
        """Returns the next command; None if there is none within `seconds`."""
        try:
            return self._commands.get(timeout=seconds)
        except queue.Empty:
            return None

    def send(self, message_type: str, **payload: Any) -> None:
        """Sends a message to the front. A closed connection is detected by the reader."""
        line = json.dumps({"is": message_type, **payload}, ensure_ascii=False, default=str)
        with self._send_lock, suppress(OSError):
            self._socket.sendall(line.encode() + b"\n")

    def _send_heartbeats(self) -> None:
        """Sends heartbeats, with whether the main thread has moved since the last one."""
        last_position = None
        while not self.stop_event.wait(HEARTBEAT):
            position = _get_main_position()
            self.send("alive", moved=position != last_position)
            last_position = position

    def _read_commands(self) -> None:
        with suppress(OSError, ValueError), self._socket.makefile("rb") as file:
            for line in file:
                command = json.loads(line)
                if command["do"] == "cancel":
                    self.cancelled.add(command["job"])
                elif command["do"] == "make":
                    self._commands.put(command)
                else:
                    break
        self.stop_event.set()
        self._commands.put({"do": "stop"})


def _get_main_position() -> list[tuple[int, int]]:
    """Returns code object and instruction of each frame of the main thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    position = []
    while frame is not None:
        position.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return position
