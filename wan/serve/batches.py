"""Chooses the videos that the ranks make next, and names them in messages to the ranks."""

from __future__ import annotations

from collections.abc import Sequence

from wan.serve.journal import ServiceJob

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
