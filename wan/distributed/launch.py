"""Several ranks, one run: they meet at a store, prepare, agree, work, and end together.

Nothing here is a collective before every rank has said that it can run, because a collective hangs
where one rank does not come. On a failing path none is called at all: a rank says what happened and
ends, which ends the others.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Generic, NoReturn, TypeAlias, TypeVar

import torch.distributed as dist

from wan.device import Device
from wan.distributed import mesh
from wan.distributed.mesh import Place, Team
from wan.distributed.watch import Peer, Watch, own_peer, within
from wan.settings.errors import InputError, Terminated, exit_code

T = TypeVar("T")
Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
Say = Callable[[str], None]
Describe = Callable[[BaseException], str | None]
Once = Callable[[Callable[[], None]], None]
"""Calls a function on local rank 0 of each machine; the others come back when it has prepared."""
_POLL = 0.1  # seconds


@dataclass(frozen=True)
class Prepared(Generic[T]):
    """What one rank has found out by itself; nothing is built yet.

    Attributes:
        seed: What this rank would take; that of rank 0 is everybody's.
        seeded: The run with the seed that all share.
        device: Where this rank computes.
        sizes: Of the mesh: (cfg, ring, ulysses).
        timeout: For every collective.
        facts: What has to be equal on all ranks, under the names a user knows.
    """

    seed: int
    seeded: Callable[[int], T]
    device: Device
    sizes: tuple[int, int, int]
    timeout: timedelta
    facts: Mapping[str, Json]


class StartError(InputError):
    """The run cannot begin; every rank finds so by itself, and one per machine says it."""

    def __init__(self, sentence: str, code: int = 2) -> None:
        super().__init__(sentence)
        self.code = code


@dataclass(frozen=True)
class Patience:
    """Seconds that other ranks are waited for: until it is said, said again, and in all."""

    first: float = 30
    every: float = 60
    limit: float = 600

    def until(
        self, done: Callable[[], bool], lacking: Callable[[], str], remedy: str, say: Say
    ) -> None:
        """Wait until `done`. lacking: what has not come, as the beginning of a sentence.

        Raises:
            StartError: When the limit has passed.
        """
        start, notice = time.monotonic(), self.first
        while not done():
            waited = time.monotonic() - start
            if waited >= self.limit:
                raise StartError(f"{lacking()} within {_span(self.limit)}; {remedy}.")
            if waited >= notice:
                say(f"{lacking()} after {_span(notice)}; still waiting.")
                notice += self.every
            time.sleep(_POLL)


PATIENT = Patience()


def run(
    prepare: Callable[[Once], Prepared[T]],
    work: Callable[[T, Team], int],
    describe: Describe,
    say: Say,
    patience: Patience = PATIENT,
) -> int:
    """Prepare on every rank, agree with the others, and carry out.

    Args:
        prepare: Called before anything is known of the others. What it raises ends all ranks.
        work: Called on all ranks, if all can run and are to run the same; returns the exit code.
        describe: The sentence for an error that a user can act upon; None for a defect.
        say: Shows the user one line.
        patience: How long other ranks are waited for before the work.

    Returns:
        The exit code: that of the work, or of a run that was not begun. A rank that fails later
        does not return: it ends its process.
    """
    here = mesh.place()
    voice = say if here.local_rank == 0 else _silent  # one per machine
    try:
        store = _open_store(here, patience, voice)
    except StartError as reason:
        voice(str(reason))
        return reason.code
    watch = Watch(here, store.clone(), say)  # type: ignore[attr-defined]
    code = 0
    try:
        agreement = _Agreement(here, store, patience, voice)
        prepared, said = agreement.reach(prepare, describe)
        watch.know([statement.peer for statement in said])
        team = mesh.join(store, here, prepared.device, prepared.sizes, prepared.timeout)
        code = work(prepared.seeded(said[0].seed), team)
    except StartError as reason:
        voice(str(reason))
        code = reason.code
    except SystemExit:  # the help was asked for
        raise
    except BaseException as error:
        _end(here, watch, error, describe, say)
    watch.leave()
    return code


def _open_store(here: Place, patience: Patience, say: Say) -> dist.Store:
    """The key-value store at MASTER_ADDR and MASTER_PORT: torchrun's, or held by rank 0.

    PyTorch's own way to it waits for all ranks, and says nothing.
    """
    return _own_store(here) if here.holds_store else _found_store(here, patience, say)


def _own_store(here: Place) -> dist.Store:
    try:
        return dist.TCPStore(
            "localhost", here.port, is_master=True, wait_for_workers=False, multi_tenant=True
        )
    except dist.DistError as error:
        raise StartError(
            f"Port {here.port} (MASTER_PORT) cannot be opened for the other ranks; most likely "
            "it is taken: choose a free --master_port."
        ) from error


def _found_store(here: Place, patience: Patience, say: Say) -> dist.Store:
    try:
        socket.getaddrinfo(here.address, here.port)
    except (OSError, UnicodeError) as error:
        raise StartError(
            f"MASTER_ADDR is {here.address!r}, and no machine of that name is known ({error}); "
            "give the name or address of the machine of rank 0."
        ) from error
    where = f"{here.address}:{here.port} (MASTER_ADDR and MASTER_PORT)"
    refusal = ""

    def answers() -> bool:
        nonlocal refusal
        try:
            socket.create_connection((here.address, here.port), timeout=5).close()
        except OSError as error:
            refusal = f" ({error.strerror or error})"
            return False
        return True

    patience.until(
        answers,
        lambda: f"{where}, where the ranks meet, has not answered{refusal}",
        "start rank 0 there, or give its machine and a port that is open",
        say,
    )
    store = within(
        patience.first,
        lambda: dist.TCPStore(here.address, here.port, wait_for_workers=False),
        None,
    )
    if store is None:
        raise StartError(f"What answers at {where} is no rank 0; choose another --master_port.")
    return store


@dataclass(frozen=True)
class Statement:
    """One rank before the work.

    Attributes:
        peer: Who says it.
        error: Why it cannot run.
        code: Its exit code then.
        facts: What has to be equal everywhere.
        seed: Its own; that of rank 0 is everybody's.
    """

    peer: Peer
    error: str | None = None
    code: int = 0
    facts: Mapping[str, Json] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True)
class _Agreement:
    """How the ranks come to the same decision through the store."""

    here: Place
    store: dist.Store
    patience: Patience
    say: Say

    def reach(
        self, prepare: Callable[[Once], Prepared[T]], describe: Describe
    ) -> tuple[Prepared[T], list[Statement]]:
        """What this rank has prepared, and every rank's statement, by rank.

        Raises:
            StartError: On every rank with the same sentence, if one cannot run or differs; and
                where one has not come.
        """
        peer = own_peer(self.here.rank)
        ready = f"prepared/{peer.machine or peer.host}"
        self.store.set(f"here/{peer.rank}", "")
        prepared = None
        try:
            prepared = prepare(lambda make: self._once(ready, make))
            own = Statement(peer, None, 0, prepared.facts, prepared.seed)
        except Exception as error:  # a defect, too: the others are not left waiting for this rank
            sentence = describe(error)
            if sentence is None:
                traceback.print_exc()
            own = Statement(peer, sentence or f"{_named(error)}.", exit_code(error))
        if self.here.local_rank == 0:
            self.store.set(ready, own.error or "")
        try:
            said = self._exchange(own)
        except dist.DistError as lost:
            raise StartError(
                "The rank that held the others' store has ended; start again."
            ) from lost
        refusal = verdict(said)
        if refusal is not None or prepared is None:
            raise StartError(refusal or "", next((s.code for s in said if s.error), 2))
        return prepared, said

    def _once(self, ready: str, make: Callable[[], None]) -> None:
        if self.here.local_rank == 0:
            make()
            return
        self.patience.until(
            lambda: self.store.check([ready]),
            lambda: "Local rank 0 of this machine has not prepared the run",
            "start all ranks of a machine alike",
            self.say,
        )
        error = self.store.get(ready).decode()
        if error:
            raise InputError(error)

    def _exchange(self, own: Statement) -> list[Statement]:
        """Everybody's statement, when all have made theirs."""
        store, world = self.store, self.here.world
        store.set(f"statement/{own.peer.rank}", json.dumps(asdict(own)))
        keys = [f"statement/{rank}" for rank in range(world)]
        remedy = f"start all {world} ranks"
        self.patience.until(lambda: store.check(keys), self._absent, remedy, self.say)
        said = [_statement(store.get(key)) for key in keys]
        store.add("read", 1)
        if self.here.holds_store:
            self.patience.until(
                lambda: store.add("read", 0) == world,
                lambda: "Not all ranks have read what the others say",
                remedy,
                self.say,
            )
        return said

    def _absent(self) -> str:
        """Who has not made a statement: started yet, or not."""
        lacking = [r for r in range(self.here.world) if not self._has_set(f"statement/{r}")]
        never = [rank for rank in lacking if not self._has_set(f"here/{rank}")]
        busy = [rank for rank in lacking if rank not in never]
        parts = [f"{self._have(never)} not started"] if never else []
        parts += [f"{self._have(busy)} not prepared the run"] if busy else []
        return " and ".join(parts).replace("r", "R", 1)

    def _has_set(self, key: str) -> bool:
        return self.store.check([key])

    def _have(self, ranks: Sequence[int]) -> str:
        *some, last = [*map(str, ranks[:8]), *([f"{len(ranks) - 8} more"] if ranks[8:] else [])]
        if some:
            return f"ranks {', '.join(some)} and {last} of {self.here.world} have"
        return f"rank {last} of {self.here.world} has"


def verdict(statements: Sequence[Statement]) -> str | None:
    """Why the run cannot begin, in one sentence that is the same on every rank; None if it can."""
    for statement in statements:
        if statement.error is not None:
            alone = any(other.error != statement.error for other in statements)
            return _who(statement) + statement.error if alone else statement.error
    main = statements[0]
    for statement in statements:
        for name in sorted(main.facts.keys() | statement.facts.keys()):
            ours, theirs = (s.facts.get(name, "not given") for s in (main, statement))
            if ours != theirs:
                return (
                    f"{_who(statement)}{name} is {theirs}, but {ours} on rank 0; "
                    "start all ranks alike."
                )
    return None


def _end(here: Place, watch: Watch, error: BaseException, describe: Describe, say: Say) -> NoReturn:
    """Say why this rank ends, unless another rank does, and end."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # torchrun ends the others as soon as one has ended
    watch.stop()
    try:
        sentence = describe(error)
        # What may be another rank's doing: torchrun's signal, and what collectives raise.
        doubtful = isinstance(error, Terminated if sentence else RuntimeError)
        why = watch.lost(error) if doubtful else watch.told()
        if why is not None:
            if why:
                say(why)
        elif sentence is not None:
            if watch.first(here.rank):
                say(sentence)
        else:
            traceback.print_exception(error)
            say(f"rank {here.rank} failed: {_named(error)}")
            watch.first(here.rank)  # after the reason is out
        sys.stdout.flush()
        watch.leave()
    except Exception:  # a defect in here, or nobody reads any more: the process ends all the same
        traceback.print_exc()
    finally:
        # No destructors: they wait for the other ranks.
        os._exit(1 if watch.interrupted else exit_code(error))


def _statement(stored: bytes) -> Statement:
    fields = json.loads(stored)
    return Statement(**{**fields, "peer": Peer(**fields["peer"])})


def _who(statement: Statement) -> str:
    return f"rank {statement.peer.rank} on {statement.peer.host}: "


def _span(seconds: float) -> str:
    return f"{seconds:g} s" if seconds < 120 else f"{seconds / 60:g} minutes"


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _silent(_: str) -> None:
    pass
