"""Lists, estimates, and what HTTP requires of answers."""

from __future__ import annotations

import asyncio
import re
import socket
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import openai
import pytest
import uvicorn

from tests.dist import REPO
from tests.serve.bodies import FORM, make_data_url, make_form
from tests.serve.jobs import PROMPT, Jobs, begin_request, running, wait_until
from wan.serve.queue.service import Limits


async def test_a_page_goes_on_after_a_video_also_after_a_deleted_one(jobs: Jobs) -> None:
    ids = [await jobs.create() for _ in range(3)]
    page = (await jobs.request(f"/v1/videos?after={ids[0]}&order=asc"))[2]
    assert [video["id"] for video in page["data"]] == ids[1:]
    await jobs.delete(ids[1])
    for order, expected in (("desc", ids[0]), ("asc", ids[2])):
        page = (await jobs.request(f"/v1/videos?after={ids[1]}&order={order}"))[2]
        assert [video["id"] for video in page["data"]] == [expected]
    assert (await jobs.request("/v1/videos?after=video_none"))[0] == 404


async def test_headers_that_http_requires(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path / "jobs", Limits(), "0123456789abcdef")
    bearer: dict[str, Any] = {"Authorization": "bearer 0123456789abcdef"}
    name = await jobs.create(**bearer)
    video_route = f"/v1/videos/{name}"
    for path, methods in (("/v1/videos", "GET, HEAD, POST"), (video_route, "DELETE, GET, HEAD")):
        status, headers, _ = await jobs.request(path, method="PUT", **bearer)
        assert (status, headers["allow"]) == (405, methods)
    extra_headers: tuple[dict[str, Any], ...] = ({"Range": "items=0-1"}, {"If_None_Match": '"x"'})
    for wrong in (None, "Basic 0123456789abcdef", "bearer", "bearer 0123456789abcdeg"):
        auth_header: dict[str, Any] = {} if wrong is None else {"Authorization": wrong}
        status, headers, _ = await jobs.request("/v1/models", **auth_header)
        assert (status, headers["www-authenticate"]) == (401, "Bearer")
    jobs.complete(name)
    status, headers, content = await jobs.request(f"{video_route}/content", **bearer)
    assert (status, content) == (200, b"video")
    for tags in (headers["etag"], f'"x", W/{headers["etag"]}', "*"):
        status, _, content = await jobs.request(
            f"{video_route}/content", If_None_Match=tags, **bearer
        )
        assert (status, content) == (304, b"")
    for extra in extra_headers:
        assert (await jobs.request(f"{video_route}/content", **extra, **bearer))[2] == b"video"


async def test_ranges_of_a_video(jobs: Jobs) -> None:
    """RFC 9110, 14.2: invalid and several ranges, and those of other methods, are ignored."""
    name = await jobs.create()
    jobs.complete(name)
    path = f"/v1/videos/{name}/content"
    expected = {
        "bytes=0-1": (206, b"vi"),
        "Bytes=-2": (206, b"eo"),
        "bytes=1-": (206, b"ideo"),
        "bytes=3-99": (206, b"eo"),
        "bytes=-99": (206, b"video"),
        **dict.fromkeys(
            ("bytes", "bytes=", "bytes=-", "bytes=a-b", "bytes=3-1", "items=0-1"), (200, b"video")
        ),
        **dict.fromkeys(("bytes=0-1,-2", "bytes=9-,5-6"), (200, b"video")),
        **dict.fromkeys(("bytes=--1", f"bytes={'9' * 5000}-", "bytes=0"), (200, b"video")),
    }
    answers = {}
    for value in expected:
        status, _, content = await jobs.request(path, Range=value)
        answers[value] = status, content
    assert answers == expected
    for value in ("bytes=5-", "bytes=-0"):
        status, headers, answer = await jobs.request(path, Range=value)
        assert (status, headers["content-range"]) == (416, "bytes */5")
        assert answer["error"]["code"] == "range_not_satisfiable"
    status, headers, _ = await jobs.request(path, method="HEAD", Range="bytes=0-1")
    assert (status, headers["content-length"]) == (200, "5")
    name, _, task = await begin_request(jobs, "/v1/videos/sync", Range="bytes=0-1")
    jobs.complete(name)
    status, _, content = await task
    assert (status, content) == (200, b"video")


async def test_a_large_data_url_in_a_form(jobs: Jobs) -> None:
    """It is read, and then refused as in a JSON body."""
    body = {"prompt": PROMPT, "input_reference": make_data_url(bytes(2_000_000))}
    status, _, answer = await jobs.request("/v1/videos", make_form(body), Content_Type=FORM)
    assert status == 400 and "input_reference has no effect" in answer["error"]["message"]
    assert (await jobs.request("/v1/videos", body))[2] == answer


@asynccontextmanager
async def serving(jobs: Jobs) -> AsyncIterator[str]:
    """Serves requests at a socket; yields the address of the API."""
    server = uvicorn.Server(uvicorn.Config(jobs.app, lifespan="off", log_level="error"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with running(server.serve([listener])):
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"


async def test_the_example_of_the_documentation(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It downloads the video, and openai's client prints no warnings."""
    page = (REPO / "docs" / "service.md").read_text("utf-8")
    (example,) = re.findall(r"```python\n(import warnings\n.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        async with serving(jobs) as url:
            example = example.replace("http://127.0.0.1:8000/v1", url)
            running_example = asyncio.create_task(asyncio.to_thread(exec, example, {}))
            await wait_until(lambda: jobs.service.journal.list_in_state("queued"))
            jobs.complete(jobs.service.journal.list_in_state("queued")[0].id)
            await running_example
    assert (tmp_path / "video.mp4").read_bytes() == b"video"
    assert [str(warning.message) for warning in caught if "Sora" in str(warning.message)] == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_openais_client(jobs: Jobs) -> None:
    """Its types accept the answers; pages follow each other."""
    async with (
        serving(jobs) as url,
        openai.AsyncOpenAI(api_key="none", base_url=url) as client,
    ):
        more: dict[str, Any] = {"num_frames": 5, "seed": 7}
        video = await client.videos.create(prompt=PROMPT, size="64x64", extra_body=more)
        assert (video.object, video.status, video.model) == ("video", "queued", "t2v-A14B")
        assert (video.size, video.seconds) == ("64x64", "0.625")
        remix = await client.videos.remix(video.id, prompt="it grows")
        assert remix.remixed_from_video_id == video.id and remix.seed == 7
        polling = asyncio.create_task(client.videos.poll(video.id, poll_interval_ms=10))
        with mock.patch.object(jobs.service, "find_job", wraps=jobs.service.find_job) as find:
            await wait_until(lambda: find.call_count > 1)
        jobs.complete(video.id)
        completed = await polling
        expected = ("completed", 100, None)
        assert (completed.status, completed.progress, completed.error) == expected
        assert (await client.videos.download_content(video.id)).content == b"video"
        ids = [video.id, remix.id]
        for order in ("asc", "desc"):
            page = client.videos.list(limit=1, order=order)
            assert [item.id async for item in page] == ids[:: 1 if order == "asc" else -1]
        assert (await client.videos.delete(remix.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.videos.retrieve(remix.id)
