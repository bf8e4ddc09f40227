"""The connection of a rank to the front: lines of JSON over a local socket.

The front says {"do": "make", ...}, {"do": "cancel", "job": ...} or {"do": "stop"} to rank 0. Ranks
say {"is": "ready"}, {"is": "step", ...}, {"is": "done", ...}, {"is": "failed", ...}, and, from any
rank, {"is": "alive", ...} every two seconds and {"is": "lost", ...} before it ends because of an
error that the others cannot share.
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


def told_by(file: Path) -> dict[str, Any]:
    """Returns what the front says in its file: host, port, secret, flags, texts to keep.

    Raises:
        InputError: The file is not there, or another one.
    """
    try:
        found = json.loads(file.read_text())
        return {name: found[name] for name in ("host", "port", "secret", "flags", "texts")}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise _away(str(file), error) from error


def _away(front: str, error: Exception) -> InputError:
    remedy = "start python -m wan.serve, which starts the ranks"
    return InputError(f"The front of {front} does not answer ({error})", "", remedy)


class FrontLink:
    """What a rank hears from the front, and says to it.

    Attributes:
        cancelled: The jobs that are not wanted any more.
        over: No more videos are wanted: the front has said so, or has ended.
    """

    def __init__(self, front: Mapping[str, Any], rank: int, node: int) -> None:
        """Connects.

        Args:
            front: What the front says of itself, as `told_by` returns it.
            rank: Of this process.
            node: Of the machine that it runs on; 0 is the front's.

        Raises:
            InputError: The front does not answer.
        """
        self.cancelled: set[str] = set()
        self.over = threading.Event()
        self._commands: queue.Queue[dict[str, Any]] = queue.Queue()
        self._sending = threading.Lock()
        try:
            self._socket = socket.create_connection((front["host"], front["port"]), timeout=10)
        except OSError as error:
            raise _away(f"{front['host']}:{front['port']}", error) from error
        self._socket.settimeout(None)
        self.say("hello", secret=front["secret"], rank=rank, node=node, pid=os.getpid())
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._send_heartbeats, daemon=True).start()

    def next(self, seconds: float) -> dict[str, Any] | None:
        """Returns the next command, or None if none came for so long."""
        try:
            return self._commands.get(timeout=seconds)
        except queue.Empty:
            return None

    def say(self, what: str, **more: Any) -> None:
        """Tells the front something; that it is gone is noticed where it is listened to."""
        line = json.dumps({"is": what, **more}, ensure_ascii=False, default=str)
        with self._sending, suppress(OSError):
            self._socket.sendall(line.encode() + b"\n")

    def _send_heartbeats(self) -> None:
        """Tells the front that this process runs, and whether its main thread has moved."""
        before = None
        while not self.over.wait(HEARTBEAT):
            position = _main_position()
            self.say("alive", moved=position != before)
            before = position

    def _listen(self) -> None:
        with suppress(OSError, ValueError), self._socket.makefile("rb") as file:
            for line in file:
                command = json.loads(line)
                if command["do"] == "cancel":
                    self.cancelled.add(command["job"])
                elif command["do"] == "make":
                    self._commands.put(command)
                else:
                    break
        self.over.set()
        self._commands.put({"do": "stop"})


def _main_position() -> list[tuple[int, int]]:
    """Returns the instructions that the frames of the main thread are at."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    position = []
    while frame is not None:
        position.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return position
