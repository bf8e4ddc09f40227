"""Limits the number of connections, and the time that each may wait for its client.

uvicorn closes connections that are idle after an answer. The others are closed here: those that
send no whole request, that send a body slowly, or that do not read an answer. When the maximum is
reached, the connection that has waited longest for its client is closed for a new one.
"""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import socket
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from wan.utils.log import RareMessages, logger

HEADER_SECONDS = 10.0
"""Seconds from a connection, or from an answer, to the end of the next request's headers."""
IDLE_SECONDS = 5
"""Seconds that a connection that sends nothing stays open after an answer."""
BODY_SECONDS = 20.0
"""Seconds in which a body may arrive at any rate."""
BODY_RATE = 1000
"""Minimum average rate of a body after that, in bytes per second."""
BODY_PAUSE = 30.0
"""Seconds without a byte of the body after which the connection is closed."""
UNREAD_SECONDS = 120.0
"""Seconds after which a connection is closed whose client reads nothing of an answer."""
_MAX_CONNECTIONS = 1000  # connections
_RESERVED_FILES = 96  # file descriptors for the journal, logs, ranks and temporary files
_MIN_CONNECTIONS = 8  # connections
_BURST = 32  # connections accepted in one turn of the event loop
_QUEUE = 2048  # connections that wait to be accepted
_SWEEP = 1.0  # seconds between two checks of all connections

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[MutableMapping[str, Any], _Receive, _Send], Awaitable[None]]


_log = logger.getChild("connections")
_log.addFilter(RareMessages())


def _log_accept_error(record: logging.LogRecord) -> bool:
    """Logs in one line that asyncio cannot accept a connection; passes its other messages."""
    if not str(record.msg).startswith("socket.accept() out of system resource"):
        return True
    reason = record.exc_info[1] if record.exc_info else None
    _log.warning("No connection can be accepted (%s).", getattr(reason, "strerror", None))
    return False


def _limit_library_logs() -> None:
    """Limits log messages of libraries that any client can cause in large numbers."""
    logging.getLogger("uvicorn.error").addFilter(RareMessages())
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # the client gets the error
    logging.getLogger("asyncio").addFilter(_log_accept_error)


class _Client(asyncio.Protocol):
    """The connection of a client: the protocol of uvicorn, and since when it waits.

    Attributes:
        num_requests: Requests in progress.
        is_reading: Whether a request waits for its body.
    """

    def __init__(self, connections: Connections, http: asyncio.Protocol) -> None:
        """Starts the wait for headers. http: handles the bytes."""
        self._connections, self._http = connections, http
        self.num_requests, self.is_reading = 0, False
        self._since, self._unread = time.monotonic(), 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.WriteTransport, transport)
        self._http.connection_made(transport)
        self._connections.add(self)

    def data_received(self, data: bytes) -> None:
        _CURRENT.set(self)
        self._http.data_received(data)

    def eof_received(self) -> bool | None:
        return self._http.eof_received()

    def pause_writing(self) -> None:
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._http.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._http.connection_lost(exc)

    def begin_wait(self) -> None:
        """Marks that the client has to send something from now on."""
        self._since = time.monotonic()

    @property
    def waiting_since(self) -> float:
        """Start of the wait for the client, by `time.monotonic`; inf while there is no wait."""
        is_working = self.num_requests and not self.is_reading
        return math.inf if is_working and not self._count_unread() else self._since

    def is_overdue(self) -> bool:
        """Returns whether the client lets the connection wait too long; called regularly."""
        now, unread = time.monotonic(), self._count_unread()
        if unread != self._unread or self.waiting_since == math.inf:
            self._unread, self._since = unread, now
        if unread:
            return now - self._since > UNREAD_SECONDS
        return not self.num_requests and now - self._since > HEADER_SECONDS

    def _count_unread(self) -> int:
        """Returns the bytes of answers that the client has not read."""
        return self.transport.get_write_buffer_size()


_CURRENT: ContextVar[_Client] = ContextVar("client")
"""The connection of a request; the task of the request inherits it."""


class _TimedBody:
    """The body of a request, which is answered with status 408 if it comes too slowly."""

    def __init__(self, client: _Client, receive: _Receive, send: _Send) -> None:
        self._client, self._receive, self._send = client, receive, send
        self._num_bytes, self._seconds = 0, 0.0  # received, and of waiting for them
        self._is_complete = self._has_answer = self._is_refused = False

    async def receive(self) -> _Message:
        """Receives a message of ASGI; a body that comes too slowly ends as a disconnect."""
        if self._is_complete:
            return await self._receive()
        began = time.monotonic()
        seconds = BODY_SECONDS + self._num_bytes / BODY_RATE - self._seconds
        self._client.is_reading = True
        self._client.begin_wait()
        try:
            async with asyncio.timeout(min(seconds, BODY_PAUSE)):
                message = await self._receive()
        except TimeoutError:
            return await self._refuse()
        finally:
            self._client.is_reading = False
        self._seconds += time.monotonic() - began
        self._num_bytes += len(message.get("body", b""))
        self._is_complete = not message.get("more_body", False)
        return message

    async def send(self, message: _Message) -> None:
        """Sends a message of ASGI, unless the request was refused."""
        self._has_answer = True
        if not self._is_refused:
            await self._send(message)

    async def _refuse(self) -> _Message:
        if not self._has_answer:
            headers = [(b"connection", b"close"), (b"content-length", b"0")]
            await self._send({"type": "http.response.start", "status": 408, "headers": headers})
            await self._send({"type": "http.response.body"})
        self._is_complete = self._is_refused = True
        return {"type": "http.disconnect"}


class Connections:
    """The open connections of clients."""

    def __init__(self, max_connections: int) -> None:
        """Starts without connections. max_connections: how many may be open."""
        self.max_connections = max_connections
        self._clients: set[_Client] = set()

    @property
    def is_busy(self) -> bool:
        """Whether more than three quarters of the connections have requests in progress."""
        working = sum(client.waiting_since == math.inf for client in self._clients)
        return working > 3 * self.max_connections // 4

    def add(self, client: _Client) -> None:
        """Adds a connection; above the maximum, closes the one that has waited longest."""
        self._clients.add(client)
        if len(self._clients) > self.max_connections:
            _log.warning(
                "The maximum of %d connections is open; those that wait for their clients are "
                "closed for new ones. A higher `ulimit -n` allows more.",
                self.max_connections,
            )
            self._close(min(self._clients, key=lambda other: other.waiting_since))

    def discard(self, client: _Client) -> None:
        """Removes a connection that is closed."""
        self._clients.discard(client)

    def _close(self, client: _Client) -> None:
        self._clients.discard(client)
        client.transport.abort()

    async def _close_overdue(self) -> None:
        """Closes connections that wait too long for their clients, until it is cancelled."""
        while True:
            await asyncio.sleep(_SWEEP)
            for client in [*self._clients]:
                if client.is_overdue():
                    self._close(client)

    def limit_app(self, app: _App) -> _App:
        """Returns an ASGI application whose requests and bodies are subject to the limits."""

        async def limited_app(
            scope: MutableMapping[str, Any], receive: _Receive, send: _Send
        ) -> None:
            if scope["type"] == "lifespan":
                sweep = asyncio.create_task(self._close_overdue())
                try:
                    await app(scope, receive, send)
                finally:
                    sweep.cancel()
                return
            client = _CURRENT.get()
            body = _TimedBody(client, receive, send)
            client.num_requests += 1
            try:
                await app(scope, body.receive, body.send)
            finally:
                client.num_requests -= 1
                client.begin_wait()

        return limited_app


class _Server(uvicorn.Server):
    """A server that notifies its application of a stop before it waits for requests."""

    on_stop: Callable[[], None]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():  # asyncio has used the size of a burst for the queue, too
            listener.listen(_QUEUE)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.on_stop()
        await super().shutdown(sockets)


def make_server(
    app: _App, connections: Connections, on_stop: Callable[[], None] = lambda: None
) -> uvicorn.Server:
    """Returns the HTTP server of an application.

    Args:
        app: The application.
        connections: Limits its connections.
        on_stop: Called when a signal stops the server; the requests have 5 seconds left then.
    """

    def make_protocol(**kwargs: Any) -> asyncio.Protocol:
        return _Client(connections, H11Protocol(**kwargs))

    config = uvicorn.Config(
        connections.limit_app(app),
        http=make_protocol,  # type: ignore[arg-type]
        ws="none",
        loop="asyncio",
        backlog=_BURST,
        log_level=logging.WARNING,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=5,
        access_log=False,
        proxy_headers=False,  # `Guard` reads them, from --trusted_proxy only
    )
    _limit_library_logs()
    server = _Server(config)
    server.on_stop = on_stop
    return server


def compute_max_connections(ranks: int) -> int:
    """Returns the maximum of connections: each needs a file descriptor, and one for a file."""
    max_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if max_files == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    return max(min(_MAX_CONNECTIONS, (max_files - _RESERVED_FILES - ranks) // 2), _MIN_CONNECTIONS)
