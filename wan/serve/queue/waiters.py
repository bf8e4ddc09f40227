"""Counts the waiting clients of synchronous routes; a job without clients is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from wan.serve.jobs.job import ServiceJob

REJOIN = 10.0
"""Seconds in which a disconnected client may retry with its Idempotency-Key."""


@dataclass
class _Count:
    """Numbers of waiting and of disconnected clients of a job whose id no client knows."""

    num_waiting: int = 0
    num_left: int = 0


class Waiters:
    """Jobs that were requested only on synchronous routes."""

    def __init__(self, abandon: Callable[[str], None]) -> None:
        """Starts without jobs. abandon: called with the id of a job without clients."""
        self._abandon = abandon
        self._jobs: dict[str, _Count] = {}

    def claim(self, job: ServiceJob) -> None:
        """Removes a job whose id a client knows, so that disconnects do not cancel it."""
        self._jobs.pop(job.id, None)

    @contextmanager
    def wait(self, job: ServiceJob, is_existing: bool) -> Iterator[Callable[[], None]]:
        """Counts a client that waits for a job on a synchronous route.

        Args:
            is_existing: An earlier request created the job.

        Yields:
            A function to call when the client has disconnected. The job is then cancelled if no
            other client waits for it; a job with a key only after `REJOIN` seconds.
        """
        waiters = self._jobs.get(job.id)
        if not is_existing:
            waiters = self._jobs[job.id] = _Count()
        if waiters is None:  # a client knows the id
            yield lambda: None
            return
        waiters.num_waiting += 1
        has_left = False

        def note_disconnect() -> None:
            nonlocal has_left
            has_left = True
            waiters.num_left += 1

        try:
            yield note_disconnect
        finally:
            waiters.num_waiting -= 1
            if has_left:
                wait = REJOIN if job.key else 0.0
                loop = asyncio.get_running_loop()
                loop.call_later(wait, self._end_grace, job.id, waiters, waiters.num_left)
            elif not waiters.num_waiting:
                self._jobs.pop(job.id, None)

    def _end_grace(self, name: str, waiters: _Count, num_left: int) -> None:
        """Abandons a job if no client has joined since the disconnect."""
        if (
            self._jobs.get(name) is not waiters
            or waiters.num_waiting
            or waiters.num_left != num_left
        ):
            return
        del self._jobs[name]
        self._abandon(name)
