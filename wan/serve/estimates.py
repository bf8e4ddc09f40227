"""Estimates the duration of jobs from completed jobs."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from wan.serve.journal import ServiceJob


class Estimates:
    """Durations of the last completed jobs, and estimates from them.

    Attributes:
        version: Incremented by every change.
    """

    def __init__(self, completed: Sequence[ServiceJob]) -> None:
        """Adds the last completed jobs, given newest first."""
        self.version = 0
        self._seconds_by_shape: dict[str, deque[float]] = {}  # shape -> seconds of its last jobs
        self._samples: deque[tuple[float, float]] = deque(maxlen=20)  # work, seconds
        for job in reversed(completed):
            self.add(job)

    def add(self, job: ServiceJob) -> None:
        """Adds a completed job."""
        seconds = job.seconds or 0.0
        self._seconds_by_shape.setdefault(job.shape, deque(maxlen=5)).append(seconds)
        if job.work:
            self._samples.append((job.work, seconds))
        self.version += 1

    def estimate_seconds(self, job: ServiceJob) -> float | None:
        """Returns the estimated seconds of a job; None before any job was completed.

        Jobs of a known shape take the median of that shape. For another shape a line is fitted
        through all samples: a constant part, such as loading, plus a part proportional to the work.
        """
        same_shape = self._seconds_by_shape.get(job.shape)
        if same_shape:
            return statistics.median(same_shape)
        if not self._samples:
            return None
        works, times = zip(*self._samples, strict=True)
        if len({*works}) > 1:
            slope, constant = statistics.linear_regression(works, times)
            if slope > 0 and constant >= 0:
                return constant + slope * job.work
        return job.work * statistics.median(t / work for work, t in self._samples)
