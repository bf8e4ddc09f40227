"""Calls functions that block in a bounded number of threads."""

from __future__ import annotations

import asyncio
import threading
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
        self._loop: asyncio.AbstractEventLoop | None = None  # of `_free`
        self._free = asyncio.Semaphore(max_threads)

    async def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Calls a function in a thread and returns its result.

        Raises:
            ThreadsBusyError: All threads are busy, and none has become free in time.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._free = loop, asyncio.Semaphore(self._max_threads)
        free = self._free
        try:
            async with asyncio.timeout(self._wait_seconds):
                await free.acquire()
        except TimeoutError:
            raise ThreadsBusyError(f"all {self._max_threads} threads are busy") from None
        future: asyncio.Future[T] = loop.create_future()
        context = copy_context()

        def end_call(result: T | None, error: BaseException | None) -> None:
            free.release()
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
            with suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(end_call, result, failure)

        try:
            threading.Thread(target=call, daemon=True).start()
        except BaseException:  # the machine has no more threads
            free.release()
            raise
        return await future
