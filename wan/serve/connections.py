"""Limits the number of connections and the time that each may stay unfinished.

Every connection has a deadline: for the headers of its request, for the body at a minimum rate, or
for an answer that the client does not read. There is no deadline while a request is processed.
When the maximum is reached, the connection that has been idle for longest is closed for a new one.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import resource
import socket
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from typing import Any, ClassVar
from weakref import WeakSet

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from wan.settings.errors import InputError
from wan.utils.log import logger

HEADER_SECONDS = 10.0
"""Seconds from a connection, or from the first byte of a later request, to the headers' end."""
IDLE_SECONDS = 5
"""Seconds that a connection without a request stays open after an answer."""
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
_SWEEP = 1.0  # seconds between two checks of all deadlines
_RETRY = 1.0  # seconds that asyncio pauses accepting after it ran out of file descriptors
_NO_RESOURCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_ANSWER = "HTTP/1.1 {}\r\nconnection: close\r\ncontent-length: 0\r\n{}\r\n"
_TOO_SLOW = _ANSWER.format("408 Request Timeout", "").encode()
_TOO_MANY = _ANSWER.format("503 Service Unavailable", "retry-after: 5\r\n").encode()

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[MutableMapping[str, Any], _Receive, _Send], Awaitable[None]]


class RareMessages(logging.Filter):
    """Logging filter that passes each message without a traceback once a minute."""

    def __init__(self, seconds: float = 60.0) -> None:
        super().__init__()
        self._seconds = seconds
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether a record is logged; messages are compared without their arguments."""
        if record.exc_info:
            return True
        now, key = time.monotonic(), str(record.msg)
        if now - self._last.get(key, -math.inf) < self._seconds:
            return False
        if len(self._last) > 1000:
            self._last.clear()
        self._last[key] = now
        return True


def _limit_library_logs() -> None:
    """Limits log messages of libraries that any client can cause in large numbers."""
    logging.getLogger("uvicorn.error").addFilter(RareMessages())
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # the client gets the error
    logging.getLogger("asyncio").addFilter(  # `LimitedSocket` logs it
        lambda record: not str(record.msg).startswith("socket.accept() out of system resource")
    )


_log = logger.getChild("connections")
_log.addFilter(RareMessages())


class Connection:
    """State of one client connection, from which its deadline is computed."""

    def __init__(self, transport: asyncio.WriteTransport, seconds: float) -> None:
        """Starts the wait for headers. seconds: their time limit."""
        self.transport = transport
        now = time.monotonic()
        self._started_at, self._seconds = now, seconds  # of the current wait for headers or a body
        self._received, self._received_at = 0, now  # bytes of the body; time of the last
        self._unread, self._unread_at = 0, now  # unread bytes of answers; time of the last change
        self._requests, self._is_reading, self._is_idle = 0, False, False
        self._is_trusted = False

    def receive(self, count: int) -> None:
        """Counts received bytes."""
        self._received_at = time.monotonic()
        self._received += count
        if self._is_idle:  # first bytes of another request
            self._is_idle = False
            self._started_at, self._seconds = self._received_at, HEADER_SECONDS

    def begin_request(self, has_body: bool) -> None:
        """Marks the headers as complete. has_body: whether a body follows."""
        self._requests += 1
        self._is_reading, self._is_idle = has_body, False
        self._received, self._started_at = 0, time.monotonic()
        self._received_at = self._started_at

    def end_body(self) -> None:
        """Marks the body of the request as complete."""
        self._is_reading = False

    def end_request(self) -> None:
        """Marks a request as answered."""
        self._requests -= 1
        if not self._requests:
            self._is_reading, self._is_idle = False, True
            # uvicorn closes idle connections; this deadline is for bytes that form no request.
            self._started_at, self._seconds = time.monotonic(), IDLE_SECONDS + 1

    def trust(self) -> None:
        """Removes the deadline."""
        self._is_trusted = True

    def update_unread(self) -> None:
        """Updates the number of bytes that the client has not read."""
        unread = self.transport.get_write_buffer_size()
        if unread != self._unread or not unread:
            self._unread, self._unread_at = unread, time.monotonic()

    @property
    def waiting_since(self) -> float:
        """Start of the wait for the client, by `time.monotonic`; inf while there is no wait."""
        if self._is_trusted:
            return math.inf
        if self.transport.get_write_buffer_size():
            return self._unread_at
        if self._is_reading:
            return self._started_at + self._received / BODY_RATE
        return math.inf if self._requests else self._started_at

    @property
    def deadline(self) -> float:
        """Time at which the connection is closed, by `time.monotonic`; inf: never."""
        since = self.waiting_since
        if since == math.inf:
            return math.inf
        if self.transport.get_write_buffer_size():
            return since + UNREAD_SECONDS
        if self._is_reading:
            return min(since + BODY_SECONDS, self._received_at + BODY_PAUSE)
        return since + self._seconds

    def close(self, answer: bytes) -> None:
        """Closes the connection. answer: sent to a client that has started a request."""
        in_headers = not (self._requests or self._is_idle)
        has_started = self._is_reading or (in_headers and self._received > 0)
        has_unread = self.transport.get_write_buffer_size() > 0
        if has_started and not has_unread and not self.transport.is_closing():
            self.transport.write(answer)
        self.transport.abort() if self.transport.get_write_buffer_size() else self.transport.close()


class Connections:
    """The open connections of one listener."""

    def __init__(self, max_connections: int, seconds: float = HEADER_SECONDS) -> None:
        """Starts without connections.

        Args:
            max_connections: Maximum number of open connections.
            seconds: Time limit for the headers of a request, or for a rank's first line.
        """
        self.max_connections, self._seconds = max_connections, seconds
        self._sockets: WeakSet[socket.socket] = WeakSet()
        self._connections: set[Connection] = set()
        self._is_sweeping = False

    @property
    def is_full(self) -> bool:
        """Whether the maximum of open connections is reached."""
        return len(self._sockets) >= self.max_connections

    @property
    def is_changing(self) -> bool:
        """Whether some sockets were just accepted or are being closed."""
        return len(self._sockets) > len(self._connections)

    @property
    def is_busy(self) -> bool:
        """Whether more than three quarters of the connections have requests in progress."""
        working = sum(connection.waiting_since == math.inf for connection in self._connections)
        return working > 3 * self.max_connections // 4

    def add_socket(self, accepted: socket.socket) -> None:
        """Counts an accepted socket until `discard_socket`."""
        self._sockets.add(accepted)

    def discard_socket(self, accepted: socket.socket) -> None:
        """Removes a socket from the count."""
        self._sockets.discard(accepted)

    def add(self, transport: asyncio.WriteTransport) -> Connection:
        """Adds the connection of a transport, which is closed when its deadline has passed."""
        connection = Connection(transport, self._seconds)
        self._connections.add(connection)
        if not self._is_sweeping:
            self._is_sweeping = True
            asyncio.get_running_loop().call_later(_SWEEP, self._close_expired)
        return connection

    def remove(self, connection: Connection) -> None:
        """Removes a closed connection."""
        self._connections.discard(connection)

    def make_room(self) -> bool:
        """Closes the connection that has been idle for longest; returns whether one was idle."""
        slowest = min(
            self._connections, key=lambda connection: connection.waiting_since, default=None
        )
        if slowest is None or slowest.waiting_since == math.inf:
            return False
        _log.warning(
            "The maximum of %d connections is open; idle ones are closed for new ones. A higher "
            "`ulimit -n` allows more.",
            len(self._sockets),
        )
        self._connections.discard(slowest)
        slowest.close(_TOO_MANY)
        return True

    def _close_expired(self) -> None:
        """Closes the connections whose deadline has passed, now and every second."""
        now = time.monotonic()
        for connection in [*self._connections]:
            connection.update_unread()
            if connection.deadline < now:
                self._connections.discard(connection)
                connection.close(_TOO_SLOW)
        self._is_sweeping = bool(self._connections)
        if self._is_sweeping:
            asyncio.get_running_loop().call_later(_SWEEP, self._close_expired)

    def wrap_app(self, app: _App) -> _App:
        """Wraps an ASGI application so that connections track the state of their requests."""

        async def tracked_app(
            scope: MutableMapping[str, Any], receive: _Receive, send: _Send
        ) -> None:
            connection = _CURRENT.get()
            if connection is None or scope["type"] != "http":
                await app(scope, receive, send)
                return

            async def tracked_receive() -> _Message:
                message = await receive()
                if message["type"] == "http.request" and not message.get("more_body", False):
                    connection.end_body()
                return message

            names = {name for name, value in scope["headers"] if value != b"0"}
            connection.begin_request(bool(names & {b"content-length", b"transfer-encoding"}))
            try:
                await app(scope, tracked_receive, send)
            finally:
                connection.end_request()

        return tracked_app


_CURRENT: ContextVar[Connection | None] = ContextVar("connection", default=None)
"""The connection of a request; the task of the request inherits it."""


class LimitedProtocol(H11Protocol):
    """HTTP/1.1 protocol of uvicorn that reports bytes and requests to a `Connection`."""

    limits: ClassVar[Connections]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the wait for headers."""
        self._connection = self.limits.add(transport)
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Counts the bytes before they are parsed."""
        self._connection.receive(len(data))
        token = _CURRENT.set(self._connection)
        try:
            super().data_received(data)
        finally:
            _CURRENT.reset(token)

    def connection_lost(self, exc: Exception | None) -> None:
        """Removes the connection."""
        self.limits.remove(self._connection)
        super().connection_lost(exc)


class _AcceptedSocket(socket.socket):
    """An accepted socket that is counted until it is closed."""

    limits: Connections

    def close(self) -> None:
        self.limits.discard_socket(self)
        super().close()


class LimitedSocket(socket.socket):
    """A listening socket that accepts connections up to a maximum."""

    limits: Connections
    _burst = 0
    _paused_until = -math.inf  # time until which nothing is accepted

    def accept(self) -> tuple[socket.socket, Any]:
        """Accepts a connection.

        Raises:
            BlockingIOError: None can be accepted now; asyncio retries in its next turn.
        """
        if self._burst >= _BURST or time.monotonic() < self._paused_until:
            raise BlockingIOError
        if not self._burst:
            asyncio.get_running_loop().call_soon(self._end_burst)
        self._burst += 1
        try:
            plain, address = super().accept()
        except OSError as error:
            if error.errno in _NO_RESOURCE:
                _log.warning("No connection can be accepted (%s).", error.strerror)
                self._paused_until = time.monotonic() + _RETRY / 2
            raise
        # Connections close in a later turn; until then a few more than the maximum are open.
        limits = self.limits
        if limits.is_full and not limits.make_room() and not limits.is_changing:
            _log.warning(
                "%d requests are in progress; new ones are refused.", limits.max_connections
            )
            plain.close()
            raise BlockingIOError
        accepted = _AcceptedSocket(plain.family, plain.type, plain.proto, plain.detach())
        accepted.limits = limits
        limits.add_socket(accepted)
        return accepted, address

    def _end_burst(self) -> None:
        self._burst = 0


class _Server(uvicorn.Server):
    """A server that tells its application when it begins to stop, before it waits for requests."""

    on_stop: Callable[[], None]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.on_stop()
        await super().shutdown(sockets)


def make_server(
    app: _App, connections: Connections, on_stop: Callable[[], None] = lambda: None
) -> uvicorn.Server:
    """Returns the HTTP server of an application.

    Args:
        app: The application.
        connections: Limits its connections; the sockets come from `open_sockets`.
        on_stop: Called when a signal stops the server; the requests have 5 seconds left then.
    """
    config = uvicorn.Config(
        connections.wrap_app(app),
        http=type("Protocol", (LimitedProtocol,), {"limits": connections}),
        ws="none",
        loop="asyncio",  # asyncio calls `LimitedSocket.accept`
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


def open_sockets(
    host: str, port: int, connections: Connections, setting: str = "`host`"
) -> list[LimitedSocket]:
    """Opens a listening socket on each address of a host.

    Args:
        host: A name or an address.
        port: 0 for a free port.
        connections: Limits the accepted connections.
        setting: Name of the host's setting in refusals.

    Raises:
        InputError: The host is unknown or another machine, or the port is in use or not allowed.
    """
    try:
        addresses = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE if host else 0
        )
    except (OSError, UnicodeError, ValueError) as error:
        why = f"is not a known host ({getattr(error, 'strerror', None) or error})"
        raise InputError(setting, host, why, "give a name or an address of this machine") from None
    sockets: list[LimitedSocket] = []
    last_error: OSError | None = None
    for family, socket_type, protocol, _, address in dict.fromkeys(addresses):
        try:
            listener = LimitedSocket(family, socket_type, protocol)
        except OSError as error:  # kernel without IPv6
            last_error = error
            continue
        listener.limits = connections
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address)
            listener.listen()  # before that, another service could bind the port
            sockets.append(listener)
        except OSError as error:
            listener.close()
            last_error = error
            if error.errno != errno.EADDRNOTAVAIL:
                break
    codes = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
    is_partial = last_error is not None and last_error.errno in codes
    if last_error is None or (sockets and is_partial):
        return sockets
    for listener in sockets:
        listener.close()
    raise _make_bind_error(last_error, host, port, setting) from None


def _make_bind_error(error: OSError, host: str, port: int, setting: str) -> InputError:
    """Returns the refusal for an address that cannot be bound."""
    if error.errno == errno.EADDRINUSE:
        return InputError(f"port {port} of {host}", None, "is in use", "give another port")
    if error.errno in (errno.EACCES, errno.EPERM):
        remedy = "give a port of 1024 or more"
        return InputError(f"port {port} of {host}", None, "is not allowed for this user", remedy)
    why = f"cannot be bound ({error.strerror})"
    return InputError(setting, host, why, "give an address of this machine")
