"""Limits of connections, with real sockets: which are closed, when, and which never are."""

from __future__ import annotations

import asyncio
import logging
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from tests.dist import REPO
from tests.serve.serving import GET, make_post_request, open_connection, receive_all
from wan.serve.http import connections
from wan.serve.http.connections import (
    Connections,
    compute_max_connections,
    make_server,
)
from wan.serve.requests.addresses import open_sockets

HEADER, BODY, PAUSE, UNREAD = 0.4, 0.8, 1.2, 1.0  # seconds of the limits in these tests
LATE = 3.0  # seconds after its limit within which a slow connection must be closed
BIG = 16 << 20  # more than the buffers of two sockets
Start = Callable[..., int]


class Work(threading.Event):
    """Set when /work may answer. num_requests: Number of requests received by /work."""

    num_requests = 0


def wait_until(condition: Callable[[], object]) -> None:
    """Waits until a condition holds."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def make_application(stop: Work) -> Starlette:
    """An application with a route that answers at once, one that reads a body, one with a large
    answer, and one that waits for the event `stop`."""

    async def health(_: Request) -> Response:
        return PlainTextResponse("ok")

    async def upload(request: Request) -> Response:
        with suppress(ClientDisconnect):
            return PlainTextResponse(str(len(await request.body())))
        return Response(status_code=400)

    async def big(_: Request) -> Response:
        return Response(bytes(BIG))

    async def work(_: Request) -> Response:
        stop.num_requests += 1
        while not stop.is_set():
            await asyncio.sleep(0.02)
        return PlainTextResponse("done")

    routes = [Route("/health", health), Route("/big", big), Route("/work", work)]
    return Starlette(routes=[*routes, Route("/upload", upload, methods=["POST"])])


@pytest.fixture
def done() -> Work:
    """Set when /work may answer."""
    return Work()


@pytest.fixture
def start(done: Work, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a server with short limits in a thread; returns its port. A stop ends all work."""
    values = {"HEADER_SECONDS": HEADER, "IDLE_SECONDS": 0.4, "BODY_SECONDS": BODY}
    values |= {"BODY_PAUSE": PAUSE, "UNREAD_SECONDS": UNREAD, "_SWEEP": 0.1}
    for name, value in values.items():
        monkeypatch.setattr(connections, name, value)
    servers: list[tuple[Any, threading.Thread]] = []

    def start_server(max_connections: int, limits: Connections | None = None) -> int:
        limits = limits or Connections(max_connections)
        server = make_server(make_application(done), limits, on_stop=done.set)
        sockets = open_sockets("127.0.0.1", 0)
        thread = threading.Thread(target=server.run, args=(sockets,))
        thread.start()
        servers.append((server, thread))
        wait_until(lambda: server.started)
        return int(sockets[0].getsockname()[1])

    yield start_server
    for server, thread in servers:
        server.should_exit = True
        thread.join(4)  # a server waits 5 s for requests that do not end
        assert not thread.is_alive()


@pytest.fixture
def clients() -> Iterator[ExitStack]:
    """Closes the connections at the end of the test."""
    with ExitStack() as stack:
        yield stack


def fetch_answer(port: int, request: bytes = GET) -> bytes:
    """Returns the answer to one request."""
    with open_connection(
        port, request.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1)
    ) as client:
        return receive_all(client)


TIMEOUT = b"HTTP/1.1 408 Request Timeout"
SLOW = {  # bytes sent, whether single bytes follow, the first line of the answer, the limit
    "nothing": (b"", False, b"", HEADER),
    "a part of its headers": (b"GET /health HTTP/1.1\r\nhost: loc", False, b"", HEADER),
    "a line that goes on": (b"GET /" + b"x" * 2000, False, b"", HEADER),
    "headers byte by byte": (b"GET /health HTTP/1.1\r\n", True, b"", HEADER),
    "no body": (make_post_request(1000), False, TIMEOUT, BODY),
    "a body byte by byte": (make_post_request(100_000), True, TIMEOUT, BODY),
    "a part of its body": (make_post_request(100_000, b"x" * 100), False, TIMEOUT, BODY + 0.1),
    "much of its body": (make_post_request(100_000, b"x" * 50_000), False, TIMEOUT, PAUSE),
    "one request and a part of another": (GET + b"GET /", False, b"HTTP/1.1 200 OK", HEADER),
}


def stop_in_the_middle(port: int, sent: bytes, sends_more: bool) -> tuple[float, bytes]:
    """Returns the seconds until the connection is closed, and the first line of the answer."""
    head, end, body = sent.partition(b"\r\n\r\n")
    with open_connection(port, head + end) as client:
        began = time.monotonic()
        time.sleep(0.05)
        client.sendall(body)
        client.settimeout(0.05 if sends_more else 10)
        response = b""
        while sends_more and time.monotonic() < began + 10:
            try:
                response = client.recv(1 << 16)
                break
            except ConnectionResetError:  # closed with bytes that were not read
                return time.monotonic() - began, b""
            except TimeoutError:
                pass
            with suppress(OSError):
                client.sendall(b"x")
        client.settimeout(10)
        response += receive_all(client)
        return time.monotonic() - began, response.split(b"\r\n")[0]


def upload_slowly(port: int) -> bytes:
    """Uploads 2 500 bytes per second, above the minimum of 1 000, for longer than any limit."""
    with open_connection(port, make_post_request(3750)) as client:
        for _ in range(15):
            time.sleep(0.1)
            client.sendall(bytes(250))
        return client.recv(100)


def read_late(port: int) -> int:
    """Returns the received bytes of a large answer that is read too late."""
    with open_connection(port, GET.replace(b"health", b"big")) as client:
        time.sleep(UNREAD + 0.6)  # longer than the limit
        return len(receive_all(client))


def test_slow_clients_are_closed_in_time(start: Start, done: Work) -> None:
    """While other clients are fast enough, and the job of one outlasts every limit."""
    port = start(100)
    with (
        ThreadPoolExecutor(20) as pool,
        open_connection(port, GET.replace(b"health", b"work")) as working,
    ):
        slow = {name: pool.submit(stop_in_the_middle, port, *SLOW[name][:2]) for name in SLOW}
        honest, unread = pool.submit(upload_slowly, port), pool.submit(read_late, port)
        results = {name: future.result() for name, future in slow.items()}
        wrong = {
            name: (seconds, line)
            for name, (seconds, line) in results.items()
            if line != SLOW[name][2] or not -0.1 < seconds - SLOW[name][3] < LATE
        }
        assert not wrong
        assert b" 200 OK" in honest.result() and unread.result() < BIG
        # An answer that is read is complete.
        large_answer = fetch_answer(port, GET.replace(b"health", b"big"))
        assert len(large_answer) - large_answer.index(b"\r\n\r\n") - 4 == BIG
        done.set()
        working.settimeout(LATE)
        while b"done" not in (part := working.recv(1000)):
            assert part


def test_requests_that_follow_each_other(start: Start) -> None:
    """On one connection, one by one and pipelined; then the idle connection is closed."""
    with open_connection(start(100)) as client:
        for number in (1, 3):
            client.sendall(GET * number)
            response = b""
            while response.count(b"\r\n\r\nok") < number:
                response += client.recv(1 << 16)
            time.sleep(HEADER / 2)  # shorter than the limits
        began = time.monotonic()
        assert receive_all(client) == b"" and time.monotonic() - began < LATE


def test_silent_connections_keep_nobody_out(start: Start, clients: ExitStack) -> None:
    """Idle connections up to the limit stay open; beyond it the oldest ones are closed."""
    port = start(20)
    silent = [clients.enter_context(open_connection(port)) for _ in range(20)]
    for client in silent:
        client.settimeout(0.005)
        with pytest.raises(TimeoutError):
            client.recv(1)
    silent += [clients.enter_context(open_connection(port)) for _ in range(40)]
    for _ in range(10):
        began = time.monotonic()
        assert b" 200 OK" in fetch_answer(port)
        assert time.monotonic() - began < 1


def test_work_is_never_closed_for_others(start: Start, done: Work, clients: ExitStack) -> None:
    """Idle clients displace only each other; when all connections work, others are turned away."""
    port, request = start(12), GET.replace(b"health", b"work")
    working = [clients.enter_context(open_connection(port, request)) for _ in range(8)]
    wait_until(lambda: done.num_requests == 8)
    for _ in range(40):
        clients.enter_context(open_connection(port))
    assert b" 200 OK" in fetch_answer(port)
    port = start(8)
    working += [clients.enter_context(open_connection(port, request)) for _ in range(8)]
    wait_until(lambda: done.num_requests == 16)
    with open_connection(port, GET) as more:
        assert b" 200 OK" not in receive_all(more)
    done.set()
    for client in working:
        client.settimeout(LATE)
        assert b"done" in client.recv(1000) or b"done" in client.recv(1000)
        client.close()
    wait_until(lambda: b" 200 OK" in fetch_answer(port))


def test_a_stop_is_announced_to_requests(start: Start, done: Work, clients: ExitStack) -> None:
    """The end of `start` checks it."""
    clients.enter_context(open_connection(start(8), GET.replace(b"health", b"work")))
    wait_until(lambda: done.num_requests)


def test_what_many_clients_do_is_logged_once(
    start: Start, clients: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    port = start(8)
    for _ in range(30):
        open_connection(port).close()
        fetch_answer(port, b"not http at all\r\n\r\n")
    for _ in range(30):
        clients.enter_context(open_connection(port))
    assert b" 200 OK" in fetch_answer(port)
    messages = [
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
    ]
    assert len(messages) <= 3, messages


FEW_DESCRIPTORS = """
import logging, resource

from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from wan.serve.http.connections import Connections, make_server
from wan.serve.requests.addresses import open_sockets

resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
logging.basicConfig()
sockets = open_sockets("127.0.0.1", 0)
print(sockets[0].getsockname()[1], flush=True)
app = Starlette(routes=[Route("/health", lambda _: PlainTextResponse("ok"))])
make_server(app, Connections(1000)).run(sockets)
"""


def read_cpu_ticks(pid: int) -> int:
    """Returns the CPU time of a process in hundredths of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_without_file_descriptors(clients: ExitStack) -> None:
    """More connections than descriptors: one line, no busy loop, and an answer afterwards."""
    command, pipe = [sys.executable, "-c", FEW_DESCRIPTORS], subprocess.PIPE
    with subprocess.Popen(command, cwd=REPO, stdout=pipe, stderr=subprocess.STDOUT) as server:
        clients.callback(server.kill)
        assert server.stdout is not None
        port = int(server.stdout.readline())
        assert b" 200 OK" in fetch_answer(port)
        with ExitStack() as stack:
            for _ in range(80):
                stack.enter_context(open_connection(port))
            assert b"No connection can be accepted" in server.stdout.readline()
            ticks = read_cpu_ticks(server.pid)
            time.sleep(0.5)  # of which it computes a small part
            assert read_cpu_ticks(server.pid) - ticks < 15
        assert b" 200 OK" in fetch_answer(port)
        server.kill()
        assert server.stdout.read() == b""


def test_how_many_may_be_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service needs 96 descriptors and one for each rank; a client may need two."""
    rows = {(1024, 8): 460, (1024, 1): 463, (64, 1): 8, (1 << 20, 8): 1000, (-1, 8): 1000}
    computed = {}
    for descriptors, ranks in rows:
        monkeypatch.setattr(resource, "getrlimit", lambda _, most=descriptors: (most, -1))
        computed[descriptors, ranks] = compute_max_connections(ranks)
    assert computed == rows


def test_it_is_busy_when_three_quarters_work(start: Start, done: Work, clients: ExitStack) -> None:
    """Then only /health is answered, so that connections remain for it."""
    limits, request = Connections(8), GET.replace(b"health", b"work")
    port, busy = start(8, limits), list[bool]()
    for number in range(1, 9):
        clients.enter_context(open_connection(port, request))
        wait_until(lambda number=number: done.num_requests == number)
        busy.append(limits.is_busy)
    assert busy == [False] * 6 + [True] * 2
    done.set()
    wait_until(lambda: not limits.is_busy)
