"""Calls functions that block in a bounded number of threads."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from typing import Any, TypeVar

T = TypeVar("T")


class ThreadsBusyError(OSError):
    """No thread has become free in time; those that run may hang."""


class DaemonThreads:
    """Calls functions in daemon threads, which never delay the end of the process.

    A function that hangs keeps its thread, also after its caller has given up, so their number is
    limited. A call that waits for a thread keeps nothing when its caller is cancelled.
    """

    def __init__(self, max_threads: int, wait_seconds: float | None = None) -> None:
        """Starts no thread.

        Args:
            max_threads: Maximum of threads at the same time.
            wait_seconds: Seconds that a call waits for a thread at most; None: any time.
        """
        self._max_threads, self._wait_seconds = max_threads, wait_seconds
        self._num_running = 0
        self._waiters: deque[asyncio.Future[None]] = deque()

    async def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Calls a function in a thread and returns its result.

        Raises:
            ThreadsBusyError: All threads are busy, and none has become free in time.
        """
        await self._acquire_thread()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        context = copy_context()

        def end_call(result: T | None, error: BaseException | None) -> None:
            self._release_thread()
            if future.done():  # the caller was cancelled
                return
            if error is None:
                future.set_result(result)  # type: ignore[arg-type]
            else:
                future.set_exception(error)

        def call() -> None:
            result, failure = None, None
            try:
                result = context.run(function, *args, **kwargs)
            except BaseException as error:
                failure = error
            try:
                loop.call_soon_threadsafe(end_call, result, failure)
            except RuntimeError:  # the event loop has ended
                self._num_running -= 1

        try:
            threading.Thread(target=call, daemon=True).start()
        except BaseException:  # the machine has no more threads
            self._release_thread()
            raise
        return await future

    async def _acquire_thread(self) -> None:
        """Waits until fewer threads run than allowed, and counts a further one."""
        if self._num_running >= self._max_threads or self._waiters:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                async with asyncio.timeout(self._wait_seconds):
                    await waiter  # `_release_thread` leaves its thread to this call
                return
            except BaseException as error:
                if waiter.done() and not waiter.cancelled():
                    self._release_thread()
                with suppress(ValueError):
                    self._waiters.remove(waiter)
                if isinstance(error, TimeoutError):
                    raise ThreadsBusyError(f"all {self._max_threads} threads are busy") from None
                raise
        self._num_running += 1

    def _release_thread(self) -> None:
        """Leaves the thread of an ended call to the first waiting call."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self._num_running -= 1
