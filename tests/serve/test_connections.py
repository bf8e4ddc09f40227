"""Limits of connections, with real sockets: who is closed, when, and who never is."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from tests.dist import REPO
from tests.serve.serving import Served
from wan.serve import connections
from wan.serve.connections import Connections, count_connections, make_server, open_sockets

HEADER = 0.5  # seconds for headers in these tests
SOON = 4.0  # seconds in which what is too slow must be closed
BIG = 64 << 20  # more than the buffers of two sockets
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
Start = Callable[..., int]


class Work(threading.Event):
    """Set when /work is to answer. begun: how many requests wait for that."""

    begun = 0

    def wait_for(self, count: int) -> None:
        """Waits until so many requests are worked on."""
        deadline = time.monotonic() + 10
        while self.begun < count:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def application(stop: Work) -> Starlette:
    """Answers at once, after a body, with a large answer, or when the test says so."""

    async def health(_: Request) -> Response:
        return PlainTextResponse("ok")

    async def upload(request: Request) -> Response:
        with suppress(ClientDisconnect):
            return PlainTextResponse(str(len(await request.body())))
        return Response(status_code=400)

    async def big(_: Request) -> Response:
        return Response(bytes(BIG))

    async def work(_: Request) -> Response:
        stop.begun += 1
        while not stop.is_set():
            await asyncio.sleep(0.02)
        return PlainTextResponse("done")

    routes = [Route("/health", health), Route("/big", big), Route("/work", work)]
    return Starlette(routes=[*routes, Route("/upload", upload, methods=["POST"])])


@pytest.fixture
def done() -> Work:
    """Set when /work is to answer."""
    return Work()


@pytest.fixture
def start(done: Work, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a server with short limits in a thread; returns its port."""
    values = {"HEADER_SECONDS": HEADER, "IDLE_SECONDS": 1, "BODY_SECONDS": 1.0}
    values |= {"BODY_PAUSE": 1.0, "UNREAD_SECONDS": 1.0}
    for name, value in values.items():
        monkeypatch.setattr(connections, name, value)
    made: list[tuple[Any, threading.Thread]] = []

    def started(most: int) -> int:
        limits = Connections(most, HEADER)
        server = make_server(application(done), limits)
        sockets = open_sockets("127.0.0.1", 0, limits)
        thread = threading.Thread(target=server.run, args=(sockets,))
        thread.start()
        made.append((server, thread))
        while not server.started:
            time.sleep(0.01)
        return int(sockets[0].getsockname()[1])

    yield started
    done.set()
    for server, thread in made:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


def opened(port: int, sent: bytes = b"") -> socket.socket:
    """A connection that has sent something."""
    client = socket.create_connection(("127.0.0.1", port), timeout=10)
    client.sendall(sent)
    return client


def received(client: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    parts = []
    try:
        while part := client.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def answer(port: int, request: bytes = GET) -> bytes:
    """The answer to one request."""
    with opened(port, request.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1)) as client:
        return received(client)


def post(length: int, content: bytes = b"") -> bytes:
    head = f"POST /upload HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n"
    return head.encode() + content


SLOW = {  # what a client sends -> the answer that it gets
    "nothing": (b"", b""),
    "a part of its headers": (b"GET /health HTTP/1.1\r\nhost: loc", b"408"),
    "a line that goes on": (b"GET /" + b"x" * 2000, b"408"),
    "no body": (post(1000), b"408"),
    "a part of its body": (post(1000, b"x" * 999), b"408"),
    "much of its body": (post(100_000, b"x" * 50_000), b"408"),
}


@pytest.mark.parametrize("sent", SLOW)
def test_a_client_that_stops_is_closed(sent: str, start: Start) -> None:
    content, status = SLOW[sent]
    with opened(start(100), content) as client:
        began = time.monotonic()
        found = received(client)
    assert time.monotonic() - began < SOON
    assert found.split(b"\r\n")[0] == (b"HTTP/1.1 408 Request Timeout" if status else b"")


@pytest.mark.parametrize("path", ["headers", "body"])
def test_a_client_that_sends_byte_by_byte_is_closed(path: str, start: Start) -> None:
    """Each byte comes soon after the last one, and the whole never."""
    content = post(100_000) if path == "body" else b"GET /health HTTP/1.1\r\n"
    with opened(start(100), content) as client:
        began = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() - began < SOON:
                client.sendall(b"x")
                time.sleep(0.05)
        assert time.monotonic() - began < SOON


def test_an_honest_slow_upload_is_taken(start: Start) -> None:
    """3 750 bytes a second, where 1 000 are asked for, for longer than any other limit."""
    with opened(start(100), post(9000)) as client:
        for _ in range(24):
            time.sleep(0.1)
            client.sendall(bytes(375))
        assert b" 200 OK" in client.recv(100)


def test_an_answer_that_is_not_read_is_given_up(start: Start) -> None:
    port = start(100)
    with opened(port, GET.replace(b"health", b"big")) as client:
        time.sleep(3)
        assert len(received(client)) < BIG
    found = answer(port, GET.replace(b"health", b"big"))  # and one that is read is whole
    assert len(found) - found.index(b"\r\n\r\n") - 4 == BIG


def test_requests_that_follow_each_other(start: Start) -> None:
    """On one connection, one after the other and at once; then it is idle, and closed."""
    with opened(start(100)) as client:
        for number in (1, 2, 3):
            client.sendall(GET * number)
            found = b""
            while found.count(b"\r\n\r\nok") < number:
                found += client.recv(1 << 16)
            time.sleep(HEADER / 2)
        began = time.monotonic()
        assert received(client) == b"" and time.monotonic() - began < SOON


def test_silent_connections_keep_nobody_out(start: Start) -> None:
    """Three times as many as may be open: the service answers at once, and again later."""
    port = start(20)
    silent = [opened(port) for _ in range(60)]
    try:
        for _ in range(10):
            began = time.monotonic()
            assert b" 200 OK" in answer(port)
            assert time.monotonic() - began < 1
    finally:
        for one in silent:
            one.close()


def test_nobody_is_closed_where_nobody_comes(start: Start) -> None:
    """As many connections as may be open are open, and no more want to be."""
    port = start(4)
    clients = [opened(port) for _ in range(4)]
    for client in clients:
        client.settimeout(0.05)
        with pytest.raises(TimeoutError):
            client.recv(1)
    for client in clients:
        client.close()


def test_work_is_never_closed_for_others(start: Start, done: Work) -> None:
    """Jobs outlast every limit of time, while silent clients come and go."""
    port = start(12)
    working = [opened(port, GET.replace(b"health", b"work")) for _ in range(8)]
    done.wait_for(8)
    silent = [opened(port) for _ in range(40)]
    assert b" 200 OK" in answer(port)
    time.sleep(HEADER + 1.5)
    assert b" 200 OK" in answer(port)
    done.set()
    for one in (*working, *silent):
        if one in working:
            one.settimeout(SOON)
            assert b"done" in one.recv(1000) or b"done" in one.recv(1000)
        one.close()


def test_when_all_work_others_are_turned_away(start: Start, done: Work) -> None:
    port = start(8)
    working = [opened(port, GET.replace(b"health", b"work")) for _ in range(8)]
    done.wait_for(8)
    with opened(port, GET) as more:
        assert b" 200 OK" not in received(more)
    done.set()
    for one in working:
        assert b"done" in one.recv(1000) or b"done" in one.recv(1000)
        one.close()
    time.sleep(0.2)
    assert b" 200 OK" in answer(port)


def test_what_many_clients_do_is_logged_once(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("wan"), "propagate", True)
    port = start(8)
    for _ in range(100):
        opened(port).close()
        answer(port, b"not http at all\r\n\r\n")
    silent = [opened(port) for _ in range(50)]
    assert b" 200 OK" in answer(port)
    for one in silent:
        one.close()
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) <= 3, said


WITHOUT_DESCRIPTORS = """
import asyncio, logging, sys
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from wan.serve.connections import Connections, make_server, open_sockets

logging.basicConfig(stream=sys.stderr)
async def health(request):
    return PlainTextResponse("ok")

limits = Connections(1000)
sockets = open_sockets("127.0.0.1", 0, limits)
print(sockets[0].getsockname()[1], flush=True)
make_server(Starlette(routes=[Route("/health", health)]), limits).run(sockets)
"""


def test_without_file_descriptors(tmp_path: Path) -> None:
    """More connections than descriptors: one line, no busy loop, and an answer afterwards."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))

    log = tmp_path / "log"
    command = [sys.executable, "-c", WITHOUT_DESCRIPTORS]
    with (
        log.open("wb") as file,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=file, cwd=REPO, preexec_fn=limit, text=True
        ) as server,
    ):
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            time.sleep(0.5)
            silent = [opened(port) for _ in range(80)]
            before = cpu_seconds(server.pid)
            time.sleep(1)
            assert cpu_seconds(server.pid) - before < 0.3
            assert log.read_text().count("\n") == 1, log.read_text()
            for one in silent:
                one.close()
            assert b" 200 OK" in answer(port)
        finally:
            server.terminate()


def cpu_seconds(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / 100


@pytest.mark.parametrize(
    ("descriptors", "ranks", "most"),
    [(1024, 8, 460), (1024, 1, 463), (64, 1, 8), (1 << 20, 8, 1000), (-1, 8, 1000)],
)
def test_how_many_may_be_connected(
    descriptors: int, ranks: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """96 descriptors and one for each rank are the service's own; a client may need two."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (descriptors, -1))
    assert count_connections(ranks) == most


STRANGE = (b"", b"\0" * 100, b"GET / HTTP/1.1\r\n\r\n", b'{"secret": "no"}\n', b"x" * 100_000)


@pytest.mark.dist
@pytest.mark.xdist_group("serve")
def test_unfinished_requests_leave_room_for_jobs(tmp_path: Path) -> None:
    """Bodies that do not come, and answers that are not read, as many as may be connected."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (150, hard))
    try:
        served = Served(tmp_path / "jobs")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    page = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n" * 500
    slow = [opened(served.port, post(1000).replace(b"upload", b"v1/videos")) for _ in range(40)]
    try:
        for _ in range(40):
            with suppress(OSError):
                slow.append(opened(served.port, page))
        assert served.ended(served.create())["status"] == "completed"
    finally:
        for one in slow:
            one.close()
        assert served.stop() == 0


@pytest.mark.dist
@pytest.mark.xdist_group("serve")
def test_strangers_at_the_port_of_the_ranks(tmp_path: Path) -> None:
    """They are closed, ranks of another group can come, and jobs are made meanwhile."""
    served = Served(tmp_path / "jobs")
    try:
        port = json.loads((served.folder / "front.json").read_text())["port"]
        strangers: Sequence[socket.socket] = [opened(port, STRANGE[n % 5]) for n in range(100)]
        assert served.ended(served.create())["status"] == "completed"
        [rank] = served.ranks()
        os.kill(rank, signal.SIGKILL)
        assert served.ended(served.create())["status"] == "completed"
        assert served.health()["restarts"] == 1
        for one in strangers:
            one.close()
        assert len(served.said()) < 5000
    finally:
        assert served.stop() == 0
