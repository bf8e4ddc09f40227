"""Rendezvous of the ranks of a run through a key-value store.

No collective is called before every rank has reported that it can run and with which settings,
because a collective hangs if a rank is missing. A failing rank calls none: it sends its reason to
the other ranks and exits, and they exit too. `wan.distributed.watchdog` detects lost ranks.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Generic, NoReturn, TypeVar

import torch.distributed as dist

from wan.device import Device
from wan.distributed.mesh import BACKENDS, ParallelGroups, make_parallel_groups
from wan.distributed.rank_env import RankEnv, read_rank_env
from wan.distributed.watchdog import STORE_TIMEOUT, Json, Notify, Watchdog, call_with_timeout
from wan.settings.errors import InputError, Terminated, get_exit_code

T = TypeVar("T")
Describe = Callable[[BaseException], str | None]
RunOncePerNode = Callable[[Callable[[], None]], None]
"""Calls a function on local rank 0 of each machine; the other ranks wait until it returns."""

_POLL_INTERVAL = 0.1  # seconds between two queries of the store
_LOSS_DELAY = 3.0  # seconds in which a lost rank is reported after a collective has failed
_TIMEOUT_MARGIN = timedelta(seconds=10)  # a hung rank is reported before a collective times out


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
    """Prepares on every rank, checks that all ranks agree, then calls work() on every rank.

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
        # torchrun ends the others as soon as one has ended: all wait for the one that prints.
        _ignore_signals()
        printed = f"printed/{watchdog.this_rank.node}"
        if env.local_rank == 0:
            notify(str(reason))
            call_with_timeout(STORE_TIMEOUT, lambda: store.set(printed, ""), None)
        else:
            call_with_timeout(STORE_TIMEOUT, lambda: store.wait([printed]), None)
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
    """Initializes the process group and makes the mesh; every rank must call this."""
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
    """Opens the key-value store at MASTER_ADDR and MASTER_PORT, or connects to it."""
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
    store = call_with_timeout(timeouts.limit + STORE_TIMEOUT, open_or_get_error, timeout_error)
    notice.cancel()
    if isinstance(store, dist.Store):
        return dist.PrefixStore(f"attempt {env.attempt}", store)
    why = f"cannot be {'opened' if env.holds_store else 'reached'} ({str(store).splitlines()[0]})"
    remedy = "give the machine of rank 0 and a --master_port that is free and open there"
    raise StartError(subject, None, why, remedy) from store


@contextmanager
def _translate_store_errors() -> Iterator[None]:
    """Raises StartError if the store fails because its process has ended."""
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
        """Returns the run of this rank, and the seed of rank 0.

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
        """Waits until other ranks have set keys, and prints which ranks are missing."""
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
    """Returns why the run cannot start, the same sentence on every rank; None if it can."""
    rank0 = statuses[0]
    for status in statuses:
        if status.error is not None:
            same = all(other_status.error == status.error for other_status in statuses)
            return status.error if same else f"rank {status.rank} on {status.host}: {status.error}"
    for status in statuses:
        for name in sorted(rank0.invariants.keys() | status.invariants.keys()):
            expected, actual = (s.invariants.get(name, "not given") for s in (rank0, status))
            if expected != actual:
                difference = f"{name} is {actual}, but {expected} on rank 0"
                if isinstance(expected, dict):
                    difference = f"{name} differs from that of rank 0"
                return f"rank {status.rank} on {status.host}: {difference}; start all ranks alike."
    return None


def _end_process(
    watchdog: Watchdog, error: BaseException, describe: Describe, notify: Notify
) -> NoReturn:
    """Prints why this rank ends, unless another rank of the node does, and ends the process."""
    _ignore_signals()  # torchrun ends the others as soon as one has ended
    try:
        sentence = describe(error)
        # Signals of torchrun or its end and errors of collectives may be caused by others.
        timeout = 2.0 if isinstance(error, Terminated | KeyboardInterrupt) else 0
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


def _ignore_signals() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)


def _format_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
