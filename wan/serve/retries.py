"""Carries out tasks of ended jobs beside the queue, and repeats those that fail."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from typing import Any, TypeVar

from wan.utils.log import logger

T = TypeVar("T")

_POLL = 0.2  # seconds between two looks for new tasks
_LONGEST_POSTPONEMENT = 8.0  # seconds


class PostponedError(Exception):
    """A task cannot be carried out now; it is tried again soon and has not failed."""


async def call_in_thread(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Calls a function in a daemon thread, so that it never delays the end of the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def set_result(result: T | None, error: BaseException | None) -> None:
        if future.done():  # the caller was cancelled
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]
        else:
            future.set_exception(error)

    def call() -> None:
        result, failure = None, None
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            failure = error
        with suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(set_result, result, failure)

    threading.Thread(target=call, daemon=True).start()
    return await future


class RetryQueue:
    """Carries out the tasks of jobs, each job's one after the other."""

    def __init__(
        self,
        list_tasks: Callable[[], Collection[str]],
        perform: Callable[[str], Awaitable[bool]],
        *,
        get_group: Callable[[str], str] = lambda _: "",
        max_running: int,
        max_per_group: int,
        longest: float,
    ) -> None:
        """Starts nothing; `run` does.

        Args:
            list_tasks: Returns the ids of the jobs with a task.
            perform: Carries out the task of a job; returns False if it is to be repeated. It may
                raise `PostponedError`.
            get_group: Returns the group of a job, so that a slow one does not delay the others.
            max_running: Maximum of tasks at the same time.
            max_per_group: The same for one group.
            longest: Longest pause before a repetition in seconds; the first one is a second.
        """
        self._list_tasks, self._perform, self._get_group = list_tasks, perform, get_group
        self._max_running, self._max_per_group = max_running, max_per_group
        self._longest = longest
        self._running: Counter[str] = Counter()  # group -> number of running tasks
        self._tasks: dict[str, asyncio.Task[None]] = {}  # job -> running task
        self._failures: dict[str, int] = {}  # job -> failed attempts
        self._postponements: dict[str, int] = {}  # job -> postponements since its last attempt
        self._due: dict[str, float] = {}  # job -> time of the next attempt, by `time.monotonic`
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Carries out tasks until it is cancelled."""
        try:
            while True:
                self._start_due()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_POLL):
                        await self._wake.wait()
                self._wake.clear()
        finally:
            for task in self._tasks.values():
                task.cancel()

    def _start_due(self) -> None:
        """Starts the tasks that are due, up to the limits."""
        now = time.monotonic()
        for job_id in self._list_tasks():
            if len(self._tasks) >= self._max_running:
                return
            if job_id in self._tasks or self._due.get(job_id, now) > now:
                continue
            group = self._get_group(job_id)
            if self._running[group] < self._max_per_group:
                self._running[group] += 1
                self._tasks[job_id] = asyncio.create_task(self._perform_once(job_id, group))

    async def _perform_once(self, job_id: str, group: str) -> None:
        postponements = self._postponements.pop(job_id, 0)
        try:
            is_finished = await self._perform(job_id)
        except PostponedError:
            self._postponements[job_id] = postponements + 1
            pause = min(2.0 ** min(postponements, 20), _LONGEST_POSTPONEMENT)
            self._due[job_id] = time.monotonic() + pause * random.uniform(0.5, 1.0)
            return
        except Exception:
            logger.error("A task of %s has failed; it is repeated.", job_id, exc_info=True)
            is_finished = False
        finally:
            del self._tasks[job_id]
            self._running[group] -= 1
            if not self._running[group]:
                del self._running[group]
        if is_finished:
            self._failures.pop(job_id, None)
            self._due.pop(job_id, None)
        else:
            failures = self._failures[job_id] = self._failures.get(job_id, 0) + 1
            pause = min(2.0 ** min(failures - 1, 20), self._longest)
            self._due[job_id] = time.monotonic() + pause * random.uniform(0.5, 1.0)
        self._wake.set()
