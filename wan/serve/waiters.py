"""Counts the clients of synchronous routes, whose leaving may end a job."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from wan.serve.journal import QueuedVideo

REJOIN = 10.0
"""Seconds in which a client of a synchronous route may come back with its Idempotency-Key."""


@dataclass
class _Count:
    """The clients of synchronous routes that wait for a job whose id no client was given.

    Attributes:
        count: How many wait.
        left: How many have left.
    """

    count: int = 0
    left: int = 0


class Waiters:
    """The jobs that only clients of synchronous routes have asked for in this process."""

    def __init__(self, abandon: Callable[[str], None]) -> None:
        """Counts nobody. abandon: Gets the id of a job that nobody waits for any more."""
        self._abandon = abandon
        self._jobs: dict[str, _Count] = {}

    def claim(self, job: QueuedVideo) -> None:
        """Notes that a client was given a job's id: nobody's leaving deletes it."""
        self._jobs.pop(job.id, None)

    @contextmanager
    def wait(self, job: QueuedVideo, was_there: bool) -> Iterator[Callable[[], None]]:
        """Counts a client that waits for a job on a synchronous route.

        Args:
            job: The job.
            was_there: Another request has made it.

        Yields:
            A function to call when the client has left. The job is deleted where nobody else wants
            it; one with a key after `REJOIN` seconds, in which its client may come back.
        """
        waiters = self._jobs.get(job.id)
        if not was_there:
            waiters = self._jobs[job.id] = _Count()
        if waiters is None:  # some client knows the id
            yield lambda: None
            return
        waiters.count += 1
        has_left = False

        def leave() -> None:
            nonlocal has_left
            has_left = True
            waiters.left += 1

        try:
            yield leave
        finally:
            waiters.count -= 1
            if has_left:
                wait = REJOIN if job.key else 0.0
                loop = asyncio.get_running_loop()
                loop.call_later(wait, self._end_grace, job.id, waiters, waiters.left)
            elif not waiters.count:
                self._jobs.pop(job.id, None)

    def _end_grace(self, name: str, waiters: _Count, left: int) -> None:
        """Abandons a job that nobody waits for since a client has left."""
        if self._jobs.get(name) is not waiters or waiters.count or waiters.left != left:
            return
        del self._jobs[name]
        self._abandon(name)
