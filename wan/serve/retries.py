"""Carries out tasks of ended jobs beside the queue, and repeats those that fail."""

from __future__ import annotations

import asyncio
import heapq
import random
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import count

from wan.utils.log import logger

_POLL = 0.2  # seconds between two looks for new tasks
_LONGEST_POSTPONEMENT = 8.0  # seconds
_SLICE_SECONDS = 0.005  # seconds of scheduling after which the event loop does other work


class PostponedError(Exception):
    """A task cannot be carried out now; it is tried again soon and has not failed."""


class TaskIndex:
    """The ids of the jobs that have a task of one kind, and which of them are new."""

    def __init__(self) -> None:
        """Starts without tasks."""
        self._ids: dict[str, None] = {}
        self._new: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._ids

    def update(self, job_id: str, has_task: bool) -> None:
        """Adds or removes a job."""
        if not has_task:
            self._ids.pop(job_id, None)
            self._new.pop(job_id, None)
        elif job_id not in self._ids:
            self._ids[job_id] = self._new[job_id] = None

    def list_all(self) -> list[str]:
        """Returns the ids of all jobs with a task; none of them is new afterwards."""
        self._new.clear()
        return [*self._ids]

    def take_new(self) -> list[str]:
        """Returns the ids that were added since the last call."""
        names, self._new = self._new, {}
        return [*names]


class RetryQueue:
    """Carries out the tasks of jobs, each job's one after the other.

    A look for tasks that are due takes time for these tasks only, however many wait.
    """

    def __init__(
        self,
        tasks: TaskIndex,
        perform: Callable[[str], Awaitable[bool]],
        *,
        get_group: Callable[[str], str] = lambda _: "",
        max_running: int,
        max_per_group: int,
        longest: float,
    ) -> None:
        """Starts nothing; `run` does.

        Args:
            tasks: The jobs with a task.
            perform: Carries out the task of a job; returns False if it is to be repeated. It may
                raise `PostponedError`.
            get_group: Returns the group of a job, so that a slow one does not delay the others.
            max_running: Maximum of tasks at the same time.
            max_per_group: The same for one group.
            longest: Longest pause before a repetition in seconds; the first one is a second.
        """
        self._index, self._perform, self._get_group = tasks, perform, get_group
        self._max_running, self._max_per_group = max_running, max_per_group
        self._longest = longest
        self._running: Counter[str] = Counter()  # group -> number of running tasks
        self._tasks: dict[str, asyncio.Task[None]] = {}  # job -> running task
        self._failures: dict[str, int] = {}  # job -> failed attempts
        self._postponements: dict[str, int] = {}  # job -> postponements since its last attempt
        self._new: deque[str] = deque()  # jobs that are not in `_groups` yet
        self._groups: dict[str, str] = {}  # running or waiting job -> its group
        # Due time by `time.monotonic`, number and id of waiting jobs: of all, as a heap, without
        # those that are due and whose group runs as many tasks as it may.
        self._waiting: list[tuple[float, int, str]] = []
        self._blocked: dict[str, deque[tuple[float, int, str]]] = {}
        self._numbers = count()
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Carries out tasks until it is cancelled."""
        self._new.extend(self._index.list_all())
        try:
            while True:
                if not self._start_due():
                    await asyncio.sleep(0)
                    continue
                with suppress(TimeoutError):
                    async with asyncio.timeout(_POLL):
                        await self._wake.wait()
                self._wake.clear()
        finally:
            for task in self._tasks.values():
                task.cancel()

    def _start_due(self) -> bool:
        """Starts the tasks that are due, up to the limits; returns False if some may be left."""
        deadline = time.monotonic() + _SLICE_SECONDS
        self._new.extend(self._index.take_new())
        while self._new:
            if time.monotonic() > deadline:
                return False
            job_id = self._new.popleft()
            if job_id not in self._groups:
                self._add(job_id, time.monotonic())
        while self._waiting and len(self._tasks) < self._max_running:
            if time.monotonic() > deadline:
                return False
            if self._waiting[0][0] > time.monotonic():
                break
            entry = heapq.heappop(self._waiting)
            job_id = entry[2]
            group = self._groups[job_id]
            if self._running[group] >= self._max_per_group:
                self._blocked.setdefault(group, deque()).append(entry)
                continue
            self._running[group] += 1
            self._tasks[job_id] = asyncio.create_task(self._perform_once(job_id, group))
        return True

    def _add(self, job_id: str, due: float) -> None:
        """Adds a waiting job, whose group may have changed since its last attempt."""
        self._groups[job_id] = self._get_group(job_id)
        heapq.heappush(self._waiting, (due, next(self._numbers), job_id))

    async def _perform_once(self, job_id: str, group: str) -> None:
        is_finished, postponements = False, self._postponements.pop(job_id, 0)
        pause: float | None = None
        try:
            is_finished = await self._perform(job_id)
        except PostponedError:
            self._postponements[job_id] = postponements + 1
            pause = min(2.0 ** min(postponements, 20), _LONGEST_POSTPONEMENT)
        except Exception:
            logger.error("A task of %s has failed; it is repeated.", job_id, exc_info=True)
        finally:
            del self._tasks[job_id], self._groups[job_id]
            self._end_task(group)
        if is_finished:
            self._failures.pop(job_id, None)
            if job_id in self._index:  # a further one, such as that of a deletion meanwhile
                self._add(job_id, time.monotonic())
        else:
            if pause is None:
                failures = self._failures[job_id] = self._failures.get(job_id, 0) + 1
                pause = min(2.0 ** min(failures - 1, 20), self._longest)
            self._add(job_id, time.monotonic() + pause * random.uniform(0.5, 1.0))
        self._wake.set()

    def _end_task(self, group: str) -> None:
        """Counts the end of a task of a group, for which a blocked one may start."""
        self._running[group] -= 1
        if not self._running[group]:
            del self._running[group]
        blocked = self._blocked.get(group)
        if blocked:
            heapq.heappush(self._waiting, blocked.popleft())
        if not blocked:
            self._blocked.pop(group, None)
