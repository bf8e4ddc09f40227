"""A receiver of webhooks for tests."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Receiver(ThreadingHTTPServer):
    """Receives webhooks in a thread.

    Attributes:
        statuses: Statuses of the next answers, 200 after them; 0: no answer.
        received: Headers and body of each request.
        accepted: Those that were answered with 200, before the answer was sent.
    """

    def __init__(self) -> None:
        self.statuses: Iterator[int] = iter(())
        self.received: list[tuple[dict[str, str], bytes]] = []
        self.accepted: list[tuple[dict[str, str], bytes]] = []
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://localhost:{self.server_port}/hook?token=private"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def list_events(self, only_accepted: bool = False) -> list[tuple[str, str]]:
        """Returns the type and the job of each event."""
        requests = self.accepted if only_accepted else self.received
        events = [json.loads(body) for _, body in [*requests]]
        return [(event["type"], event["data"]["id"]) for event in events]


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        status, request = next(self.server.statuses, 200), (dict(self.headers.items()), body)
        self.server.received.append(request)
        if status == 200:
            self.server.accepted.append(request)
        if status:
            self.send_response(status)
            self.send_header("location", "/elsewhere")
            self.end_headers()
            self.wfile.write(b"x" * 100_000 * (len(self.server.received) % 2))

    def do_GET(self) -> None:
        raise AssertionError("a redirect was followed")

    def log_message(self, *_: Any) -> None: ...
