"""Estimates the duration of jobs from completed videos, waiting times, and memory."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping

from wan.app.run import Run
from wan.pipeline import memory_estimate
from wan.serve import clock
from wan.serve.journal import Journal, ServiceJob
from wan.utils.log import logger

_MAX_SAMPLES = 200  # completed jobs from which durations are estimated


class Estimates:
    """Durations of the last completed videos, and estimates from them."""

    def __init__(self, journal: Journal, running: Mapping[str, ServiceJob]) -> None:
        """Adds the videos of the last completed jobs.

        Args:
            running: Id -> job that the ranks are working on.
        """
        self._journal, self._running = journal, running
        self._num_samples = 0
        self._seconds_by_shape: dict[str, deque[float]] = {}  # shape -> seconds of its last videos
        self._samples: deque[tuple[float, float]] = deque(maxlen=20)  # work, seconds
        self._queue_estimate: tuple[object, dict[str, tuple[int, float]], float] = (None, {}, 0.0)
        for job in reversed(journal.list_completed(_MAX_SAMPLES)):
            self.add(job, (job.seconds or 0.0) / job.num_outputs)

    def add(self, job: ServiceJob, seconds: float) -> None:
        """Adds the duration of a video of a job."""
        self._seconds_by_shape.setdefault(job.shape, deque(maxlen=5)).append(seconds)
        if job.work:
            self._samples.append((job.work, seconds))
        self._num_samples += 1

    def estimate_video_seconds(self, job: ServiceJob) -> float | None:
        """Returns the estimated seconds of one video of a job; None before any was completed.

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

    def estimate_seconds(self, job: ServiceJob) -> float | None:
        """Returns the estimated seconds of all videos of a job that are not complete."""
        seconds = self.estimate_video_seconds(job)
        return None if seconds is None else seconds * (job.num_outputs - job.num_completed)

    def estimate_wait(self, queued_job: ServiceJob | None = None) -> float:
        """Returns the seconds until a queued job starts; None: until the queue is empty."""
        running = [job for job in self._running.values() if job.state == "in_progress"]
        planned = sum(self.estimate_seconds(job) or 0.0 for job in running)
        elapsed = max((_get_elapsed(job) for job in running), default=0.0)
        ahead, total = self._estimate_queue()
        waiting = total if queued_job is None else ahead.get(queued_job.id, (0, total))[1]
        return max(planned - elapsed, 0.0) + waiting

    def estimate_end(self, job: ServiceJob) -> tuple[int | None, float | None]:
        """Returns the queued jobs before a queued job, and the seconds until it is complete.

        None: the job has started; nothing is known about the seconds.
        """
        estimate = self.estimate_seconds(job)
        if job.state == "queued":
            position = self._estimate_queue()[0].get(job.id, (None,))[0]
            return position, None if estimate is None else self.estimate_wait(job) + estimate
        elapsed = _get_elapsed(job)
        if estimate is None:
            steps = job.done - job.steps_before
            if steps <= 0:
                return None, None
            estimate = elapsed / steps * (job.total - job.steps_before)
        return None, max(estimate - elapsed, 0.0)

    def _estimate_queue(self) -> tuple[dict[str, tuple[int, float]], float]:
        """Returns each queued job's position and estimated seconds before it, and of the queue.

        The sums are cached until the queue or the estimates change.
        """
        version = (self._journal.version, self._num_samples)
        if self._queue_estimate[0] != version:
            ahead, seconds = {}, 0.0
            seconds_by_work: dict[tuple[str, float], float] = {}
            for position, job in enumerate(self._journal.list_in_state("queued")):
                ahead[job.id] = position, seconds
                kind = job.shape, job.work
                if kind not in seconds_by_work:
                    seconds_by_work[kind] = self.estimate_video_seconds(job) or 0.0
                seconds += seconds_by_work[kind] * (job.num_outputs - job.outputs_done)
            self._queue_estimate = version, ahead, seconds
        return self._queue_estimate[1:]


def _get_elapsed(job: ServiceJob) -> float:
    """Returns the seconds since a running job, or its present video, was started."""
    now = clock.now()
    return now - max(job.started or now, job.output_started)


def describe_planned_memory(resolve_run: Callable[[], Run]) -> str:
    """Returns a sentence with the planned peak memory of a run; "" if planning fails."""
    try:
        run = resolve_run()
        sizes = memory_estimate.estimate_network_sizes(run.setup, run.params)
        stages = memory_estimate.compute_stage_memory(run.setup, run.params, sizes).values()
        peak_bytes = max(usage.total() for usage in stages)
        return f"The estimated need is {peak_bytes / 1e9:.1f} GB on each rank."
    except Exception:  # it is only a hint
        logger.debug("no plan", exc_info=True)
        return ""
