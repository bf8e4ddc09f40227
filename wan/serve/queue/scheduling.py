"""The order of the queue: durations of jobs, their estimates, and which videos are next."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from wan.app.run import Run
from wan.pipeline import memory_estimate
from wan.serve.jobs.job import ServiceJob
from wan.serve.jobs.journal import Journal
from wan.utils.log import logger

_CLOCK_OFFSET = time.time() - time.monotonic()
_MAX_SAMPLES = 200  # completed jobs from which durations are estimated


def read_clock() -> float:
    """Returns seconds since 1970 that go on evenly when the clock of the system is set."""
    return _CLOCK_OFFSET + time.monotonic()


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
    now = read_clock()
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


_MAX_OVERTAKES = 4  # how often a job may be overtaken by a later job with the last job's shape


def make_output_id(job: ServiceJob, index: int) -> str:
    """Returns the name of one of the videos of a job; the first one has the id of the job."""
    return f"{job.id}.{index}" if index else job.id


def parse_output_id(output_id: str) -> tuple[str, int]:
    """Returns the id of the job of a video, and the index of the video."""
    job_id, _, index = output_id.partition(".")
    return job_id, int(index or 0)


def choose_first_job(waiting: Sequence[ServiceJob], last_shape: str) -> ServiceJob:
    """Returns the job to start next.

    Args:
        waiting: In the order of execution, not empty.
        last_shape: The shape of the job that was started last.
    """
    first = waiting[0]
    if first.shape == last_shape or first.passed >= _MAX_OVERTAKES:
        return first
    peers = (job for job in waiting if job.priority == first.priority)
    return next((job for job in peers if job.shape == last_shape), first)


def list_next_outputs(
    first: ServiceJob, open_jobs: Sequence[ServiceJob]
) -> list[tuple[ServiceJob, int]]:
    """Returns the videos that can be in the next batch: jobs, and indices of their videos.

    Args:
        first: Its next video is the first one.
        open_jobs: Started and queued jobs in the order of execution, `first` included.
    """
    if not first.can_share_experts:
        return [(first, first.outputs_done)]
    peers = (job for job in open_jobs if job.priority == first.priority and job.can_share_experts)
    return [
        (job, index)
        for job in (first, *(job for job in peers if job.id != first.id))
        for index in range(job.outputs_done, job.num_outputs)
    ]


def choose_batch_size(
    video_seconds: float | None, loading_seconds: float, waiting: int, max_size: int
) -> int:
    """Returns the batch size that minimizes the mean waiting time.

    A batch of n videos takes n times the seconds of a video plus the loading time once, and all its
    videos end with the last one.

    Args:
        video_seconds: Estimated seconds of a video that is loaded for alone; None: unknown.
        waiting: Number of videos.
    """
    if video_seconds is None:
        return 1
    seconds = max(video_seconds - loading_seconds, 0.0)

    def all_waits(n: int) -> float:
        waits = end = 0.0
        for start in range(0, waiting, n):
            count = min(n, waiting - start)
            end += count * seconds + loading_seconds
            waits += count * end
        return waits

    return min(range(1, min(max_size, waiting) + 1), key=all_waits)
