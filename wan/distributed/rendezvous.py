"""Rendezvous of the ranks of a run through a key-value store, and a watchdog for lost ranks.

No collective is called before every rank has reported that it can run and with which settings,
because a collective hangs if a rank is missing. A failing rank calls none: it sends its reason to
the other ranks and exits, and they exit too.

The watchdog uses TCP connections from rank 0 to each other rank. The operating system closes them
when a process ends, TCP keepalive detects a lost machine, and missing answers to pings detect a
hung process. The errors of collectives are not parsed: they differ by backend and version.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any, Generic, NoReturn, TypeAlias, TypeVar

import torch.distributed as dist

from wan import system
from wan.device import Device
from wan.distributed.mesh import BACKENDS, ParallelGroups, make_parallel_groups
from wan.settings.errors import InputError, Terminated, get_exit_code

T = TypeVar("T")
Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
Notify = Callable[[str], None]
Describe = Callable[[BaseException], str | None]
RunOncePerNode = Callable[[Callable[[], None]], None]
"""Calls a function on local rank 0 of each machine; the other ranks wait until it returns."""

_POLL_INTERVAL = 0.1  # seconds between two queries of the store
_PING_INTERVAL = 1.0  # seconds between two pings
_SELF_REPORT_DELAY = 1.0  # seconds in which a rank may detect the failure of another one first
_LOSS_DELAY = 3.0  # seconds in which a lost rank is reported after a collective has failed
_EXIT_GRACE = 8.0  # seconds in which the main thread should exit after a rank was lost
_STORE_TIMEOUT = 5.0  # seconds for an answer of the store
_TIMEOUT_MARGIN = timedelta(seconds=10)  # a hung rank is reported before a collective times out
# A machine that acknowledges nothing for a minute is lost; a network can fail for some seconds.
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 6, "TCP_USER_TIMEOUT": 60_000}
_KILLED = "ended unexpectedly (killed, or out of memory); the video was not written."
_ORPHANED = "ended unexpectedly, because its torchrun did; the video was not written."


@dataclass(frozen=True)
class RankEnv:
    """The environment variables of torchrun or another launcher."""

    rank: int
    world_size: int  # the number of ranks
    local_rank: int  # among the ranks of this node
    node: str  # number of torchrun's agent
    address: str  # of the machine of rank 0, where the store is
    port: int  # of the store
    torchrun: bool  # torchrun's agent is the parent process
    holds_store: bool  # this rank opens the store; under torchrun its agent does
    attempt: str  # torchrun's restart count; its store keeps the keys of earlier attempts


def read_rank_env() -> RankEnv:
    """Read the launcher's variables; `wan.env` has validated ranks and world sizes.

    Raises:
        InputError: MASTER_ADDR or MASTER_PORT is missing or malformed.
    """
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not address:
        raise InputError("MASTER_ADDR", None, "is not set, but WORLD_SIZE is", "use torchrun")
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise InputError("MASTER_PORT", repr(port), "is not a port (1 to 65535)", "use torchrun")
    rank, agent = int(os.environ["RANK"]), os.environ.get("TORCHELASTIC_USE_AGENT_STORE")
    return RankEnv(
        rank,
        int(os.environ["WORLD_SIZE"]),
        int(os.environ["LOCAL_RANK"]),
        os.environ.get("GROUP_RANK", ""),
        address,
        int(port),
        torchrun="TORCHELASTIC_RUN_ID" in os.environ,
        holds_store=rank == 0 and agent != "True",
        attempt=os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


@dataclass(frozen=True)
class PreparedRun(Generic[T]):
    """A run that one rank has prepared, before any network is built."""

    seed: int  # all ranks use the seed of rank 0
    with_seed: Callable[[int], T]  # returns the run with a common seed
    device: Device
    mesh_sizes: tuple[int, int, int]  # of the mesh: (cfg, ring, ulysses)
    timeout: timedelta  # of a collective, and of a rank's answers
    invariants: Mapping[str, Json]  # values that must be equal on all ranks, by setting


class StartError(InputError):
    """The run cannot start. Every rank raises it, and one rank per node prints it."""

    code = 2


@dataclass(frozen=True)
class Timeouts:
    """Seconds of waiting for other ranks: until the first notice, between notices, in total."""

    first_notice: float = 30
    notice_interval: float = 60
    limit: float = 600


def run_ranks(
    prepare: Callable[[RunOncePerNode], PreparedRun[T]],
    work: Callable[[T, ParallelGroups], int],
    describe: Describe,
    notify: Notify,
    timeouts: Timeouts = Timeouts(),
) -> int:
    """Prepare on every rank, check that all ranks agree, then call work() on every rank.

    Args:
        prepare: Called before the ranks communicate. An exception ends all ranks.
        work: Called if all ranks have prepared the same run; returns the exit code.
        describe: Returns the message of a user's error, None for a defect.
        notify: Prints one line to the user.

    Returns:
        The exit code of the work, or of a run that did not start. A rank that fails later does not
        return: it ends its process.
    """
    env = read_rank_env()
    notify_node = notify if env.local_rank == 0 else lambda _: None  # one rank per node prints
    try:
        store = _open_store(env, timeouts, notify_node)
        with _translate_store_errors():
            watchdog = Watchdog(env, store, notify)
    except StartError as reason:
        notify_node(str(reason))
        return reason.code
    try:
        with _translate_store_errors():
            prepared, seed = _Rendezvous(env, store, watchdog, timeouts, notify_node).agree_on_run(
                prepare, describe
            )
        watchdog.silence_limit = prepared.timeout.total_seconds()
        groups = join_ranks(
            store, env, prepared.device, prepared.mesh_sizes, prepared.timeout + _TIMEOUT_MARGIN
        )
        code = work(prepared.with_seed(seed), groups)
    except StartError as reason:
        notify_node(str(reason))
        code = reason.code
    except SystemExit:  # --help
        watchdog.sign_off()
        raise
    except BaseException as error:
        _end_process(watchdog, error, describe, notify)
    watchdog.sign_off()
    return code


def join_ranks(
    store: dist.Store, env: RankEnv, device: Device, sizes: tuple[int, int, int], timeout: timedelta
) -> ParallelGroups:
    """Initialize the process group and make the mesh; every rank must call this."""
    store.set_timeout(timeout)  # groups on accelerators use it when first used
    dist.init_process_group(
        BACKENDS[device.type],
        store=dist.PrefixStore("wan", store),
        rank=env.rank,
        world_size=env.world_size,
        timeout=timeout,
        device_id=device.torch_device if device.type == "cuda" else None,
    )
    groups = make_parallel_groups(device, sizes, timeout)
    groups.warm_up()
    return groups


def _open_store(env: RankEnv, timeouts: Timeouts, notify: Notify) -> dist.Store:
    """Open the key-value store at MASTER_ADDR and MASTER_PORT, or connect to it."""
    subject = f"The store of the ranks at {env.address}:{env.port} (MASTER_ADDR and MASTER_PORT)"

    def open_or_get_error() -> dist.Store | Exception:
        try:
            socket.getaddrinfo(env.address, env.port)  # an unknown name is refused at once
            return dist.TCPStore(
                "localhost" if env.holds_store else env.address,
                env.port,
                is_master=env.holds_store,
                timeout=timedelta(seconds=timeouts.limit),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except (OSError, UnicodeError, dist.DistError) as error:
            return error

    notice = threading.Timer(
        timeouts.first_notice, notify, [f"{subject} does not answer; still waiting."]
    )
    notice.start()
    timeout_error: dist.Store | Exception = TimeoutError("no answer")
    store = _call_with_timeout(timeouts.limit + _STORE_TIMEOUT, open_or_get_error, timeout_error)
    notice.cancel()
    if isinstance(store, dist.Store):
        return dist.PrefixStore(f"attempt {env.attempt}", store)
    why = f"cannot be {'opened' if env.holds_store else 'reached'} ({str(store).splitlines()[0]})"
    remedy = "give the machine of rank 0 and a --master_port that is free and open there"
    raise StartError(subject, None, why, remedy) from store


@contextmanager
def _translate_store_errors() -> Iterator[None]:
    """Raise StartError if the store fails because its process has ended."""
    try:
        yield
    except dist.DistError as error:
        raise StartError("The rank that held the store has ended; start again") from error


@dataclass(frozen=True)
class RankStatus:
    """A rank's report before the work: its error, or its seed and invariants."""

    rank: int
    host: str
    error: str | None = None
    code: int = 0  # the exit code for the error
    invariants: Mapping[str, Json] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True)
class _Rendezvous:
    """Makes all ranks start the same run, or none, through the store."""

    env: RankEnv
    store: dist.Store
    watchdog: Watchdog
    timeouts: Timeouts
    notify: Notify

    def agree_on_run(
        self, prepare: Callable[[RunOncePerNode], PreparedRun[T]], describe: Describe
    ) -> tuple[PreparedRun[T], int]:
        """Return the run of this rank, and the seed of rank 0.

        Raises:
            StartError: A rank is missing, cannot run, or differs; all ranks raise the same.
        """
        env, store = self.env, self.store
        store.set(f"started/{env.rank}", "")
        self._wait_for_keys(["started/0"])
        status = RankStatus(env.rank, socket.gethostname())
        prepared = None
        try:
            with _translate_store_errors():
                self.watchdog.connect_to_rank0()
            prepared = prepare(self._run_once_per_node)
            status = replace(status, invariants=prepared.invariants, seed=prepared.seed)
        except Exception as error:  # defects too: the other ranks must not wait for this one
            sentence = describe(error)
            if sentence is None:
                traceback.print_exc()
            status = replace(
                status, error=sentence or f"{_format_error(error)}.", code=get_exit_code(error)
            )
        if env.local_rank == 0:
            store.set(f"prepared/{self.watchdog.this_rank.node}", status.error or "")
        status_keys = [f"statement/{rank}" for rank in range(env.world_size)]
        store.set(status_keys[env.rank], json.dumps(asdict(status)))
        self._wait_for_keys(status_keys)
        statuses = [RankStatus(**json.loads(store.get(key))) for key in status_keys]
        refusal = find_first_mismatch(statuses)
        if refusal is not None or prepared is None:
            start_error = StartError(refusal or "")
            start_error.code = next((s.code for s in statuses if s.error), 2)
            raise start_error
        return prepared, statuses[0].seed

    def _run_once_per_node(self, make: Callable[[], None]) -> None:
        if self.env.local_rank == 0:
            make()
            return
        ready_key = f"prepared/{self.watchdog.this_rank.node}"
        self._wait_for_keys([ready_key])
        if error := self.store.get(ready_key).decode():
            raise InputError(error)

    def _wait_for_keys(self, keys: list[str]) -> None:
        """Wait until other ranks have set keys, and print which ranks are missing."""
        start, next_notice = time.monotonic(), self.timeouts.first_notice
        while not self.store.check(keys):
            waited = time.monotonic() - start
            if waited >= self.timeouts.limit:
                subject = f"Waited {waited:.0f} s for {self._describe_missing_ranks()}"
                raise StartError(subject, remedy=f"start all {self.env.world_size} ranks alike")
            if waited >= next_notice:
                self.notify(f"Waiting for {self._describe_missing_ranks()}; {waited:.0f} s so far.")
                next_notice += self.timeouts.notice_interval
            time.sleep(_POLL_INTERVAL)

    def _describe_missing_ranks(self) -> str:
        world_size, has_keys = self.env.world_size, self.store.check
        without_status = [rank for rank in range(world_size) if not has_keys([f"statement/{rank}"])]
        not_started = [rank for rank in without_status if not has_keys([f"started/{rank}"])]
        ranks_by_action = {
            "start": not_started,
            "prepare the run": [r for r in without_status if r not in not_started],
        }
        return " and ".join(
            f"rank {', '.join(map(str, ranks))} of {world_size} to {action}"
            for action, ranks in ranks_by_action.items()
            if ranks
        )


def find_first_mismatch(statuses: Sequence[RankStatus]) -> str | None:
    """Return why the run cannot start, the same sentence on every rank; None if it can."""
    rank0 = statuses[0]
    for status in statuses:
        if status.error is not None:
            same = all(other_status.error == status.error for other_status in statuses)
            return status.error if same else f"rank {status.rank} on {status.host}: {status.error}"
    for status in statuses:
        for name in sorted(rank0.invariants.keys() | status.invariants.keys()):
            expected, actual = (s.invariants.get(name, "not given") for s in (rank0, status))
            if expected != actual:
                difference = f"is {actual}, but {expected} on rank 0"
                difference = (
                    "differs from that of rank 0" if isinstance(expected, dict) else difference
                )
                return f"rank {status.rank} on {status.host}: {name} {difference}; start all ranks alike."
    return None


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
        """Yield messages until the connection is closed."""
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
        """Connect to rank 0, which runs on the machine of the store and has started.

        Raises:
            InputError: Rank 0 cannot be reached.
        """
        if self.this_rank.rank == 0:
            return
        port, token, peer = json.loads(self._store.get("rank 0"))
        try:
            connection = socket.create_connection((self._env.address, port), timeout=_STORE_TIMEOUT)
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
        deadline = time.monotonic() + _STORE_TIMEOUT
        while self.this_rank.rank == 0 and time.monotonic() < deadline:
            if not any(link.is_open and link.peer for link in self._connections):
                break
            time.sleep(0.05)

    def describe_loss(self, timeout: float) -> str | None:
        """Return which rank was lost, in a sentence; None if none was.

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
        """Send the other ranks the reason of this rank's failure: "ended: Out of memory."."""
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
        spokesman = _call_with_timeout(
            _STORE_TIMEOUT, lambda: self._store.compare_set(key, "", rank).decode(), rank
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
        for kind, *fields in connection.iter_messages():
            if connection.peer is None:
                if kind != "hello" or fields[:1] != [self._token]:  # another program has connected
                    break
                connection.peer = Peer(**fields[1])
            elif kind == "ping":
                connection.send("pong")
            elif kind == "pong":
                connection.has_answered = True
            elif kind == "left":
                connection.is_open = False
            elif kind == "lost":
                self._handle_loss(Peer(**fields[0]), *fields[1:])
        if connection.peer is not None and connection.is_open:
            self._handle_loss(connection.peer, _KILLED, False)
        connection.is_open = False

    def _handle_loss(self, culprit: Peer, reason: str, is_hung: bool) -> None:
        """Report a lost rank to all others and end; a hung process of this machine is killed."""
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


def _start_thread(target: Callable[..., None], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, daemon=True)
    thread.start()
    return thread


def _end_process(
    watchdog: Watchdog, error: BaseException, describe: Describe, notify: Notify
) -> NoReturn:
    """Print why this rank ends, unless another rank of the node does, and end the process."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # torchrun ends the others as soon as one has ended
    try:
        sentence = describe(error)
        # SIGTERM of torchrun and errors of collectives may be caused by another rank.
        timeout = 1.0 if isinstance(error, Terminated) else 0
        if sentence is None and isinstance(error, RuntimeError):
            timeout = _LOSS_DELAY
        loss = watchdog.describe_loss(timeout)
        if loss is not None or sentence is not None:
            if watchdog.is_spokesman():
                notify(loss or sentence or "")
        else:
            traceback.print_exception(error)
            notify(f"rank {watchdog.this_rank.rank} failed: {_format_error(error)}")
            watchdog.is_spokesman()  # no other rank prints it again
        if loss is None:
            watchdog.report_failure(f"ended: {sentence or _format_error(error)}")
        sys.stdout.flush()
        watchdog.sign_off()
    except Exception:  # a defect here, or a closed output: the process ends nevertheless
        traceback.print_exc()
    finally:
        # Without destructors, which would wait for the other ranks.
        os._exit(1 if watchdog.interrupted else get_exit_code(error))


def _call_with_timeout(seconds: float, query: Callable[[], T], default: T) -> T:
    """Return the result of a query of the store; `default` if it fails or times out."""
    answer = [default]

    def wait() -> None:
        with suppress(dist.DistError):
            answer[0] = query()

    _start_thread(wait).join(seconds)  # most requests have no timeout
    return answer[0]


def _format_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
