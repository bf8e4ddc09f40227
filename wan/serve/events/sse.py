"""Server-sent events of a job: its stages, steps, previews and end."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from wan.serve.events.video_object import make_end_object, make_video_object
from wan.serve.jobs.job import ServiceJob
from wan.serve.queue.service import Service
from wan.serve.requests.refusals import RefusedError

HEARTBEAT_SECONDS = 15.0
"""Seconds without an event after which a comment is sent, so that no proxy ends the connection."""
MAX_LISTENERS = 100
_MAX_EVENTS = 256  # events of a job that a client can still get when it connects again
_SERIES = 10**12  # ids of each series of events


class EventLog:
    """The last events of one unfinished job.

    Their ids are consecutive. Each start of the service begins a new series with larger ids, so
    that they grow with any change of the clock.
    """

    def __init__(self, series: int = 0) -> None:
        """Starts without events. series: as in `ServiceJob.event_series`."""
        self._events: deque[tuple[int, str]] = deque(maxlen=_MAX_EVENTS)
        self._last: dict[str, Any] = {}  # kind of event -> its last data
        self._last_id = series * _SERIES

    def observe(self, video: dict[str, Any]) -> None:
        """Adds an event for each part of a video object that has changed."""
        steps_done, total = video["steps"]
        completed = sum(output["status"] == "completed" for output in video["data"])
        changes: dict[str, Any] = {
            "stage": {name: video[name] for name in ("status", "stage", "attempt")},
            "step": {"done": steps_done, "total": total, "progress": video["progress"]},
            "preview": {"step": video.get("preview_step")},
            "video": {"completed": completed, "total": len(video["data"])},
        }
        self._last.setdefault("step", changes["step"] | {"done": 0, "progress": 0})
        self._last.setdefault("preview", {"step": 0})
        self._last.setdefault("video", changes["video"] | {"completed": 0})
        for kind, data in changes.items():
            if data != self._last.get(kind):
                self._last[kind] = data
                self._last_id += 1
                text = format_event(kind, data | {"id": video["id"]}, self._last_id)
                self._events.append((self._last_id, text))

    def list_after(self, last_id: int) -> list[tuple[int, str]]:
        """Returns the id and the text of each event after an id."""
        return [event for event in self._events if event[0] > last_id]


class JobEvents:
    """The event streams of all jobs; events of a job are recorded from its first listener on."""

    def __init__(self, service: Service, max_listeners: int = MAX_LISTENERS) -> None:
        """Starts without listeners."""
        self._service, self._max_listeners = service, max_listeners
        self._logs: dict[str, EventLog] = {}
        self._num_listeners = 0

    def open_stream(self, job_id: str, last_id: int) -> AsyncIterator[str] | None:
        """Returns the events of a job after an id; None if the client has had the last one.

        Of a deleted job, clients that have had an event get the end. The first text is empty; it
        raises RefusedError if there are too many listeners, and else the client is counted.

        Args:
            last_id: -1: the client has had no event.

        Raises:
            RefusedError: There is no such job.
        """
        job = self._service.journal.find(job_id)
        if job is None or (job.state == "deleted" and last_id < 0):
            job = self._service.find_job(job_id)
        if job.is_ended and last_id >= _compute_end_id(job):
            return None
        return self._iter_events(job_id, last_id)

    async def _iter_events(self, job_id: str, last_id: int) -> AsyncIterator[str]:
        if self._num_listeners >= self._max_listeners:
            message = f"{self._max_listeners} clients listen to events; poll the video."
            raise RefusedError(message, 503, "busy", retry_after=30)
        self._num_listeners += 1
        try:
            yield ""
            yield "retry: 2000\n\n"
            while True:
                job = self._service.journal.find(job_id)
                if job is not None and job.is_ended:
                    video = make_end_object(self._service, job)
                    yield format_event("end", video, _compute_end_id(job))
                    return
                events = self._observe(job_id).list_after(last_id)
                for number, text in events:
                    last_id = number
                    yield text
                if events:
                    continue  # the job may have changed while the client read
                if self._service.stopping:  # the client connects again
                    return
                with suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT_SECONDS):
                        await self._service.wait_for_change()
                        continue
                yield ": still here\n\n"
        finally:
            self._num_listeners -= 1
            self._drop_ended_logs()

    def _observe(self, job_id: str) -> EventLog:
        """Records the changes of a job since the last call."""
        job = self._service.find_job(job_id)
        log = self._logs.setdefault(job_id, EventLog(job.event_series))
        log.observe(make_video_object(self._service, job))
        return log

    def _drop_ended_logs(self) -> None:
        for job_id in [*self._logs]:
            state = self._service.journal.get_state(job_id)
            if state not in ("queued", "in_progress"):
                del self._logs[job_id]


def _compute_end_id(job: ServiceJob) -> int:
    """Returns the id of the last event of an ended job, above those of all others."""
    return (job.event_series + 1) * _SERIES - 1


def format_event(kind: str, data: dict[str, Any], number: int) -> str:
    """Returns the lines of an event."""
    return f"id: {number}\nevent: {kind}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"
