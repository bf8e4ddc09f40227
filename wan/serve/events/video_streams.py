"""Follows the growing mp4 of a video that is being made."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from io import FileIO
from pathlib import Path

from wan.serve.jobs.job import ServiceJob
from wan.serve.queue.service import Service
from wan.serve.requests.refusals import RefusedError
from wan.settings.command import Output
from wan.settings.values import switch

_POLL_SECONDS = 0.2  # seconds between two checks of a file that has not grown
_CHUNK_BYTES = 1 << 16


def has_stream(service: Service, job: ServiceJob) -> bool:
    """Returns whether the videos of a job can be played while they are made."""
    value = job.settings.get("stream", service.startup_run.output.stream)
    return switch("stream", value)


class VideoStreams:
    """The clients that follow videos; each has one open file, and at most one chunk in memory."""

    def __init__(self, service: Service, max_clients: int) -> None:
        """Starts without clients."""
        self._service, self._max_clients = service, max_clients
        self._num_clients = 0

    def check_stream(self, job: ServiceJob) -> None:
        """Refuses a client of a job without a stream, or above the maximum of clients."""
        if not has_stream(self._service, job):
            message = "This video has no stream; ask for it with stream: true, or wait for its end."
            raise RefusedError(message, 404, "not_ready", "video_id")
        if self._num_clients >= self._max_clients:
            message = f"{self._max_clients} clients follow videos; wait for the end of this one."
            raise RefusedError(message, 503, "busy", retry_after=30)

    async def follow(self, job: ServiceJob, index: int) -> AsyncIterator[bytes]:
        """Yields b"" at the first frame of one of a job's videos, then its bytes until its end.

        Yields nothing if the video is complete before.

        Raises:
            RefusedError: As `check_stream`; or before the first frame, the job has failed or was
                deleted, or the service stops.
            FileNotFoundError: After the first frame, the video will not be completed in this file.
        """
        self.check_stream(job)
        self._num_clients += 1
        try:
            file = await self._open_file(job.id, index)
            if file is not None:
                with file:
                    yield b""
                    async for chunk in self._iter_chunks(job, index, file):
                        yield chunk
        finally:
            self._num_clients -= 1

    async def _open_file(self, job_id: str, index: int) -> FileIO | None:
        """Waits for the first frame of a video, and opens its file; None: it is complete."""
        while True:
            job = self._service.find_job(job_id)
            if index < job.num_completed:
                return None
            if job.error is not None:
                raise RefusedError(job.error["message"], 500, job.error["code"])
            self._service.refuse_when_stopping()
            file = await asyncio.to_thread(_open_non_empty, self._get_path(job, index))
            if file is not None:
                return file
            await self._wait()

    async def _iter_chunks(self, job: ServiceJob, index: int, file: FileIO) -> AsyncIterator[bytes]:
        """Yields the bytes of an open file until its video is complete; see `follow`."""
        path = self._get_path(job, index)
        while True:
            current = self._service.journal.get(job.id)
            is_complete = current is not None and index < current.num_completed
            chunk = await asyncio.to_thread(file.read, _CHUNK_BYTES)
            if chunk:
                yield chunk
                continue
            if is_complete:  # before the file was read
                return
            is_running = current is not None and current.state == "in_progress"
            if not is_running or self._service.stopping:
                raise FileNotFoundError(f"the video {job.id} is not made any more")
            if not await asyncio.to_thread(_is_same_file, file, path):
                raise FileNotFoundError(f"the video {job.id} is decoded again")
            await self._wait()

    def _get_path(self, job: ServiceJob, index: int) -> Path:
        return Output(self._service.files.video_path(job, index), job.fps or 1.0).stream_path

    async def _wait(self) -> None:
        """Waits for a change of any job, for a short time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_POLL_SECONDS):
                await self._service.wait_for_change()


def _open_non_empty(path: Path) -> FileIO | None:
    """Opens a file; returns None if it is missing or empty."""
    with suppress(OSError):
        file = path.open("rb", buffering=0)
        if os.fstat(file.fileno()).st_size:
            return file
        file.close()
    return None


def _is_same_file(file: FileIO, path: Path) -> bool:
    """Returns whether a path is this open file, or missing, as it is when the video is complete."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return True
