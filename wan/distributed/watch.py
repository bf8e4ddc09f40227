"""Is everyone still there? What a rank knows of torchrun and of the other ranks while it works.

A rank learns of another's end through an error of a collective, if at all, and that error looks
different in every backend and version. It is not read; the others are looked at instead:
- torchrun: this process gets another parent when it has gone.
- Ranks of this machine: a pidfd becomes readable when its process has ended, however it did.
- Ranks of other machines: each counts up in the store every second, and stands still once gone.
A rank that fails leaves word in the store after it has said why. Without one, its end was sudden.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from wan.distributed.mesh import Place
from wan.settings.errors import Terminated

T = TypeVar("T")
_BEAT = 1.0  # seconds between two looks
_CLOSING = 2.0  # seconds that the system may take from closing a rank's connections to its end
_SILENT = 4.0  # seconds without a beat after which a rank of another machine counts as gone
_GRACE = 10.0  # seconds in which the main thread should end by itself
_ANSWER = 5.0  # seconds that the store gets for an answer


def within(seconds: float, ask: Callable[[], T], otherwise: T) -> T:
    """What `ask` finds in the store; `otherwise` where the store is gone or does not answer."""
    answer = [otherwise]

    def wait() -> None:
        with suppress(dist.DistError):
            answer[0] = ask()

    thread = threading.Thread(target=wait, daemon=True)  # most requests know no timeout
    thread.start()
    thread.join(seconds)
    return answer[0]


@dataclass(frozen=True)
class Peer:
    """A rank as the others see it. machine: empty where its processes cannot be looked at."""

    rank: int
    host: str
    machine: str
    pid: int


def own_peer(rank: int) -> Peer:
    return Peer(rank, socket.gethostname(), _machine(), os.getpid())


def _machine() -> str:
    """Equal for processes that can look at each other: one running system, one set of pids."""
    try:
        os.close(os.pidfd_open(os.getpid()))  # not outside Linux, nor in every sandbox
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except (AttributeError, OSError):
        return ""


class Watch:
    """Looks after the others from a thread, because the main one may be waiting in a collective.

    Where torchrun or a rank of this machine has gone, the main thread is interrupted as SIGTERM
    does it; if it does not come back from what it waits for, the process is ended.

    Attributes:
        interrupted: The main thread has been.
    """

    def __init__(self, here: Place, store: dist.Store, say: Callable[[str], None]) -> None:
        """store: a connection for this object alone, so that nobody else's wait delays it."""
        self.interrupted = False
        self._here, self._store, self._say = here, store, say
        self._parent = os.getppid()
        self._machine = _machine()
        self._peers: dict[int, Peer] = {}
        self._processes: dict[int, int | None] = {}  # near rank -> pidfd; None: gone already
        self._far: list[int] = []
        self._left: set[int] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def know(self, peers: Sequence[Peer]) -> None:
        """From now on the other ranks are looked after, too."""
        self._peers = {peer.rank: peer for peer in peers if peer.rank != self._here.rank}
        self._far = [rank for rank in self._peers if not self._is_near(rank)]
        self._processes = {
            rank: _pidfd(peer.pid) for rank, peer in self._peers.items() if self._is_near(rank)
        }

    def stop(self) -> None:
        """No more interruptions: this rank is about to end."""
        self._over.set()

    def leave(self) -> None:
        """This rank ends and is not to be missed. The one that holds the store ends last."""
        self.stop()
        within(_GRACE, lambda: self._store.set(f"left/{self._here.rank}", ""), None)
        self._thread.join(_ANSWER)
        deadline = time.monotonic() + _ANSWER
        while self._here.holds_store and self._there() and time.monotonic() < deadline:
            time.sleep(0.05)

    def first(self, culprit: int) -> bool:
        """Leave word that a rank has failed. False: another rank was first, and has said why."""
        return self._word(culprit) in (f"{culprit} {self._here.rank}", "")

    def told(self) -> str | None:
        """Why all ranks have to end, where that is known; None: nobody has failed yet.

        Empty where another rank of this machine says it.
        """
        main = self._here.local_rank == 0
        if self._is_orphan():
            return "torchrun has ended unexpectedly; the video was not written." if main else ""
        if not self._is_set("failed"):
            return None
        word = within(_ANSWER, lambda: self._store.get("failed"), b"0 0")
        culprit, speaker = map(int, word.split())
        heard = speaker == self._here.rank or self._is_near(speaker)
        return "" if heard or not main else f"ends because {self._name(culprit)} failed."

    def lost(self, error: BaseException) -> str | None:
        """`told`, or which ranks have ended without a word; None: the error is this rank's own.

        A RuntimeError may be what a collective makes of it, before the system knows of the end.
        """
        doubtful = isinstance(error, RuntimeError)
        silence = (_SILENT if self._far else _CLOSING) if doubtful else 0
        start, before = time.monotonic(), self._beats() if doubtful else {}
        while True:
            known = self.told()
            gone = self._gone()
            if known is not None or gone:
                return known if known is not None else self._sentence(gone)
            if time.monotonic() - start >= silence:
                break
            time.sleep(0.05)
        still = [rank for rank, beat in self._beats().items() if beat == before.get(rank)]
        if not still:
            return None
        # The store is gone with rank 0. The error is shown, as a rank that is busy is silent, too.
        return self._sentence(still if self._beat(0, 0) >= 0 else [0], f" ({_first_line(error)})")

    def _look(self) -> None:
        while self.told() is None and not self._gone():
            if self._far:
                self._beat(self._here.rank, 1)
            if self._over.wait(_BEAT):
                return
        self.interrupted = True
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        if not self._over.wait(_GRACE):
            why = self.lost(Terminated())
            if why:
                self._say(why)
            os._exit(1)

    def _is_orphan(self) -> bool:
        """Only torchrun stays as long as its ranks; other launchers may start them and leave."""
        return self._here.torchrun and os.getppid() != self._parent

    def _is_near(self, rank: int) -> bool:
        peer = self._peers.get(rank)
        return peer is not None and "" != self._machine == peer.machine

    def _gone(self) -> list[int]:
        """Near ranks that have ended and have not left."""
        return [r for r, p in self._processes.items() if _has_ended(p) and not self._has_left(r)]

    def _there(self) -> list[int]:
        """Ranks that have neither left nor, as far as this one can see, ended."""
        ended = {rank for rank, process in self._processes.items() if _has_ended(process)}
        return [rank for rank in self._peers if rank not in ended and not self._has_left(rank)]

    def _has_left(self, rank: int) -> bool:
        if rank not in self._left and self._is_set(f"left/{rank}"):
            self._left.add(rank)
        return rank in self._left

    def _is_set(self, key: str) -> bool:
        return within(_ANSWER, lambda: self._store.check([key]), False)

    def _beats(self) -> dict[int, int]:
        """Counts of the far ranks that have not left."""
        there = [rank for rank in self._far if not self._has_left(rank)]
        return {rank: self._beat(rank, 0) for rank in there}

    def _beat(self, rank: int, count: int) -> int:
        """Count on; -1 where the store is gone."""
        return within(_ANSWER, lambda: self._store.add(f"beat/{rank}", count), -1)

    def _word(self, culprit: int) -> str:
        """What is left in the store about the first failure; empty where the store is gone."""
        word = f"{culprit} {self._here.rank}"
        return within(_ANSWER, lambda: self._store.compare_set("failed", "", word).decode(), "")

    def _sentence(self, ranks: list[int], reason: str = "") -> str:
        """About ranks that have gone; empty where another rank says it."""
        self._left.update(ranks)  # nobody has to wait for them any more
        word = self._word(ranks[0])
        if word not in (f"{ranks[0]} {self._here.rank}", ""):
            return ""
        who = " and ".join(map(self._name, ranks)).replace("rank", "Rank", 1)
        how = " unexpectedly (killed, or out of memory)" if word else ""  # it may have left word
        return f"{who} ended{how}{reason}; the video was not written."

    def _name(self, rank: int) -> str:
        far = rank in self._far
        return f"rank {rank} on {self._peers[rank].host}" if far else f"rank {rank}"


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def _has_ended(process: int | None) -> bool:
    if process is None:
        return True
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(0))


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
