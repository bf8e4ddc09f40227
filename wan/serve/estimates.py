"""Estimates how long jobs take, from those that were completed."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from wan.serve.journal import QueuedVideo


class Estimates:
    """The seconds that jobs take, from the last ones that were completed.

    Attributes:
        version: Counts the changes.
    """

    def __init__(self, completed: Sequence[QueuedVideo]) -> None:
        """Begins. completed: The last completed jobs, the newest first."""
        self.version = 0
        self._shapes: dict[str, deque[float]] = {}  # shape -> seconds of its last jobs
        self._all: deque[tuple[float, float]] = deque(maxlen=20)  # work, seconds
        for job in reversed(completed):
            self.add(job)

    def add(self, job: QueuedVideo) -> None:
        """Counts a completed job."""
        seconds = job.seconds or 0.0
        self._shapes.setdefault(job.shape, deque(maxlen=5)).append(seconds)
        if job.work:
            self._all.append((job.work, seconds))
        self.version += 1

    def seconds(self, job: QueuedVideo) -> float | None:
        """Returns about how long a job takes; None before any was completed.

        A job of another shape than those before takes a constant part, such as loading, and one
        that grows with its work: a line through the others.
        """
        same = self._shapes.get(job.shape)
        if same:
            return statistics.median(same)
        if not self._all:
            return None
        works, times = zip(*self._all, strict=True)
        if len({*works}) > 1:
            slope, constant = statistics.linear_regression(works, times)
            if slope > 0 and constant >= 0:
                return constant + slope * job.work
        return job.work * statistics.median(t / work for work, t in self._all)
