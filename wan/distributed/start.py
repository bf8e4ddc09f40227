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

from wan import host
from wan.device import Device
from wan.distributed.mesh import BACKENDS, Team, form
from wan.settings.errors import InputError, Terminated, exit_code

T = TypeVar("T")
Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
Say = Callable[[str], None]
Describe = Callable[[BaseException], str | None]
Once = Callable[[Callable[[], None]], None]
"""Calls a function on local rank 0 of each machine; the other ranks wait until it returns."""

_POLL = 0.1  # seconds between two queries of the store
_PING = 1.0  # seconds between two pings
_OWN = 1.0  # seconds in which a rank may detect the failure of another one first
_NEWS = 3.0  # seconds in which a lost rank is reported after a collective has failed
_GRACE = 8.0  # seconds in which the main thread should exit after a rank was lost
_ANSWER = 5.0  # seconds for an answer of the store
_MARGIN = timedelta(seconds=10)  # a hung rank is reported before a collective times out
# A machine that acknowledges nothing for a minute is lost; a network can fail for some seconds.
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 6, "TCP_USER_TIMEOUT": 60_000}
_KILLED = "ended unexpectedly (killed, or out of memory); the video was not written."
_ORPHANED = "ended unexpectedly, because its torchrun did; the video was not written."


@dataclass(frozen=True)
class RankEnv:
    """The environment variables of torchrun or another launcher."""

    rank: int
    world: int  # the number of ranks
    local_rank: int  # among the ranks of this node
    node: str  # number of torchrun's agent
    address: str  # of the machine of rank 0, where the store is
    port: int  # of the store
    torchrun: bool  # torchrun's agent is the parent process
    holds_store: bool  # this rank opens the store; under torchrun its agent does
    attempt: str  # torchrun's restart count; its store keeps the keys of earlier attempts


def rank_env() -> RankEnv:
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
class Prepared(Generic[T]):
    """A run that one rank has prepared, before any network is built."""

    seed: int  # all ranks use the seed of rank 0
    seeded: Callable[[int], T]  # returns the run with a common seed
    device: Device
    sizes: tuple[int, int, int]  # of the mesh: (cfg, ring, ulysses)
    timeout: timedelta  # of a collective, and of a rank's answers
    facts: Mapping[str, Json]  # values that must be equal on all ranks, by setting


class StartError(InputError):
    """The run cannot start. Every rank raises it, and one rank per node prints it."""

    code = 2


@dataclass(frozen=True)
class Patience:
    """Seconds of waiting for other ranks: until the first notice, between notices, in total."""

    first: float = 30
    every: float = 60
    limit: float = 600


def run(
    prepare: Callable[[Once], Prepared[T]],
    work: Callable[[T, Team], int],
    describe: Describe,
    say: Say,
    patience: Patience = Patience(),
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
    env = rank_env()
    voice = say if env.local_rank == 0 else lambda _: None  # one rank per node prints
    try:
        store = _open_store(env, patience, voice)
        with _while_the_store_answers():
            watch = Watch(env, store, say)
    except StartError as reason:
        voice(str(reason))
        return reason.code
    try:
        with _while_the_store_answers():
            prepared, seed = _Agreement(env, store, watch, patience, voice).reach(prepare, describe)
        watch.limit = prepared.timeout.total_seconds()
        team = join(store, env, prepared.device, prepared.sizes, prepared.timeout + _MARGIN)
        code = work(prepared.seeded(seed), team)
    except StartError as reason:
        voice(str(reason))
        code = reason.code
    except SystemExit:  # --help
        watch.leave()
        raise
    except BaseException as error:
        _end(watch, error, describe, say)
    watch.leave()
    return code


def join(
    store: dist.Store, env: RankEnv, device: Device, sizes: tuple[int, int, int], timeout: timedelta
) -> Team:
    """Initialize the process group and make the mesh; every rank must call this."""
    store.set_timeout(timeout)  # groups on accelerators use it when first used
    dist.init_process_group(
        BACKENDS[device.type],
        store=dist.PrefixStore("wan", store),
        rank=env.rank,
        world_size=env.world,
        timeout=timeout,
        device_id=device.torch_device if device.type == "cuda" else None,
    )
    team = form(device, sizes, timeout)
    team.connect()
    return team


def _open_store(env: RankEnv, patience: Patience, say: Say) -> dist.Store:
    """Open the key-value store at MASTER_ADDR and MASTER_PORT, or connect to it."""
    where = f"The store of the ranks at {env.address}:{env.port} (MASTER_ADDR and MASTER_PORT)"

    def opened() -> dist.Store | Exception:
        try:
            socket.getaddrinfo(env.address, env.port)  # an unknown name is refused at once
            return dist.TCPStore(
                "localhost" if env.holds_store else env.address,
                env.port,
                is_master=env.holds_store,
                timeout=timedelta(seconds=patience.limit),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except (OSError, UnicodeError, dist.DistError) as error:
            return error

    notice = threading.Timer(patience.first, say, [f"{where} does not answer; still waiting."])
    notice.start()
    late: dist.Store | Exception = TimeoutError("no answer")
    store = _within(patience.limit + _ANSWER, opened, late)
    notice.cancel()
    if isinstance(store, dist.Store):
        return dist.PrefixStore(f"attempt {env.attempt}", store)
    why = f"cannot be {'opened' if env.holds_store else 'reached'} ({str(store).splitlines()[0]})"
    remedy = "give the machine of rank 0 and a --master_port that is free and open there"
    raise StartError(where, None, why, remedy) from store


@contextmanager
def _while_the_store_answers() -> Iterator[None]:
    """Raise StartError if the store fails because its process has ended."""
    try:
        yield
    except dist.DistError as error:
        raise StartError("The rank that held the store has ended; start again") from error


@dataclass(frozen=True)
class Statement:
    """A rank's report before the work: its error, or its seed and invariants."""

    rank: int
    host: str
    error: str | None = None
    code: int = 0  # the exit code for the error
    facts: Mapping[str, Json] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True)
class _Agreement:
    """Makes all ranks start the same run, or none, through the store."""

    env: RankEnv
    store: dist.Store
    watch: Watch
    patience: Patience
    say: Say

    def reach(
        self, prepare: Callable[[Once], Prepared[T]], describe: Describe
    ) -> tuple[Prepared[T], int]:
        """Return the run of this rank, and the seed of rank 0.

        Raises:
            StartError: A rank is missing, cannot run, or differs; all ranks raise the same.
        """
        env, store = self.env, self.store
        store.set(f"started/{env.rank}", "")
        self._wait(["started/0"])
        own = Statement(env.rank, socket.gethostname())
        prepared = None
        try:
            with _while_the_store_answers():
                self.watch.connect()
            prepared = prepare(self._once)
            own = replace(own, facts=prepared.facts, seed=prepared.seed)
        except Exception as error:  # defects too: the other ranks must not wait for this one
            sentence = describe(error)
            if sentence is None:
                traceback.print_exc()
            own = replace(own, error=sentence or f"{_named(error)}.", code=exit_code(error))
        if env.local_rank == 0:
            store.set(f"prepared/{self.watch.own.node}", own.error or "")
        keys = [f"statement/{rank}" for rank in range(env.world)]
        store.set(keys[env.rank], json.dumps(asdict(own)))
        self._wait(keys)
        statements = [Statement(**json.loads(store.get(key))) for key in keys]
        refusal = verdict(statements)
        if refusal is not None or prepared is None:
            reason = StartError(refusal or "")
            reason.code = next((s.code for s in statements if s.error), 2)
            raise reason
        return prepared, statements[0].seed

    def _once(self, make: Callable[[], None]) -> None:
        if self.env.local_rank == 0:
            make()
            return
        ready = f"prepared/{self.watch.own.node}"
        self._wait([ready])
        if error := self.store.get(ready).decode():
            raise InputError(error)

    def _wait(self, keys: list[str]) -> None:
        """Wait until other ranks have set keys, and print which ranks are missing."""
        start, notice = time.monotonic(), self.patience.first
        while not self.store.check(keys):
            waited = time.monotonic() - start
            if waited >= self.patience.limit:
                what = f"Waited {waited:.0f} s for {self._missing()}"
                raise StartError(what, remedy=f"start all {self.env.world} ranks alike")
            if waited >= notice:
                self.say(f"Waiting for {self._missing()}; {waited:.0f} s so far.")
                notice += self.patience.every
            time.sleep(_POLL)

    def _missing(self) -> str:
        world, check = self.env.world, self.store.check
        lacking = [rank for rank in range(world) if not check([f"statement/{rank}"])]
        absent = [rank for rank in lacking if not check([f"started/{rank}"])]
        waits = {"start": absent, "prepare the run": [r for r in lacking if r not in absent]}
        return " and ".join(
            f"rank {', '.join(map(str, ranks))} of {world} to {what}"
            for what, ranks in waits.items()
            if ranks
        )


def verdict(statements: Sequence[Statement]) -> str | None:
    """Return why the run cannot start, the same sentence on every rank; None if it can."""
    main = statements[0]
    for one in statements:
        if one.error is not None:
            same = all(other.error == one.error for other in statements)
            return one.error if same else f"rank {one.rank} on {one.host}: {one.error}"
    for one in statements:
        for name in sorted(main.facts.keys() | one.facts.keys()):
            ours, theirs = (s.facts.get(name, "not given") for s in (main, one))
            if ours != theirs:
                how = f"is {theirs}, but {ours} on rank 0"
                how = "differs from that of rank 0" if isinstance(ours, dict) else how
                return f"rank {one.rank} on {one.host}: {name} {how}; start all ranks alike."
    return None


@dataclass(frozen=True)
class Peer:
    """The identity of a rank."""

    rank: int
    node: str  # equal for the ranks of one torchrun, which share a terminal
    machine: str  # equal for processes that can signal each other
    host: str
    pid: int


class _Link:
    """A connection between rank 0 and another rank; a message is one line of JSON.

    Attributes:
        peer: The other rank; None before its hello message.
        is_open: The other rank has neither signed off nor ended.
        has_answered: The other rank has answered the last ping.
        silent_seconds: Seconds since the unanswered ping.
    """

    def __init__(self, connection: socket.socket, peer: Peer | None = None) -> None:
        self.peer, self.open = peer, True
        self.answered, self.silent = True, 0.0
        self._connection, self._file = connection, connection.makefile("rb")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            if hasattr(socket, option):  # on Linux
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def send(self, *message: Json) -> None:
        with suppress(OSError):  # the reading thread detects a closed connection
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def messages(self) -> Iterator[list[Any]]:
        """Yield messages until the connection is closed."""
        with suppress(OSError, ValueError), self._connection:
            for line in self._file:
                message = json.loads(line)
                if isinstance(message, list) and message:
                    yield message


class Watch:
    """Detects lost ranks in threads, because the main thread may be waiting in a collective.

    When a rank is lost, SIGTERM is sent to the main thread. If it does not end in time, the process
    is ended.

    Attributes:
        silence_limit: Seconds in which a rank must answer a ping.
        interrupted: SIGTERM was sent to the main thread.
    """

    def __init__(self, env: RankEnv, store: dist.Store, say: Say) -> None:
        machine = host.machine()
        with suppress(OSError):  # not Linux
            machine += os.readlink("/proc/self/ns/pid")
        node = f"{machine} {env.node}"
        self.own = Peer(env.rank, node, machine, socket.gethostname(), os.getpid())
        self.limit, self.interrupted = float("inf"), False
        self._env, self._say, self._parent = env, say, os.getppid()
        self._store = store.clone()  # type: ignore[attr-defined]  # not delayed by other requests
        self._links: list[_Link] = []
        self._token = secrets.token_hex()
        self._loss: tuple[Peer, str] | None = None
        self._lock, self._known, self._ending = threading.Lock(), threading.Event(), False
        if env.rank == 0:
            ipv6 = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if ipv6 else socket.AF_INET
            server = socket.create_server(("", 0), family=family, dualstack_ipv6=ipv6, backlog=512)
            about = [server.getsockname()[1], self._token, asdict(self.own)]
            self._store.set("rank 0", json.dumps(about))
            _in_thread(self._accept, server)
        _in_thread(self._beat)

    def connect(self) -> None:
        """Connect to rank 0, which runs on the machine of the store and has started.

        Raises:
            InputError: Rank 0 cannot be reached.
        """
        if self.own.rank == 0:
            return
        port, token, peer = json.loads(self._store.get("rank 0"))
        try:
            connection = socket.create_connection((self._env.address, port), timeout=_ANSWER)
        except OSError as error:
            what = f"Rank 0 at {self._env.address}:{port}"
            why = f"cannot be reached ({error.strerror or error})"
            remedy = "open the ports between the machines"
            raise InputError(what, None, why, remedy) from error
        connection.settimeout(None)
        self._join(connection, Peer(**peer)).send("hello", token, asdict(self.own))

    def leave(self) -> None:
        """Sign off from the other ranks; rank 0, which may hold the store, ends last."""
        self._ending = True
        self._tell("left")
        deadline = time.monotonic() + _ANSWER
        while self.own.rank == 0 and time.monotonic() < deadline:
            if not any(link.open and link.peer for link in self._links):
                break
            time.sleep(0.05)

    def loss(self, wait: float) -> str | None:
        """Return which rank was lost, in a sentence; None if none was.

        Called when the main thread ends, which is not interrupted from then on.

        Args:
            timeout: Seconds to wait for a report of a lost rank.
        """
        self._ending = True
        self._known.wait(wait)
        if self._loss is None:
            return None
        culprit, how = self._loss
        if how == _ORPHANED and culprit.node == self.own.node:
            return "torchrun has ended unexpectedly; the video was not written."
        there = "" if culprit.machine == self.own.machine else f" on {culprit.host}"
        return f"Rank {culprit.rank}{there} {how}"

    def fail(self, how: str) -> None:
        """Send the other ranks the reason of this rank's failure: "ended: Out of memory."."""
        self._tell("lost", asdict(self.own), how, False)

    def may_say(self) -> bool:
        """Whether this rank prints why the run ends: the first caller of each node does."""
        culprit, how = self._loss or (self.own, "ended:")
        near, orphaned = culprit.node == self.own.node, how == _ORPHANED
        if (near and orphaned) or (culprit.rank == 0 and not how.startswith("ended:")):
            # The store may be gone with torchrun or rank 0, unless this is rank 0.
            return self._env.local_rank == int(near and not orphaned and culprit != self.own)
        key, rank = f"said/{self.own.node}", str(self.own.rank)
        said = _within(_ANSWER, lambda: self._store.compare_set(key, "", rank).decode(), rank)
        return said == rank

    def _tell(self, *message: Json) -> None:
        for link in list(self._links):
            link.send(*message)

    def _accept(self, server: socket.socket) -> None:
        while True:
            self._join(server.accept()[0])

    def _join(self, connection: socket.socket, peer: Peer | None = None) -> _Link:
        link = _Link(connection, peer)
        self._links.append(link)
        _in_thread(self._listen, link)
        return link

    def _beat(self) -> None:
        """Every second, check that torchrun runs, and ping the ranks that have answered."""
        before = time.monotonic()
        while True:
            # Only torchrun runs as long as its ranks; other launchers may exit after starting them.
            if self._env.torchrun and os.getppid() != self._parent:
                self._learn(self.own, _ORPHANED, False)
            now = time.monotonic()
            beat, before = min(now - before, 2 * _PING), now  # excludes a pause of this process
            for link in list(self._links):
                if link.peer is None or not link.open:
                    continue
                link.silent += beat
                if link.answered:
                    link.answered, link.silent = False, 0.0
                    link.send("ping")
                elif link.silent > self.limit:
                    silent = f"has not answered for {self.limit:.0f} s (--dist_timeout)"
                    self._learn(link.peer, f"{silent}; the video was not written.", True)
            time.sleep(_PING)

    def _listen(self, link: _Link) -> None:
        for kind, *rest in link.messages():
            if link.peer is None:
                if kind != "hello" or rest[:1] != [self._token]:  # another program has connected
                    break
                link.peer = Peer(**rest[1])
            elif kind == "ping":
                link.send("pong")
            elif kind == "pong":
                link.answered = True
            elif kind == "left":
                link.open = False
            elif kind == "lost":
                self._learn(Peer(**rest[0]), *rest[1:])
        if link.peer is not None and link.open:
            self._learn(link.peer, _KILLED, False)
        link.open = False

    def _learn(self, culprit: Peer, how: str, stopped: bool) -> None:
        """Report a lost rank to all others and end; a hung process of this machine is killed."""
        with self._lock:
            if self._loss is not None:
                return
            self._loss = culprit, how
        self._tell("lost", asdict(culprit), how, stopped)
        self._known.set()
        if stopped and culprit.machine == self.own.machine and culprit != self.own:
            with suppress(OSError):
                os.kill(culprit.pid, signal.SIGKILL)
        time.sleep(_OWN)
        if self._ending:
            return
        self.interrupted = True
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        time.sleep(_GRACE)
        if not self._ending:  # the main thread waits in code that handles no signals
            if self.may_say():
                self._say(self.loss(0) or "")
            os._exit(1)


def _in_thread(work: Callable[..., None], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=work, args=args, daemon=True)
    thread.start()
    return thread


def _end(watch: Watch, error: BaseException, describe: Describe, say: Say) -> NoReturn:
    """Print why this rank ends, unless another rank of the node does, and end the process."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # torchrun ends the others as soon as one has ended
    try:
        sentence = describe(error)
        # SIGTERM of torchrun and errors of collectives may be caused by another rank.
        wait = 1.0 if isinstance(error, Terminated) else 0
        if sentence is None and isinstance(error, RuntimeError):
            wait = _NEWS
        lost = watch.loss(wait)
        if lost is not None or sentence is not None:
            if watch.may_say():
                say(lost or sentence or "")
        else:
            traceback.print_exception(error)
            say(f"rank {watch.own.rank} failed: {_named(error)}")
            watch.may_say()  # no other rank prints it again
        if lost is None:
            watch.fail(f"ended: {sentence or _named(error)}")
        sys.stdout.flush()
        watch.leave()
    except Exception:  # a defect here, or a closed output: the process ends nevertheless
        traceback.print_exc()
    finally:
        # Without destructors, which would wait for the other ranks.
        os._exit(1 if watch.interrupted else exit_code(error))


def _within(seconds: float, ask: Callable[[], T], otherwise: T) -> T:
    """Return the result of a query of the store; `default` if it fails or times out."""
    answer = [otherwise]

    def wait() -> None:
        with suppress(dist.DistError):
            answer[0] = ask()

    _in_thread(wait).join(seconds)  # most requests have no timeout
    return answer[0]


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
