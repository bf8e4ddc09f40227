"""A service without ranks for tests: its queue, journal and routes in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message

from wan.app.run import Run
from wan.serve import __main__ as command
from wan.serve.http import app
from wan.serve.http.metrics import Metrics
from wan.serve.queue.scheduling import parse_output_id
from wan.serve.queue.service import Limits, Service
from wan.settings.layers import Layer
from wan.utils import env

PROMPT = "a red star"


@cache
def resolve_service(*flags: str, ranks: int = 1) -> tuple[Run, Layer]:
    """Returns the run of a service with some flags, and its flags; reads the weights once."""
    return command._resolve_service_run(flags, Path("videos"), ranks, 1)


class IdleRanks:
    """Implements the interface of a group of ranks: accepts jobs, and makes no videos.

    Attributes:
        job_groups: The accepted groups of jobs.
        cancelled: Ids of accepted jobs that were cancelled.
    """

    ready, is_stalled, trouble, down_since, restarts = True, False, None, None, 0

    def __init__(self) -> None:
        self.job_groups: list[list[dict[str, Any]]] = []
        self.cancelled: list[str] = []

    def make_videos(self, jobs: Sequence[dict[str, Any]], shapes: Mapping[str, str]) -> None:
        self.job_groups.append([*jobs])

    def cancel(self, job: str) -> None:
        self.cancelled.append(job)

    async def stop(self) -> None: ...


class Jobs:
    """A service whose ranks are never started: jobs wait, unless `complete` is called.

    Attributes:
        folder: The folder of --journal.
        num_unread_parts: Parts of the last request's body that the service has not read.
    """

    num_unread_parts = 0

    def __init__(
        self,
        folder: Path,
        limits: Limits | None = None,
        key: str | None = None,
        flags: Sequence[str] = (),
        ranks: int = 1,
        model_names: Sequence[str] = (),
        **guards: Any,
    ) -> None:
        """Opens the service. guards: Further arguments of `wan.serve.http.app.make_app`."""
        frames = ["--infer_frames", "4"] if "s2v-14B" in flags else ["--frame_num", "5"]
        argv = ["--size", "64*64", *frames, "--sample_steps", "2", *flags]
        argv += ["--ulysses_size", str(ranks)]
        folder.mkdir(exist_ok=True)
        env.simulate_ranks(ranks)
        run, layer = resolve_service(*argv, ranks=ranks)
        self.folder, self._flags, self._ranks = folder, flags, ranks
        metrics = Metrics()
        service_kwargs: dict[str, Any] = {
            "limits": limits or Limits(),
            "on_event": metrics.count_event,
            "model_names": model_names,
        }
        self.service = Service(layer, run, folder, ranks, **service_kwargs)
        self.app: ASGIApp = app.make_app(
            self.service, metrics, host="localhost", api_key=key, **guards
        )

    async def request(
        self,
        path: str,
        body: Any = None,
        method: str | None = None,
        disconnected: asyncio.Event | None = None,
        client: str | None = None,
        scope: Mapping[str, Any] = {},
        messages: list[Message] | None = None,
        **headers: str,
    ) -> tuple[int, dict[str, str], Any]:
        """Returns status, headers and content.

        Args:
            body: JSON, bytes, or a tuple of bytes that are received one after the other.
            disconnected: Set when the client disconnects.
            client: Address of the client.
            scope: Entries of the ASGI scope that replace those made from the other arguments.
            messages: An empty list, to which those of the answer are appended.
        """
        parts = body if isinstance(body, tuple) else (body,)
        contents = [x if isinstance(x, bytes) else json.dumps(x).encode() for x in parts]
        request_headers = {"host": "localhost", "content-type": "application/json"} | {
            name.lower().replace("_", "-"): value for name, value in headers.items()
        }
        target, _, query = path.partition("?")
        scope = {
            "type": "http",
            "root_path": "",
            "method": method or ("GET" if body is None else "POST"),
            "path": target,
            "raw_path": target.encode(),
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in request_headers.items()],
            "scheme": "http",
            "server": ("localhost", 80),
            "client": None if client is None else (client, 1),
            "http_version": "1.1",
            **scope,
        }
        messages = [] if messages is None else messages
        left = range(len(parts) - 1, -1, -1)
        requests = iter(
            {"type": "http.request", "body": b"" if body is None else x, "more_body": n > 0}
            for x, n in zip(contents, left, strict=True)
        )

        async def receive() -> Message:
            message = next(requests, None)
            if message is None:
                await (disconnected or asyncio.Event()).wait()
                return {"type": "http.disconnect"}
            return message

        async def send(message: Message) -> None:
            messages.append(message)

        await self.app(scope, receive, send)
        self.num_unread_parts = sum(1 for _ in requests)
        start, *answers = messages
        response_headers = {name.decode(): value.decode() for name, value in start["headers"]}
        answer = b"".join(part.get("body", b"") for part in answers)
        is_json = response_headers.get("content-type") == "application/json"
        return start["status"], response_headers, json.loads(answer) if is_json else answer

    async def create(self, fields: Mapping[str, Any] | None = None, **headers: Any) -> str:
        """Queues a video and returns its id."""
        body = {"prompt": PROMPT} | dict(fields or {})
        status, _, video = await self.request("/v1/videos", body, **headers)
        assert status == 200, video
        return str(video["id"])

    async def refuse(self, fields: Mapping[str, Any], status: int = 400, **headers: Any) -> Any:
        """Requests a video, which the service must refuse; returns the error."""
        body = {"prompt": PROMPT} | dict(fields)
        answered, _, answer = await self.request("/v1/videos", body, **headers)
        assert answered == status, answer
        return answer["error"]

    async def delete(self, name: str) -> int:
        """Deletes a job; returns the status of the answer."""
        return (await self.request(f"/v1/videos/{name}", method="DELETE"))[0]

    async def remix(self, name: str, prompt: str = "a blue star", **headers: Any) -> dict[str, Any]:
        """Queues a remix of a video and returns its video object."""
        path = f"/v1/videos/{name}/remix"
        status, _, video = await self.request(path, {"prompt": prompt}, **headers)
        assert status == 200, video
        return dict(video)

    def restart(self, limits: Limits | None = None) -> Jobs:
        """Returns the service after another start; the journal is as written before a kill."""
        self.service.journal.close()
        return Jobs(self.folder, limits or self.service.limits, None, self._flags, self._ranks)

    async def get_video(self, name: str) -> dict[str, Any]:
        """Returns the video object of a job."""
        status, _, video = await self.request(f"/v1/videos/{name}")
        assert status == 200, video
        return dict(video)

    def complete(
        self,
        name: str,
        seconds: float = 1.0,
        ended: float | None = None,
        record: Mapping[str, Any] = {"prompt": PROMPT},
        loading: float = 0.0,
        video: bytes = b"video",
    ) -> None:
        """Writes the video and the record of a job, and completes it.

        name: The id of the job, or of one of its videos as the ranks get it.
        """
        job_id, index = parse_output_id(name)
        job = self.service.journal.get(job_id)
        assert job is not None
        self.service._running[job_id] = job
        path = self.service.files.video_path(job, index)
        path.write_bytes(video)
        path.with_suffix(".json").write_text(json.dumps(record))
        self.service._handle_message(
            {"is": "done", "job": name, "texts": [0, 1], "seconds": seconds, "loading": loading}
        )
        if ended is not None:
            self.service.journal.update_job(job, ended=ended)

    def start_idle_ranks(self) -> IdleRanks:
        """Starts idle ranks, which accept the waiting jobs; the test decides their results."""
        ranks = IdleRanks()
        self.service.rank_group = ranks  # type: ignore[assignment]
        self.service._handle_message({"is": "ready"})
        return ranks

    def handle_rank_message(self, kind: str, **payload: Any) -> None:
        """Delivers a message of the ranks to the service."""
        self.service._handle_message({"is": kind, **payload})

    def get_state(self, name: str) -> str | None:
        """Returns the state of a job, also of a deleted one."""
        return self.service.journal.get_state(name)

    def find_files_with(self, text: str) -> list[str]:
        """Returns the files of the service that hold a text."""
        paths = [path for path in self.folder.rglob("*") if path.is_file()]
        return [path.name for path in paths if text.encode() in path.read_bytes()]


async def wait_for_text(messages: list[Message], text: bytes, count: int = 1) -> None:
    """Waits until an answer that is not complete contains a text so many times."""
    await wait_until(
        lambda: b"".join(part.get("body", b"") for part in messages).count(text) >= count
    )


async def begin_request(
    jobs: Jobs, path: str, fields: Mapping[str, Any] = {}, **headers: str
) -> tuple[str, asyncio.Event, Any]:
    """Requests a video; returns its id, the event that disconnects the client, and the task."""
    disconnected, body = asyncio.Event(), {"prompt": PROMPT, **fields}
    request = jobs.request(path, body, None, disconnected, None, {}, None, **headers)
    task = asyncio.create_task(request)
    journal = jobs.service.journal
    await wait_until(lambda: journal.list_in_state("queued"))
    return journal.list_in_state("queued")[-1].id, disconnected, task


async def wait_until(condition: Callable[[], object], seconds: float = 30) -> None:
    """Waits until a condition holds."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def run_due_timers() -> None:
    """Waits until the timers of the event loop have run that are due now."""
    ended = asyncio.Event()
    asyncio.get_running_loop().call_later(0, ended.set)
    await ended.wait()


@asynccontextmanager
async def running(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs a coroutine in the background, and cancels it at the end."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
