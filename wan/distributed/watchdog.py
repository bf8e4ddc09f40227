"""A watchdog that detects lost ranks of a run and ends the others.

It uses TCP connections from rank 0 to each other rank. The operating system closes them when a
process ends, TCP keepalive detects a lost machine, and missing answers to pings detect a hung
process. The errors of collectives are not parsed: they differ by backend and version.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch.distributed as dist

from wan.settings.errors import InputError
from wan.utils import system

if TYPE_CHECKING:
    from wan.distributed.rank_env import RankEnv

T = TypeVar("T")
Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
Notify = Callable[[str], None]

STORE_TIMEOUT = 5.0  # seconds for an answer of the store
_PING_INTERVAL = 1.0  # seconds between two pings
_SELF_REPORT_DELAY = 1.0  # seconds in which a rank may detect the failure of another one first
_EXIT_GRACE = 8.0  # seconds in which the main thread should exit after a rank was lost
# A machine that acknowledges nothing for a minute is lost; a network can fail for some seconds.
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 6, "TCP_USER_TIMEOUT": 60_000}
_KILLED = "ended unexpectedly (killed, or out of memory); the video was not written."
_ORPHANED = "ended unexpectedly, because its torchrun did; the video was not written."


@dataclass(frozen=True)
class Peer:
    """The identity of a rank."""

    rank: int
    node: str  # equal for the ranks of one torchrun, which share a terminal
    machine: str  # equal for processes that can signal each other
    host: str
    pid: int


class _PeerConnection:
    """A connection between rank 0 and another rank; a message is one line of JSON.

    Attributes:
        peer: The other rank; None before its hello message.
        is_open: The other rank has neither signed off nor ended.
        has_answered: The other rank has answered the last ping.
        silent_seconds: Seconds since the unanswered ping.
    """

    def __init__(self, connection: socket.socket, peer: Peer | None = None) -> None:
        self.peer, self.is_open = peer, True
        self.has_answered, self.silent_seconds = True, 0.0
        self._connection, self._file = connection, connection.makefile("rb")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            if hasattr(socket, option):  # on Linux
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def send(self, *message: Json) -> None:
        with suppress(OSError):  # the reading thread detects a closed connection
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def iter_messages(self) -> Iterator[list[Any]]:
        """Yields messages until the connection is closed."""
        with suppress(OSError, ValueError), self._connection:
            for line in self._file:
                message = json.loads(line)
                if isinstance(message, list) and message:
                    yield message


class Watchdog:
    """Detects lost ranks in threads, because the main thread may be waiting in a collective.

    When a rank is lost, SIGTERM is sent to the main thread. If it does not end in time, the process
    is ended.

    Attributes:
        silence_limit: Seconds in which a rank must answer a ping.
        interrupted: SIGTERM was sent to the main thread.
    """

    def __init__(self, env: RankEnv, store: dist.Store, notify: Notify) -> None:
        machine = system.read_machine_id()
        with suppress(OSError):  # not Linux
            machine += os.readlink("/proc/self/ns/pid")
        node = f"{machine} {env.node}"
        self.this_rank = Peer(env.rank, node, machine, socket.gethostname(), os.getpid())
        self.silence_limit, self.interrupted = float("inf"), False
        self._env, self._notify, self._parent = env, notify, os.getppid()
        self._store = store.clone()  # type: ignore[attr-defined]  # not delayed by other requests
        self._connections: list[_PeerConnection] = []
        self._token = secrets.token_hex()
        self._loss: tuple[Peer, str] | None = None
        self._lock, self._loss_known, self._is_ending = threading.Lock(), threading.Event(), False
        if env.rank == 0:
            ipv6 = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if ipv6 else socket.AF_INET
            server = socket.create_server(("", 0), family=family, dualstack_ipv6=ipv6, backlog=512)
            contact = [server.getsockname()[1], self._token, asdict(self.this_rank)]
            self._store.set("rank 0", json.dumps(contact))
            _start_thread(self._accept_connections, server)
        _start_thread(self._monitor_peers)

    def connect_to_rank0(self) -> None:
        """Connects to rank 0, which runs on the machine of the store and has started.

        Raises:
            InputError: Rank 0 cannot be reached.
        """
        if self.this_rank.rank == 0:
            return
        port, token, peer = json.loads(self._store.get("rank 0"))
        try:
            connection = socket.create_connection((self._env.address, port), timeout=STORE_TIMEOUT)
        except OSError as error:
            subject = f"Rank 0 at {self._env.address}:{port}"
            why = f"cannot be reached ({error.strerror or error})"
            remedy = "open the ports between the machines"
            raise InputError(subject, None, why, remedy) from error
        connection.settimeout(None)
        self._add_connection(connection, Peer(**peer)).send("hello", token, asdict(self.this_rank))

    def sign_off(self) -> None:
        """Sign off from the other ranks; rank 0, which may hold the store, ends last."""
        self._is_ending = True
        self._send_to_all("left")
        deadline = time.monotonic() + STORE_TIMEOUT
        while self.this_rank.rank == 0 and time.monotonic() < deadline:
            if not any(link.is_open and link.peer for link in self._connections):
                break
            time.sleep(0.05)

    def describe_loss(self, timeout: float) -> str | None:
        """Returns which rank was lost, in a sentence; None if none was.

        Called when the main thread ends, which is not interrupted from then on.

        Args:
            timeout: Seconds to wait for a report of a lost rank.
        """
        self._is_ending = True
        self._loss_known.wait(timeout)
        if self._loss is None:
            return None
        culprit, reason = self._loss
        if reason == _ORPHANED and culprit.node == self.this_rank.node:
            return "torchrun has ended unexpectedly; the video was not written."
        location = "" if culprit.machine == self.this_rank.machine else f" on {culprit.host}"
        return f"Rank {culprit.rank}{location} {reason}"

    def report_failure(self, reason: str) -> None:
        """Sends the other ranks the reason of this rank's failure: "ended: Out of memory."."""
        self._send_to_all("lost", asdict(self.this_rank), reason, False)

    def is_spokesman(self) -> bool:
        """Whether this rank prints why the run ends: the first caller of each node does."""
        culprit, reason = self._loss or (self.this_rank, "ended:")
        same_node, is_orphaned = culprit.node == self.this_rank.node, reason == _ORPHANED
        if (same_node and is_orphaned) or (culprit.rank == 0 and not reason.startswith("ended:")):
            # The store may be gone with torchrun or rank 0, unless this is rank 0.
            return self._env.local_rank == int(
                same_node and not is_orphaned and culprit != self.this_rank
            )
        key, rank = f"said/{self.this_rank.node}", str(self.this_rank.rank)
        spokesman = call_with_timeout(
            STORE_TIMEOUT, lambda: self._store.compare_set(key, "", rank).decode(), rank
        )
        return spokesman == rank

    def _send_to_all(self, *message: Json) -> None:
        for connection in list(self._connections):
            connection.send(*message)

    def _accept_connections(self, server: socket.socket) -> None:
        while True:
            self._add_connection(server.accept()[0])

    def _add_connection(
        self, connection: socket.socket, peer: Peer | None = None
    ) -> _PeerConnection:
        peer_connection = _PeerConnection(connection, peer)
        self._connections.append(peer_connection)
        _start_thread(self._read_messages, peer_connection)
        return peer_connection

    def _monitor_peers(self) -> None:
        """Every second, check that torchrun runs, and ping the ranks that have answered."""
        last_beat = time.monotonic()
        while True:
            # Only torchrun runs as long as its ranks; other launchers may exit after starting them.
            if self._env.torchrun and os.getppid() != self._parent:
                self._handle_loss(self.this_rank, _ORPHANED, False)
            now = time.monotonic()
            # A pause of this process is not silence of the others.
            elapsed, last_beat = min(now - last_beat, 2 * _PING_INTERVAL), now
            for link in list(self._connections):
                if link.peer is None or not link.is_open:
                    continue
                link.silent_seconds += elapsed
                if link.has_answered:
                    link.has_answered, link.silent_seconds = False, 0.0
                    link.send("ping")
                elif link.silent_seconds > self.silence_limit:
                    reason = f"has not answered for {self.silence_limit:.0f} s (--dist_timeout)"
                    self._handle_loss(link.peer, f"{reason}; the video was not written.", True)
            time.sleep(_PING_INTERVAL)

    def _read_messages(self, connection: _PeerConnection) -> None:
        for message_type, *fields in connection.iter_messages():
            if connection.peer is None:
                if (message_type, *fields[:1]) != ("hello", self._token):
                    break  # another program has connected
                connection.peer = Peer(**fields[1])
            elif message_type == "ping":
                connection.send("pong")
            elif message_type == "pong":
                connection.has_answered = True
            elif message_type == "left":
                connection.is_open = False
            elif message_type == "lost":
                self._handle_loss(Peer(**fields[0]), *fields[1:])
        if connection.peer is not None and connection.is_open:
            self._handle_loss(connection.peer, _KILLED, False)
        connection.is_open = False

    def _handle_loss(self, culprit: Peer, reason: str, is_hung: bool) -> None:
        """Reports a lost rank to all others and ends; a hung process of this machine is killed."""
        with self._lock:
            if self._loss is not None:
                return
            self._loss = culprit, reason
        self._send_to_all("lost", asdict(culprit), reason, is_hung)
        self._loss_known.set()
        if is_hung and culprit.machine == self.this_rank.machine and culprit != self.this_rank:
            with suppress(OSError):
                os.kill(culprit.pid, signal.SIGKILL)
        time.sleep(_SELF_REPORT_DELAY)
        if self._is_ending:
            return
        self.interrupted = True
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        time.sleep(_EXIT_GRACE)
        if not self._is_ending:  # the main thread waits in code that handles no signals
            if self.is_spokesman():
                self._notify(self.describe_loss(0) or "")
            os._exit(1)


def call_with_timeout(seconds: float, query: Callable[[], T], default: T) -> T:
    """Returns the result of a query of the store; `default` if it fails or times out."""
    answer = [default]

    def wait() -> None:
        with suppress(dist.DistError):
            answer[0] = query()

    _start_thread(wait).join(seconds)  # most requests have no timeout
    return answer[0]


def _start_thread(target: Callable[..., None], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, daemon=True)
    thread.start()
    return thread
