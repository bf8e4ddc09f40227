"""Measures how long the event loop is held by its callbacks."""

from __future__ import annotations

import time
from asyncio import events
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def measuring_callbacks() -> Iterator[list[float]]:
    """Yields a list that gets the CPU seconds of each callback of the running event loop.

    CPU time of the thread, not time of day: other processes of a busy machine do not count.
    """
    seconds: list[float] = []
    run = events.Handle._run

    def measured(handle: events.Handle) -> None:
        start = time.thread_time()
        run(handle)
        seconds.append(time.thread_time() - start)

    with mock.patch.object(events.Handle, "_run", measured):
        yield seconds
