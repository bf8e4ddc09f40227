"""Server-sent events of a job."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.serve.jobs import Jobs, wait_for_text, wait_until
from wan.serve.events import sse
from wan.serve.events.video_object import make_video_object

Event = tuple[int, str, dict[str, Any]]


def parse(text: bytes) -> list[Event]:
    """Returns id, kind and data of the events of a stream."""
    parsed = []
    for block in text.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if line[:1] not in ":")
        if "event" in fields:
            parsed.append((int(fields["id"]), fields["event"], json.loads(fields["data"])))
    return parsed


class Listener:
    """Listens to the events of a job in a task."""

    def __init__(self, jobs: Jobs, name: str, after: int | None = None) -> None:
        self.disconnected, self.messages = asyncio.Event(), list[Any]()
        headers: dict[str, Any] = {} if after is None else {"Last_Event_ID": str(after)}
        headers |= {"disconnected": self.disconnected, "messages": self.messages}
        self.task = asyncio.create_task(jobs.request(f"/v1/videos/{name}/events", **headers))

    async def wait_for(self, text: str) -> Listener:
        """Waits until an event has a text."""
        await wait_for_text(self.messages, text.encode())
        return self

    async def finish(self) -> list[Event]:
        """Returns all events of a stream that ends."""
        status, headers, text = await self.task
        assert status == 200 and headers["content-type"].startswith("text/event-stream")
        return parse(text)

    async def disconnect_after(self, text: str) -> list[Event]:
        """Disconnects the client when an event has a text; returns all that it has."""
        await self.wait_for(text)
        self.disconnected.set()
        return await self.finish()


async def test_events_of_a_job(jobs: Jobs) -> None:
    """Two clients get every event; a third one continues where it was disconnected."""
    name = await jobs.create()
    listeners = [Listener(jobs, name) for _ in range(2)]
    interrupted = Listener(jobs, name)

    async def wait_for(text: str) -> None:
        """Waits until the clients have an event."""
        for listener in listeners:
            await listener.wait_for(text)

    async def send(text: str, kind: str, **payload: Any) -> None:
        """Delivers a message of the ranks; waits until the clients have its event."""
        jobs.handle_rank_message(kind, job=name, **payload)
        await wait_for(text)

    await wait_for("queued")
    jobs.start_idle_ranks()
    await wait_for("in_progress")
    await send('"text"', "stage", stage="text")
    await send("denoising", "stage", stage="denoising")
    seen = await interrupted.disconnect_after("denoising")
    await send("", "step", done=0, total=2)
    for done in (1, 2):
        await send(f'"done": {done}', "step", done=done, total=2)
    await send("preview", "preview")
    listeners.append(Listener(jobs, name, seen[-1][0]))
    await send("decoding", "stage", stage="decoding")
    jobs.complete(name)
    streams = [await listener.finish() for listener in listeners]
    assert streams[0] == streams[1] == seen + streams[2]
    numbers, kinds = [event[0] for event in streams[0]], [event[1] for event in streams[0]]
    assert numbers == sorted({*numbers}) and kinds.count("end") == 1
    stages = [
        (e["status"], e["stage"], e["attempt"]) for _, kind, e in streams[0] if kind == "stage"
    ]
    running = [("in_progress", stage, 1) for stage in (None, "text", "denoising", "decoding")]
    assert stages == [("queued", None, 0), *running]
    steps = [(e["done"], e["total"]) for _, kind, e in streams[0] if kind == "step"]
    assert steps == [(1, 2), (2, 2)]
    assert [e["step"] for _, kind, e in streams[0] if kind == "preview"] == [2]
    assert streams[0][-1][2] == await jobs.get_video(name)
    assert [e[1:] for e in await Listener(jobs, name).finish()] == [("end", streams[0][-1][2])]
    status, _, _ = await jobs.request(f"/v1/videos/{name}/events", Last_Event_ID=str(numbers[-1]))
    assert status == 204


async def test_a_deleted_job_and_an_unknown_one(jobs: Jobs) -> None:
    name = await jobs.create()
    listener = await Listener(jobs, name).wait_for("stage")
    await jobs.delete(name)
    last = (await listener.finish())[-1]
    assert last[1:] == ("end", {"id": name, "object": "video.deleted", "deleted": True})
    assert (await jobs.request(f"/v1/videos/{name}/events"))[0] == 404
    assert await Listener(jobs, name, 1).finish() == [last]  # its connection was lost before
    path, number = f"/v1/videos/{name}/events", str(last[0])
    assert (await jobs.request(path, Last_Event_ID=number))[0] == 204
    path = "/v1/videos/video_0/events"
    assert (await jobs.request(path, Last_Event_ID="1"))[0] == 404


DAY = 86400.0


@pytest.mark.parametrize("jump", [-9 * DAY, -3600.0, 9 * DAY])
async def test_ids_grow_though_the_clock_is_set(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    """While a job runs, and before it goes on after a restart; a client always gets the end."""
    name, real = await jobs.create(), time.time
    jobs.start_idle_ranks()
    first = await Listener(jobs, name).wait_for("stage")
    jobs.handle_rank_message("step", job=name, done=1, total=2)
    seen = await first.disconnect_after("step")
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    assert jobs.service.estimates.estimate_end(jobs.service.find_job(name))[1] < 60
    jobs.handle_rank_message("step", job=name, done=2, total=2)
    seen += await Listener(jobs, name, seen[-1][0]).disconnect_after("step")
    assert await jobs.service.journal.save()
    restarted = Jobs(jobs.folder, jobs.service.limits)
    restarted.start_idle_ranks()
    third = await Listener(restarted, name, seen[-1][0]).wait_for("stage")
    restarted.handle_rank_message("step", job=name, done=1, total=2)
    await third.wait_for("step")
    restarted.complete(name)
    seen += await third.finish()
    assert [event[1] for event in seen[-2:]] == ["step", "end"]
    ids = [event[0] for event in seen]
    assert ids[0] > 0 and ids == sorted({*ids})
    assert await Listener(restarted, name).finish() == seen[-1:]
    assert await Listener(restarted, name, ids[-2]).finish() == seen[-1:]


async def test_listeners_are_limited_and_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that disconnects is noticed; comments are sent while nothing happens."""
    monkeypatch.setattr(sse, "HEARTBEAT_SECONDS", 0.05)
    jobs = Jobs(tmp_path / "jobs", max_listeners=2)
    name = await jobs.create()
    first, second = Listener(jobs, name), Listener(jobs, name)
    for listener in (first, second):
        await wait_for_text(listener.messages, b"\n\n:", 2)
    path = f"/v1/videos/{name}/events"
    status, headers, _ = await jobs.request(path)
    assert status == 503 and "retry-after" in headers
    await first.disconnect_after("stage")
    for listener in (Listener(jobs, name), second):
        await listener.disconnect_after("stage")
    app = jobs.app

    async def send_later(scope: Any, receive: Any, send: Any) -> None:
        async def wait_and_send(message: Any) -> None:
            await asyncio.sleep(0)
            await send(message)

        await app(scope, receive, wait_and_send)

    jobs.app = send_later
    listeners = [Listener(jobs, name) for _ in range(3)]  # at the same moment
    await wait_until(lambda: all(listener.messages for listener in listeners))
    statuses = [listener.messages[0]["status"] for listener in listeners]
    assert sorted(statuses) == [200, 200, 503]
    for listener in listeners:
        listener.disconnected.set()
        await listener.task


async def test_a_log_is_bounded(jobs: Jobs) -> None:
    """Ids also grow where events are of the same millisecond."""
    name, log = await jobs.create(), sse.EventLog()
    video = make_video_object(jobs.service, jobs.service.find_job(name))
    for done in range(10_000):
        log.observe(video | {"steps": [done, 10_000]})
    kept = log.list_after(-1)
    assert [number for number, _ in kept] == sorted({number for number, _ in kept})
    assert len(kept) == 256 and '"done": 9999' in kept[-1][1]
