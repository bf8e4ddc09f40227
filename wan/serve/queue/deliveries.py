"""Carries out the deliveries of ended jobs, and repeats those that fail."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from wan.serve.jobs.job import ServiceJob
from wan.serve.jobs.journal import Journal
from wan.serve.jobs.journal_file import JournalError
from wan.utils.log import logger

_POLL = 0.2  # seconds between two looks for new deliveries
_POSTPONEMENT = 4.0  # seconds


class PostponedError(Exception):
    """A delivery cannot be carried out now; it is tried again soon and has not failed."""


@dataclass(frozen=True)
class DeliveryKind:
    """How deliveries of one kind are carried out.

    Attributes:
        perform: Carries out that of a job, which is as on disk; returns False if it is to be
            repeated. It may raise `PostponedError`.
        max_running: Maximum of deliveries at the same time.
        max_per_receiver: The same for one receiver, so that a slow one does not delay the others.
        longest: Longest pause before a repetition in seconds; the first one is a second.
    """

    perform: Callable[[ServiceJob], Awaitable[bool]]
    max_running: int
    max_per_receiver: int
    longest: float


class DeliveryQueue:
    """Carries out the deliveries in the journal, those of one kind and job one after the other.

    Attributes:
        kinds: Those that are carried out, by the names in `ServiceJob.receivers`.
    """

    def __init__(self, journal: Journal) -> None:
        """Starts nothing; `run` does."""
        self.kinds: dict[str, DeliveryKind] = {}
        self._journal = journal
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}  # kind, id -> running task
        self._running: Counter[tuple[str, str]] = Counter()  # kind, receiver -> running tasks
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Carries out deliveries until it is cancelled."""
        try:
            while True:
                with suppress(JournalError):
                    for name in self.kinds:
                        while await self._start_due(name):
                            pass
                with suppress(TimeoutError):
                    async with asyncio.timeout(_POLL):
                        await self._wake.wait()
                self._wake.clear()
        finally:
            for task in self._tasks.values():
                task.cancel()

    async def _start_due(self, name: str) -> int:
        """Starts deliveries that are due, up to the limits; returns how many."""
        kind, num_started = self.kinds[name], 0
        # What has ended is written first, so that the journal does not return it again.
        if not await self._journal.save():
            return 0
        counts = {receiver: n for (kind_, receiver), n in self._running.items() if kind_ == name}
        full = [receiver for receiver, count in counts.items() if count >= kind.max_per_receiver]
        running = {*self._tasks}
        for failures, job in await self._journal.list_due(name, full, kind.max_running):
            receiver = job.receivers[name] or ""
            is_full = counts.get(receiver, 0) >= kind.max_per_receiver
            if is_full or sum(counts.values()) >= kind.max_running or (name, job.id) in running:
                continue
            counts[receiver] = counts.get(receiver, 0) + 1
            self._running[name, receiver] += 1
            work = self._perform(name, receiver, job, failures)
            self._tasks[name, job.id] = asyncio.create_task(work)
            num_started += 1
        return num_started

    async def _perform(self, name: str, receiver: str, job: ServiceJob, failures: int) -> None:
        """Carries out a delivery once, and sets when it is due again if it is left."""
        kind, pause = self.kinds[name], 0.0
        try:
            is_finished = await kind.perform(job)
        except PostponedError:
            pause = _POSTPONEMENT
        except Exception:
            logger.error("A delivery of %s has failed; it is repeated.", job.id, exc_info=True)
            is_finished = False
        finally:
            del self._tasks[name, job.id]
            self._running -= Counter({(name, receiver): 1})
        if not pause:
            failures = 0 if is_finished else failures + 1
            pause = min(2.0 ** min(failures - 1, 20), kind.longest) if failures else 0.0
        self._journal.schedule_delivery(name, job.id, pause * random.uniform(0.5, 1.0), failures)
        self._wake.set()
