"""Long computations in the event loop, in slices that leave it time for other work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

Pause = Callable[[], Awaitable[None]]
"""Pauses a computation if its slice is used up."""
_SLICE_SECONDS = 0.005  # seconds of CPU time


class Slices:
    """Computations that take turns: a turn of the event loop has one slice of one of them."""

    def __init__(self) -> None:
        """Starts without computations."""
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Pause]:
        """Begins a computation; yields a function that it awaits after each of its short steps."""
        await self._lock.acquire()
        started_at, is_running = time.thread_time(), True

        async def pause() -> None:
            nonlocal started_at, is_running
            if time.thread_time() - started_at < _SLICE_SECONDS:
                return
            self._lock.release()
            is_running = False
            await asyncio.sleep(0)
            await self._lock.acquire()
            started_at, is_running = time.thread_time(), True

        try:
            yield pause
        finally:
            if is_running:  # it may be cancelled in a pause
                self._lock.release()
