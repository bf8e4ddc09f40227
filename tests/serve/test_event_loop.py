"""No request and no receiver holds the event loop, and what hangs holds up no other request."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import socket
import threading
import time
from asyncio import events
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from benchmarks.webhook_receiver import Receiver
from tests.serve.bodies import FORM, make_form
from tests.serve.jobs import Jobs, running, wait_until
from tests.serve.test_webhooks import LOCAL
from wan.serve.events.webhooks import Webhooks
from wan.serve.queue.service import Limits
from wan.serve.store.videos import Store

LIMIT = 0.04
"""CPU seconds of a callback: twice as many as allowed, as a busy machine may be slower."""
MB = 1_000_000


@contextmanager
def measuring_callbacks() -> Iterator[list[float]]:
    """Yields a list that gets the CPU seconds of each callback of the running event loop.

    CPU time of the thread, not time of day: other processes of a busy machine do not count.
    """
    seconds: list[float] = []
    run = events.Handle._run

    def measured(handle: events.Handle) -> None:
        start = time.thread_time()
        run(handle)
        seconds.append(time.thread_time() - start)

    with mock.patch.object(events.Handle, "_run", measured):
        yield seconds


async def measure_longest(work: Awaitable[Any]) -> float:
    """Returns the CPU seconds of the longest callback while a task runs."""
    with measuring_callbacks() as seconds:
        await asyncio.create_task(asyncio.wait_for(work, 60))
        await asyncio.sleep(0)
    return max(seconds)


def add_jobs(jobs: Jobs, name: str, count: int, **changes: Any) -> list[str]:
    """Adds copies of a job; returns their ids."""
    job, journal = jobs.service.find_job(name), jobs.service.journal
    values: dict[str, Any] = {"state": "completed", "ended": time.time()} | changes
    names = [f"video_{number:024x}" for number in range(count)]
    for other in names:
        journal.restore_job(replace(job, id=other, **values))
    return names


async def test_lists_and_searches(tmp_path: Path) -> None:
    """The longest of lists and searches, over prompts of the largest size; more is refused."""
    jobs = Jobs(tmp_path / "jobs")
    prompt = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz", k=10_000))
    add_jobs(jobs, await jobs.create({"prompt": prompt}), 700)
    await jobs.service.journal.save()
    words = [prompt[-9 - n : -4 - n] for n in range(32)]
    paths = {f"limit=10&search={'+'.join(words)}": 200, "limit=100": 200}
    paths |= {f"search={'+'.join([*words, 'x'])}": 400, f"search={'x' * 1001}": 400}
    for query, expected in paths.items():

        async def request(query: str = query, expected: int = expected) -> None:
            status, _, answer = await jobs.request(f"/v1/videos?{query}")
            assert status == expected
            assert status == 200 or answer["error"]["param"] == "search"

        assert await measure_longest(request()) < LIMIT, query[:30]
    _, _, page = await jobs.request(f"/v1/videos?search={'+'.join(words)}")
    assert len(page["data"]) == 20 and page["has_more"]


async def test_large_bodies(tmp_path: Path) -> None:
    """Of data URLs, values, texts and forms; those with files are read as if they were small."""
    jobs = Jobs(tmp_path / "jobs", flags=["--task", "i2v-A14B"])
    noise = random.Random(2).randbytes(6 * MB)
    url = "data:image/png;base64," + base64.b64encode(noise).decode()
    encoded = "application/x-www-form-urlencoded"
    image = {"prompt": "x", "input_reference": {"image_url": url}}
    escaped = json.dumps({"image_url": url}).replace("/", "\\/")
    is_file: list[tuple[bytes, str]] = [
        (json.dumps(image).encode(), "application/json"),
        (json.dumps({"extra_body": image}).encode("utf-16"), "application/json"),
        (make_form({"prompt": "x", "input_reference[image_url]": url}), FORM),
        (make_form({"prompt": "x", "input_reference": escaped}), FORM),
        (make_form({"prompt": "x", "input_reference": noise}), FORM),
    ]
    is_refused: list[tuple[bytes, str]] = [
        (b'{"prompt":[' + b"[]," * (3 * MB) + b"[]]}", "application/json"),
        (b'{"prompt":"' + b'\\"' * (4 * MB) + b'"}', "application/json"),
        (b"[" * (8 * MB), "application/json"),
        (json.dumps({"prompt": "x", "seed": "0," * (4 * MB)}).encode(), "application/json"),
        (json.dumps({"prompt": "x", "input_reference": url[:-6]}).encode(), "application/json"),
        (make_form({"prompt": "x", "negative_prompt": "x" * 8 * MB}), FORM),
        (b"a&" * (4 * MB), encoded),
        (b"prompt=x&input_reference=" + url.replace("+", "%2B").encode(), encoded),
    ]
    uploads: list[bytes] = []
    jobs.service.create = keep_uploads(uploads)  # type: ignore[method-assign]
    for number, (body, media_type) in enumerate([*is_file, *is_refused]):

        async def request(body: bytes = body, media_type: str = media_type) -> int:
            return (await jobs.request("/v1/videos", body, Content_Type=media_type))[0]

        with measuring_callbacks() as seconds:
            status = await asyncio.create_task(request())
        expected = (410, noise) if number < len(is_file) else (400, None)
        assert (status, uploads.pop() if uploads else None) == expected, number
        assert max(seconds) < LIMIT, number


def keep_uploads(uploads: list[bytes]) -> Any:
    """Returns a replacement of `Service.create` that keeps the image and refuses the request."""
    from wan.serve.http.downloads import make_gone_error

    async def create(parsed_request: Any, *_: Any) -> Any:
        uploads.append(bytes(parsed_request.files["image"]))
        raise make_gone_error("is gone")

    return create


async def test_many_waiting_events(tmp_path: Path, receiver: Receiver) -> None:
    """Of a receiver that does not answer; those of another one are delivered meanwhile."""
    jobs = Jobs(tmp_path / "jobs", Limits(webhook_hosts=LOCAL))
    silent = await asyncio.start_server(lambda *_: asyncio.sleep(60), "127.0.0.1", 0)
    url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}/"
    name = await jobs.create({"webhook_url": url, "prompt": "x" * 10_000})
    add_jobs(jobs, name, 4000)
    Webhooks(jobs.service, b"x" * 16, LOCAL)
    jobs.service.journal.update_ended(f"video_{3999:024x}", webhook_url=receiver.url)
    await jobs.service.journal.save()
    async with running(jobs.service.deliveries.run()):
        assert await measure_longest(wait_until(lambda: receiver.received)) < LIMIT
        assert await measure_longest(asyncio.sleep(0.3)) < LIMIT
    silent.close()


async def test_many_expired_videos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wan.serve.jobs.journal.TRUST_SECONDS", 0.0)
    jobs = Jobs(tmp_path / "jobs", Limits(keep_days=1))
    names = [await jobs.create({"n": 2}) for _ in range(1)]
    names += add_jobs(jobs, names[0], 400, ended=time.time() - 2 * 86400)
    for name in names[1:]:
        (jobs.folder / "jobs" / name).mkdir()
        (jobs.folder / "jobs" / name / "video.mp4").write_bytes(b"x")
    await jobs.service.journal.save()
    async with running(jobs.service._delete_old_jobs()):
        are_deleted = wait_until(lambda: os.listdir(jobs.folder / "jobs") == names[:1])
        assert await measure_longest(are_deleted) < LIMIT
    assert {*map(jobs.get_state, names[1:])} == {"deleted"}


@pytest.mark.parametrize("is_stored", [False, True])
async def test_the_bytes_of_a_large_video(tmp_path: Path, is_stored: bool) -> None:
    store = Store(str(tmp_path / "store"))
    jobs, video = Jobs(tmp_path / "jobs", store=store), random.Random(3).randbytes(24 * MB + 1)
    jobs.start_idle_ranks()
    task = asyncio.create_task(jobs.request("/v1/videos/sync", {"prompt": "x"}))
    await wait_until(lambda: jobs.service._running)
    names = [*jobs.service._running]
    if is_stored:
        (tmp_path / "store" / names[0]).mkdir(parents=True)
        (tmp_path / "store" / names[0] / "video.mp4").write_bytes(video)
    jobs.complete(names[0], video=video)
    if is_stored:
        jobs.service.journal.update_ended(names[0], store_state="stored")
    with measuring_callbacks() as seconds:
        status, headers, content = await task
    assert (status, int(headers["content-length"])) == (200, len(video))
    assert content == video
    assert max(seconds) < LIMIT


class HangingFiles(LocalFileSystem):
    """A folder that answers once an event is set."""

    protocol = "hangs"
    answers = threading.Event()
    num_calls = 0

    def size(self, path: str) -> int:
        type(self).num_calls += 1
        self.answers.wait()
        return int(super().size(path))

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(LocalFileSystem._strip_protocol(path.removeprefix("hangs://")))


async def test_a_store_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few threads hang, clients get 503, other requests go on, and nothing is left at the end."""
    monkeypatch.setattr("wan.serve.store.videos._READER_SECONDS", 0.2)
    fsspec.register_implementation("hangs", HangingFiles, clobber=True)
    jobs = Jobs(tmp_path / "jobs", store=Store(f"hangs://{tmp_path}/store"))
    name, other = await jobs.create(), await jobs.create()
    jobs.complete(name)
    jobs.complete(other)
    jobs.service.journal.update_ended(name, store_state="stored")
    HangingFiles.answers.clear()
    num_threads, path = threading.active_count(), f"/v1/videos/{name}/content"
    left = [asyncio.Event() for _ in range(60)]
    tasks = [asyncio.create_task(jobs.request(path, disconnected=event)) for event in left]
    try:
        await wait_until(lambda: HangingFiles.num_calls > 15)
        for event in left[20:40]:
            event.set()
        answers = await asyncio.gather(*tasks[20:])
        statuses = [status for status, _, _ in answers]
        assert statuses == [499] * 20 + [503] * 20 and "store" in answers[-1][2]["error"]["message"]
        assert (await jobs.request(f"/v1/videos/{other}/content"))[0] == 200
        assert threading.active_count() - num_threads < 25
    finally:
        HangingFiles.answers.set()
        await asyncio.gather(*tasks)
    # Two are of the event loop's own pool.
    await wait_until(lambda: threading.active_count() <= num_threads + 2)


async def test_a_resolver_that_hangs(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deliveries to one name share a thread; those to others go on."""
    answers, resolve = threading.Event(), socket.getaddrinfo

    def resolve_slowly(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host == "localhost":
            answers.wait()
        return resolve(host, *args, **kwargs)

    monkeypatch.setattr("wan.serve.events.webhooks.SEND_SECONDS", 0.05)
    jobs = Jobs(tmp_path / "jobs", Limits(webhook_hosts=LOCAL))
    name = await jobs.create({"webhook_url": receiver.url})
    names = add_jobs(jobs, name, 50)
    url = receiver.url.replace("localhost", "127.0.0.1")
    jobs.service.journal.update_ended(names[-1], webhook_url=url)
    await jobs.service.journal.save()
    attempts: list[str] = []
    Webhooks(jobs.service, b"x" * 16, LOCAL, attempts.append)
    monkeypatch.setattr(socket, "getaddrinfo", resolve_slowly)
    num_threads = threading.active_count()
    async with running(jobs.service.deliveries.run()):
        await wait_until(lambda: attempts.count("repeated") > 19 and "delivered" in attempts)
        assert threading.active_count() - num_threads < 5
        answers.set()
