"""The connection of a rank to the front: lines of JSON over a local socket.

The front says {"do": "make", ...}, {"do": "cancel", "job": ...} or {"do": "stop"} to rank 0. Ranks
say {"is": "ready"}, {"is": "step", ...}, {"is": "done", ...}, {"is": "failed", ...}, and, from any
rank, {"is": "lost", ...} before it ends because of an error that the others cannot share.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from wan.settings.errors import InputError


class FrontLink:
    """What a rank hears from the front, and says to it.

    Attributes:
        cancelled: The jobs that are not wanted any more.
        over: No more videos are wanted: the front has said so, or has ended.
    """

    def __init__(self, front: Path, rank: int) -> None:
        """Connects.

        Args:
            front: The file in which the front says its port and its secret.
            rank: Of this process.

        Raises:
            InputError: The front does not answer.
        """
        self.cancelled: set[str] = set()
        self.over = threading.Event()
        self._commands: queue.Queue[dict[str, Any]] = queue.Queue()
        self._sending = threading.Lock()
        try:
            told = json.loads(front.read_text())
            self._socket = socket.create_connection(("127.0.0.1", told["port"]), timeout=10)
        except (OSError, ValueError) as error:
            remedy = "start python -m wan.serve, which starts the ranks"
            raise InputError(
                f"The front of {front} does not answer ({error})", "", remedy
            ) from error
        self._socket.settimeout(None)
        self.say("hello", secret=told["secret"], rank=rank, pid=os.getpid())
        threading.Thread(target=self._listen, daemon=True).start()

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
