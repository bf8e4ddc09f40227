"""Seeded clients of `python -m wan.serve` for `benchmarks.service_soak`, and what they know."""

from __future__ import annotations

import collections
import http.client
import json
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from benchmarks.service_process import LocalService

LOST = (OSError, http.client.HTTPException)
"""What a request raises when its connection is lost."""
_MAX_QUEUED = 5  # queued videos above which no client creates further ones
_DELETED = 0.15  # part of all videos that is deleted
_END_EVENT = b"event: end"
_MISSING = "/v1/videos/video_none"
_BAD_REQUESTS: tuple[tuple[str, Any, str | None, int], ...] = (
    ("/v1/videos", {}, None, 400),
    ("/v1/videos", b"{", None, 400),
    ("/v1/videos", {"prompt": " "}, None, 400),
    ("/v1/videos", {"prompt": "x", "size": "1x1"}, None, 400),
    ("/v1/videos", {"prompt": "x", "num_frames": 6}, None, 400),
    ("/v1/videos", {"prompt": "x", "unknown": 1}, None, 400),
    ("/v1/videos", {"prompt": "x", "lora": {"name": "none"}}, None, 400),
    ("/v1/videos", {"prompt": "x", "webhook_url": "http://10.0.0.1/"}, None, 400),
    ("/v1/videos", {"prompt": "x", "input_reference": "data:image/png;base64,AA=="}, None, 400),
    ("/v1/videos", None, "PUT", 405),
    ("/v1/videos?limit=x", None, None, 400),
    ("/v1/videos?order=x", None, None, 400),
    ("/v1/videos?after=video_none", None, None, 404),
    (_MISSING, None, None, 404),
    (_MISSING, None, "DELETE", 404),
    (f"{_MISSING}/events", None, None, 404),
    (f"{_MISSING}/content", None, None, 404),
    (f"{_MISSING}/remix", {"prompt": "x"}, None, 404),
    ("/v2", None, None, 404),
)


@dataclass(frozen=True)
class Wanted:
    """What decides the frames of a video, and whether its end is sent to a webhook."""

    prompt: str
    frames: int
    steps: int
    seed: int
    lora: str
    has_webhook: bool = False

    @property
    def content(self) -> tuple[Any, ...]:
        """All but the webhook."""
        return self.prompt, self.frames, self.steps, self.seed, self.lora


@dataclass
class Ledger:
    """What all clients together asked for and were answered.

    Attributes:
        wanted: Id -> what was asked for, of each job whose id a client was told.
        abandoned: Keys of synchronous requests whose client left.
        deleted: Ids of the jobs whose deletion was asked for.
        ends: Id -> completed or failed, as some client was told.
        counts: Requests by kind and status.
        wrong: Sentences about answers that are not as documented.
        poll_ms: Milliseconds of each poll.
    """

    wanted: dict[str, Wanted] = field(default_factory=dict)
    abandoned: set[str] = field(default_factory=set)
    deleted: set[str] = field(default_factory=set)
    ends: dict[str, str] = field(default_factory=dict)
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)
    poll_ms: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, kind: str) -> None:
        with self.lock:
            self.counts[kind] += 1

    def note_status(self, video: dict[str, Any], told: str | None) -> None:
        """Checks that the end of a video does not change. told: the end before this request."""
        name, status = video["id"], video["status"]
        if told not in (None, status):
            self.wrong.append(f"{name} was {told} and is {status}")
        if status in ("completed", "failed"):
            self.ends[name] = status


class SeededClient:
    """Sends requests of all kinds in a thread until it is stopped."""

    def __init__(
        self, served: LocalService, ledger: Ledger, hook: str, seed: str, max_jobs: int
    ) -> None:
        """Starts nothing. hook: The address of the webhooks."""
        self._served, self._ledger, self._hook = served, ledger, hook
        self._chance, self._name, self._max_jobs = random.Random(seed), seed, max_jobs
        self._num_requests = 0
        self._actions: dict[Callable[[], None], int] = {
            self._create: 16,
            self._poll: 40,
            self._list: 6,
            self._delete: 3,
            self._remix: 2,
            self._wait_for_video: 2,
            self._leave_before_video: 1,
            self._listen: 4,
            self._look_at_preview: 4,
            self._download: 6,
            self._send_bad_request: 6,
            self._look_at_service: 3,
        }

    def run(self, finished: threading.Event) -> None:
        """Acts until the event is set; an action is ended then, with its repetitions."""
        actions, weights = [*self._actions], [*self._actions.values()]
        while not finished.is_set():
            (action,) = self._chance.choices(actions, weights)
            try:
                action()
            except LOST:
                self._ledger.count("lost connections")
                time.sleep(0.5)
            except Exception as error:
                self._ledger.wrong.append(f"{action.__name__}: {error!r}")
            time.sleep(self._chance.uniform(0, 0.1))

    # Requests.

    def _request(
        self, kind: str, path: str, *args: Any, expected: tuple[int, ...] = (), **headers: str
    ) -> tuple[int, Any, Any]:
        """Sends a request once and counts its status; 503 is always expected."""
        status, answer_headers, content = self._served.request(path, *args, **headers)
        self._ledger.count(f"{kind} {status}")
        if status not in (503, *expected):
            told = content if isinstance(content, dict) else content[:100]
            self._ledger.wrong.append(f"{kind} {path} {args}: {status} {told}")
        return status, answer_headers, content

    def _insist(
        self, kind: str, path: str, *args: Any, expected: tuple[int, ...], **headers: str
    ) -> tuple[int, Any, Any]:
        """Repeats a request until the service answers it, as a client with a key does."""
        deadline = time.monotonic() + 240
        while True:
            with suppress(*LOST):
                answer = self._request(kind, path, *args, expected=expected, **headers)
                if answer[0] != 503:
                    return answer
            if time.monotonic() > deadline:
                raise TimeoutError(f"{kind} {path} had no answer in 240 s")
            time.sleep(0.5)

    def _choose_request(self) -> tuple[Wanted, dict[str, Any], str]:
        """Returns what is wanted, the fields of its request, and an Idempotency-Key."""
        chance = self._chance
        wanted = Wanted(
            chance.choice(("a red star", "a blue circle")),
            chance.choice((5, 5, 9, 17)),
            chance.choice((2, 4)),
            chance.randrange(3),
            chance.choice(("", "", "a", "b")),
            chance.random() < 0.5,
        )
        fields: dict[str, Any] = {"prompt": wanted.prompt, "num_frames": wanted.frames}
        fields |= {"num_inference_steps": wanted.steps, "seed": wanted.seed}
        if wanted.lora:
            fields["lora"] = [{"name": wanted.lora}]
        if wanted.has_webhook:
            fields["webhook_url"] = self._hook
        if chance.random() < 0.3:
            fields["preview"] = chance.choice((True, 2))
        if chance.random() < 0.2:
            fields["priority"] = chance.randrange(-3, 4)
        self._num_requests += 1
        return wanted, fields, f"{self._name}-{self._num_requests}"

    def _choose_job(self) -> str | None:
        """Returns one of the newest jobs, mostly one that is not deleted; None: there is none."""
        names = [*self._ledger.wanted][-30:]
        if self._chance.random() < 0.9:
            names = [name for name in names if name not in self._ledger.deleted]
        return self._chance.choice(names) if names else None

    def _is_busy(self) -> bool:
        """Whether no further job should be created now."""
        health = self._served.health()
        is_full = len(self._ledger.wanted) >= self._max_jobs
        return is_full or health.get("queued", _MAX_QUEUED) >= _MAX_QUEUED

    # Actions.

    def _create(self) -> None:
        if self._is_busy():
            return
        wanted, fields, key = self._choose_request()
        names = []
        for _ in range(2 if self._chance.random() < 0.1 else 1):
            status, _, video = self._insist(
                "create", "/v1/videos", fields, expected=(200,), Idempotency_Key=key
            )
            if status != 200:
                return
            self._ledger.wanted[video["id"]] = wanted
            names.append(video["id"])
        if len({*names}) > 1 and not {*names} & self._ledger.deleted:
            self._ledger.wrong.append(f"one key has the jobs {names}")

    def _poll(self) -> None:
        name = self._choose_job()
        if name is None:
            return
        told, began = self._ledger.ends.get(name), time.perf_counter()
        status, _, video = self._request("poll", f"/v1/videos/{name}", expected=(200, 404))
        self._ledger.poll_ms.append(1e3 * (time.perf_counter() - began))
        if status == 200:
            self._ledger.note_status(video, told)
            done, total = video["steps"]
            if not 0 <= done <= total or not 0 <= video["progress"] <= 100:
                self._ledger.wrong.append(f"{name} has {video['steps']}, {video['progress']}")
        elif status == 404 and name not in self._ledger.deleted:
            self._ledger.wrong.append(f"{name} is lost")

    def _list(self) -> None:
        """Reads up to three pages, which repeat no video."""
        order, seen, after = self._chance.choice(("asc", "desc")), [], ""
        for _ in range(self._chance.randrange(1, 4)):
            path = f"/v1/videos?order={order}&limit={self._chance.randrange(1, 30)}{after}"
            status, _, page = self._request("list", path, expected=(200,))
            if status != 200:
                return
            seen += [video["id"] for video in page["data"]]
            if not page["has_more"] or not page["data"]:
                break
            after = f"&after={page['last_id']}"
        if len({*seen}) < len(seen):
            self._ledger.wrong.append(f"a list has a video twice: {seen}")

    def _delete(self) -> None:
        name, ledger = self._choose_job(), self._ledger
        if name is not None and len(ledger.deleted) < _DELETED * len(ledger.wanted):
            ledger.deleted.add(name)
            path = f"/v1/videos/{name}"
            self._insist("delete", path, None, "DELETE", expected=(200, 202, 404))

    def _remix(self) -> None:
        name = self._choose_job()
        if name is None or self._is_busy():
            return
        first, prompt = self._ledger.wanted[name], self._chance.choice(("a green square", "a sun"))
        self._num_requests += 1
        status, _, video = self._insist(
            "remix",
            f"/v1/videos/{name}/remix",
            {"prompt": prompt},
            expected=(200, 404),
            Idempotency_Key=f"{self._name}-{self._num_requests}",
        )
        if status == 200:
            self._ledger.wanted[video["id"]] = Wanted(prompt, *first.content[1:])

    def _wait_for_video(self) -> None:
        if self._is_busy():
            return
        wanted, fields, key = self._choose_request()
        self._ledger.abandoned.add(key)  # until its id is known
        status, headers, content = self._insist(
            "sync",
            "/v1/videos/sync",
            fields,
            expected=(200, 404, 500),  # deleted, or failed after two kills
            Idempotency_Key=key,
        )
        if status == 200:
            self._ledger.wanted[headers["X-Request-Id"]] = wanted
            self._ledger.abandoned.discard(key)
            self._check_video(content)
        elif status == 500 and (
            isinstance(content, bytes)
            or content["error"]["code"] not in ("ranks_lost", "interrupted")
        ):
            self._ledger.wrong.append(f"sync: {content}")

    def _leave_before_video(self) -> None:
        if self._is_busy():
            return
        _, fields, key = self._choose_request()
        self._ledger.abandoned.add(key)
        host, body = self._served.url.removeprefix("http://"), json.dumps(fields)
        connection = http.client.HTTPConnection(host, timeout=self._chance.uniform(0.1, 2))
        headers = {"Content-Type": "application/json", "Idempotency-Key": key}
        try:
            connection.request("POST", "/v1/videos/sync", body, headers)
            connection.getresponse()
            self._ledger.count("sync answered early")
        except TimeoutError:
            self._ledger.count("sync left")
        finally:
            connection.close()

    def _listen(self) -> None:
        """Reads events for some seconds, and connects again; their ids must grow."""
        name = self._choose_job()
        last: int | None = -1
        for _ in range(2):
            if name is None or last is None:
                return
            with suppress(*LOST):
                last = self._read_events(name, last)
            time.sleep(0.2)

    def _read_events(self, name: str, last: int) -> int | None:
        """Returns the id of the last event; None after the end."""
        request = urllib.request.Request(f"{self._served.url}/v1/videos/{name}/events")
        if last >= 0:
            request.add_header("Last-Event-ID", str(last))
        deadline, is_end = time.monotonic() + self._chance.uniform(0.5, 6), False
        with (
            suppress(urllib.error.HTTPError),
            urllib.request.urlopen(request, timeout=20) as answer,
        ):
            self._ledger.count(f"events {answer.status}")
            for line in answer:
                is_end |= line.startswith(_END_EVENT)
                if line.startswith(b"id: "):
                    number = int(line[4:])
                    if number <= last:
                        self._ledger.wrong.append(f"{name}: event {number} after {last}")
                    last = number
                if is_end and line.startswith(b"data: "):
                    self._ledger.count("events: end")
                    video = json.loads(line[6:])
                    if "status" in video:
                        self._ledger.note_status(video, None)
                    elif name not in self._ledger.deleted:
                        self._ledger.wrong.append(f"{name} ended with {video}")
                    return None
                if time.monotonic() > deadline:
                    break
        return last

    def _look_at_preview(self) -> None:
        name = self._choose_job()
        if name is not None:
            path = f"/v1/videos/{name}/content?variant=preview"
            status, _, content = self._request("preview", path, expected=(200, 404))
            if status == 200 and content[:2] != b"\xff\xd8":
                self._ledger.wrong.append(f"the preview of {name} is no JPEG")

    def _download(self) -> None:
        done = [name for name in [*self._ledger.ends][-30:] if self._ledger.ends[name] != "failed"]
        if not done:
            return
        name = self._chance.choice(done)
        path = f"/v1/videos/{name}/content"
        status, _, content = self._request("content", path, expected=(200, 404, 410))
        if status in (404, 410) and name not in self._ledger.deleted:
            self._ledger.wrong.append(f"the video {name} is lost")
        if status != 200:
            return
        self._check_video(content)
        status, _, part = self._request("range", path, expected=(206, 404, 410), Range="bytes=4-7")
        if status == 206 and part != b"ftyp":
            self._ledger.wrong.append(f"bytes 4 to 7 of {name} are {part!r}")
        path += f"?variant={self._chance.choice(('thumbnail', 'spritesheet'))}"
        self._request("picture", path, expected=(200, 404, 410))

    def _check_video(self, content: bytes) -> None:
        if content[4:8] != b"ftyp":
            self._ledger.wrong.append(f"a video starts with {content[:8]!r}")

    def _send_bad_request(self) -> None:
        path, body, method, expected = self._chance.choice(_BAD_REQUESTS)
        _, _, answer = self._request("bad request", path, body, method, expected=(expected,))
        if not answer["error"]["message"]:
            self._ledger.wrong.append(f"{path} {body} has no reason")

    def _look_at_service(self) -> None:
        self._request("look", self._chance.choice(("/health", "/v1/models")), expected=(200,))
        for path in ("/metrics", "/v1/loras", "/liveness", "/"):
            self._request("look", path, expected=(200,))
