"""HTTP routes: the video APIs of OpenAI, vllm-omni and MLPerf, health, and metrics."""

from __future__ import annotations

import asyncio
import base64
import hmac
import ipaddress
import json
import os
import re
import signal
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

from starlette.applications import Starlette
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from wan.serve import fields, pictures
from wan.serve.fields import PICTURES
from wan.serve.journal import ServiceJob
from wan.serve.metrics import Metrics
from wan.serve.repeats import RefusedError, hash_request
from wan.serve.service import Service
from wan.settings.errors import InputError
from wan.settings.values import format_value, integer
from wan.settings.video_options import MAX_REFERENCE_IMAGES
from wan.utils.log import logger

_MAX_DEPTH = 8  # nesting levels of a body; lists of image references need four
_TOO_DEEP = f"The body is nested too deeply; give at most {_MAX_DEPTH} levels."
_POLL_SECONDS = 1.0  # seconds; shortest polling interval of clients and of the synchronous routes
_DELETION_SECONDS = 15.0  # seconds to wait until a deletion is written to the journal
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")


def make_video_object(service: Service, job: ServiceJob) -> dict[str, Any]:
    """Returns the OpenAI video object of a job, with the additional fields of vllm-omni."""
    progress = 100 if job.state == "completed" else int(99 * job.done / max(job.total, 1))
    prompts = job.settings.get("clip_prompts", ())
    video: dict[str, Any] = {
        "id": job.id,
        "object": "video",
        "model": job.model,
        "status": job.state,
        "progress": progress,
        "created_at": int(job.created),
        "completed_at": int(job.ended) if job.state == "completed" and job.ended else None,
        "expires_at": None,
        "error": job.error,
        "prompt": job.settings.get("prompt") or "\n".join(prompts) or None,
        "remixed_from_video_id": job.remixed_from,
        "seconds": f"{job.frames / (job.fps or 1):.3f}".rstrip("0").rstrip("."),
        "size": f"{job.width}x{job.height}",
        "num_frames": job.frames,
        "fps": job.fps,
        "seed": job.settings.get("base_seed"),
        "guidance": job.guidance or None,
        "steps": [job.done, job.total],
        "attempt": job.attempt,
    }
    days = service.limits.keep_days
    if days is not None and job.ended is not None:
        video["expires_at"] = int(job.ended + 86400 * days)
    if job.state == "completed":
        video |= {"inference_time_s": job.seconds} | _select_record_fields(service.read_record(job))
    return video


def _select_record_fields(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a video object that come from its record; None where it is damaged."""
    values: dict[str, Any] = {"stage_durations": record.get("seconds"), "peak_memory_mb": None}
    try:
        memory = record.get("peak_memory_bytes", {})
        peak_bytes = memory.get("device") or memory.get("host")
        values["peak_memory_mb"] = peak_bytes and round(peak_bytes / 1e6, 1)
        if "power" in record:
            values["power"] = record["power"]
        json.dumps(values, ensure_ascii=False, allow_nan=False).encode()
    except (AttributeError, TypeError, ValueError, ArithmeticError, RecursionError):
        return {"stage_durations": None, "peak_memory_mb": None}
    return values


class Routes:
    """Handlers of all HTTP routes."""

    def __init__(self, service: Service, metrics: Metrics) -> None:
        self._service, self._metrics = service, metrics

    def list_routes(self) -> list[Route]:
        """Returns the Starlette routes."""
        video_route = "/v1/videos/{id}"
        return [
            Route("/", self.page),
            Route("/health", self.health),
            Route("/liveness", lambda _: JSONResponse({"status": "ok"})),
            Route("/metrics", self.metrics),
            Route("/v1/models", self.models),
            Route("/v1/videos", self.create, methods=["POST"]),
            Route("/v1/videos", self.list),
            Route("/v1/videos/sync", self.sync, methods=["POST"]),
            Route("/v1/videos/generations", self.generations, methods=["POST"]),
            Route(video_route, self.retrieve),
            Route(video_route, self.delete, methods=["DELETE"]),
            Route(f"{video_route}/content", self.content),
            Route(f"{video_route}/remix", self.remix, methods=["POST"]),
        ]

    async def create(self, request: Request) -> Response:
        job, _ = await self._create_job(request, await _read_body(request))
        self._service.waiters.claim(job)
        return self._make_video_response(job)

    async def retrieve(self, request: Request) -> Response:
        return self._make_video_response(self._service.find_job(request.path_params["id"]))

    async def delete(self, request: Request) -> Response:
        job = self._service.find_job(request.path_params["id"])
        self._service.delete(job)
        is_recorded = await self._service.journal.save(_DELETION_SECONDS)
        answer = {"id": job.id, "deleted": True, "object": "video.deleted"}
        return JSONResponse(answer, 200 if is_recorded else 202)

    async def list(self, request: Request) -> Response:
        query = request.query_params
        order, limit = query.get("order", "desc"), query.get("limit", "20")
        if order not in ("asc", "desc"):
            raise RefusedError("order must be asc or desc.", param="order")
        after = query.get("after")
        if after is not None and self._service.journal.get_state(after) is None:
            self._service.find_job(after)
        max_jobs = integer(1, 100)("limit", limit)
        jobs = self._service.journal.list_page(after, max_jobs + 1, order == "desc")
        data = [make_video_object(self._service, job) for job in jobs[:max_jobs]]
        return JSONResponse(
            {
                "object": "list",
                "data": data,
                "has_more": len(jobs) > max_jobs,
                "first_id": data[0]["id"] if data else None,
                "last_id": data[-1]["id"] if data else None,
            }
        )

    async def content(self, request: Request) -> Response:
        job = self._service.find_job(request.path_params["id"])
        variant = request.query_params.get("variant", "video")
        if variant not in ("video", "thumbnail", "spritesheet"):
            raise RefusedError("variant must be video, thumbnail or spritesheet.", param="variant")
        if job.state != "completed":
            why = "has failed" if job.state == "failed" else "is not done yet"
            raise RefusedError(f"The video {why}; see its status.", 404, "not_ready", "video_id")
        path, media_type = self._service.video_path(job), "video/mp4"
        if variant != "video":
            path, media_type = await self._load_picture(job, variant), "image/jpeg"
        status = self._stat_file(job, path)
        if not request.headers.get("range", "bytes=").lower().startswith("bytes="):
            request.scope["headers"] = [  # RFC 9110: an unknown unit is ignored
                header for header in request.scope["headers"] if header[0] != b"range"
            ]
        answer = FileResponse(
            path,
            media_type=media_type,
            filename=f"{job.id}{path.suffix}",
            stat_result=status,
            content_disposition_type="inline",
        )
        if _matches_etag(request, answer.headers["etag"]):
            headers = {name: answer.headers[name] for name in ("etag", "last-modified")}
            return Response(status_code=304, headers=headers)
        return answer

    async def _load_picture(self, job: ServiceJob, variant: str) -> Path:
        """Returns the path of a JPEG of a video.

        Raises:
            RefusedError: The video is damaged or was deleted meanwhile.
        """
        path = self._service.video_path(job)
        try:
            return await asyncio.to_thread(pictures.make_picture, path, variant, job.frames)
        except (OSError, ValueError, RuntimeError) as error:
            self._stat_file(job, path)
            raise _make_gone_error("cannot be read") from error

    def _stat_file(self, job: ServiceJob, path: Path) -> os.stat_result:
        """Returns the status of a file of a job.

        Raises:
            RefusedError: The job was deleted, or the file is missing.
        """
        self._service.find_job(job.id)
        try:
            status = path.stat()
        except OSError as error:
            raise _make_gone_error("is gone") from error
        if not stat.S_ISREG(status.st_mode):
            raise _make_gone_error("is no file")
        return status

    async def remix(self, request: Request) -> Response:
        body = await _read_body(request)
        if {*body} != {"prompt"} or not isinstance(body["prompt"], str):
            raise RefusedError("A remix takes a prompt and nothing else.", param="prompt")
        fields.check_prompt(body["prompt"])
        key = _read_idempotency_key(request)
        job = await self._service.remix(request.path_params["id"], body["prompt"], *key)
        self._service.waiters.claim(job)
        return self._make_video_response(job)

    async def sync(self, request: Request) -> Response:
        """Answers with the video; its job is cancelled when the last client disconnects."""
        job, is_existing = await self._create_job(request, await _read_body(request))
        job = await self._wait_for_job(request, job, is_existing)
        seconds = f"{job.seconds:.3f}"
        headers = {"X-Request-Id": job.id, "X-Model": job.model, "X-Inference-Time-S": seconds}
        path = self._service.video_path(job)
        status = self._stat_file(job, path)
        return FileResponse(path, media_type="video/mp4", headers=headers, stat_result=status)

    async def generations(self, request: Request) -> Response:
        """Answers MLPerf's request with exactly two keys."""
        body = await _read_body(request)
        form = body.pop("response_format", "video_bytes")
        if form not in ("video_path", "video_bytes"):
            message = "response_format must be video_path or video_bytes."
            raise RefusedError(message, param="response_format")
        if body.pop("output_format", "mp4") not in ("mp4", "auto"):
            raise RefusedError("output_format must be mp4 or auto.", param="output_format")
        job = await self._wait_for_job(request, *await self._create_job(request, body))
        path = self._service.video_path(job)
        self._stat_file(job, path)
        if form == "video_path":
            return JSONResponse({"video_id": job.id, "video_path": str(path.absolute())})
        try:
            content = base64.b64encode(await asyncio.to_thread(path.read_bytes)).decode()
        except OSError as error:
            raise _make_gone_error("is gone") from error
        return JSONResponse({"video_id": job.id, "video_bytes": content})

    async def models(self, _: Request) -> Response:
        model = {"id": self._service.model, "object": "model", "owned_by": "wan", "created": 0}
        return JSONResponse({"object": "list", "data": [model]})

    async def health(self, _: Request) -> Response:
        service = self._service
        state = "stopping" if service.stopping else "ok" if service.rank_group.ready else "starting"
        if state == "starting" and service.rank_group.is_stalled:
            state = "stalled"
        problem = service.journal.problem
        if problem is not None and not service.stopping:
            state = "journal_unavailable"
        counts = service.journal.count_states()
        answer = {
            "status": state,
            "queued": counts.get("queued", 0),
            "running": counts.get("in_progress", 0),
            "reason": None if state == "ok" else problem or service.rank_group.trouble,
            "restarts": service.rank_group.restarts,
            "seconds_ahead": round(service.estimate_wait(), 1),
        }
        return JSONResponse(answer, 200 if state == "ok" else 503)

    async def metrics(self, _: Request) -> Response:
        content, media_type = self._metrics.render(self._service)
        return Response(content, media_type=media_type)

    async def page(self, _: Request) -> Response:
        return HTMLResponse(resources.files("wan.serve").joinpath("page.html").read_text("utf-8"))

    async def _create_job(self, request: Request, body: dict[str, Any]) -> tuple[ServiceJob, bool]:
        digest = hash_request(body)
        parsed_request = fields.parse_request(body, self._service.startup_run, self._service.model)
        return await self._service.create(parsed_request, digest, *_read_idempotency_key(request))

    async def _wait_for_job(
        self, request: Request, job: ServiceJob, is_existing: bool
    ) -> ServiceJob:
        """Waits until a job is completed and returns its present state.

        Args:
            is_existing: An earlier request created the job.

        Raises:
            RefusedError: The job failed.
            ClientDisconnect: The client has disconnected.
        """
        with self._service.waiters.wait(job, is_existing) as note_disconnect:
            while True:
                current = self._service.find_job(job.id)
                if current.is_ended:
                    break
                with suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_SECONDS):
                        await self._service.wait_for_change()
                if await request.is_disconnected():
                    note_disconnect()
                    raise ClientDisconnect
        if current.error is not None:
            raise RefusedError(current.error["message"], 500, current.error["code"])
        return current

    def _make_video_response(self, job: ServiceJob) -> Response:
        headers = {}
        if not job.is_ended:
            wait = self._service.estimate_wait(queued_job=job) if job.state == "queued" else 0.0
            milliseconds = int(1000 * min(max(wait / 2, _POLL_SECONDS), 60))
            headers["openai-poll-after-ms"] = str(milliseconds)
        return JSONResponse(make_video_object(self._service, job), headers=headers)


def _make_gone_error(why: str) -> RefusedError:
    return RefusedError(f"The file of this video {why}; delete it.", 410, "gone", "video_id")


def _matches_etag(request: Request, etag: str) -> bool:
    """Returns whether an If-None-Match header (RFC 9110) matches an ETag."""
    tags = [tag.strip() for tag in request.headers.get("if-none-match", "").split(",")]
    return "*" in tags or etag in [tag.removeprefix("W/") for tag in tags]


def _read_idempotency_key(request: Request) -> tuple[str | None, bool]:
    """Returns the Idempotency-Key, and whether the client marks the request as a retry."""
    retries = request.headers.get("x-stainless-retry-count", "0")
    is_repeated = retries.isdecimal() and retries.strip("0") != ""
    return request.headers.get("idempotency-key"), is_repeated


async def _read_body(request: Request) -> dict[str, Any]:
    """Reads the fields of a form or of a JSON object; files become bytes."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type in ("multipart/form-data", "application/x-www-form-urlencoded"):
        try:
            body = await _read_form(request)
        except ValueError as error:  # from decoding or from the form parser
            raise RefusedError(f"The form cannot be read ({format_value(str(error))}).") from error
    else:
        body = _parse_json_body(await request.body() or b"{}")
    _check_body_values(body)
    return body


async def _read_form(request: Request) -> dict[str, Any]:
    """Reads the fields of a form."""
    form_fields: dict[str, Any] = {}
    max_parts = 8 + MAX_REFERENCE_IMAGES
    # `Guard` limits the size of the body.
    async with request.form(max_files=max_parts, max_fields=100, max_part_size=sys.maxsize) as form:
        for key, value in form.multi_items():
            part = await value.read() if isinstance(value, UploadFile) else value
            # The openai client sends lists like this.
            if (list_key := key.removesuffix("[]")) == PICTURES:
                form_fields.setdefault(list_key, []).append(part)
                continue
            if key in form_fields:
                raise RefusedError(f"{key} is given twice; give it once.", param=key)
            form_fields[key] = part
    return form_fields


def _parse_json_body(content: bytes) -> dict[str, Any]:
    """Parses a body as a JSON object."""

    def refuse(word: str) -> NoReturn:
        raise RefusedError(f"The body has a number that is not valid JSON: {word}.")

    try:
        body = json.loads(content.decode(json.detect_encoding(content)), parse_constant=refuse)
    except RecursionError as error:
        raise RefusedError(_TOO_DEEP) from error
    except ValueError as error:  # Python's message about too many digits is for programmers
        why = "a number has too many digits" if "digits" in str(error) else format_value(str(error))
        raise RefusedError(f"The body is no JSON object ({why}).") from error
    if not isinstance(body, dict):
        raise RefusedError("The body must be a JSON object or a form.")
    return body


def _check_body_values(body: Mapping[str, Any]) -> None:
    """Refuses values that JSON files cannot store: deep nesting and unpaired surrogates."""
    level: list[Any] = [body]
    for _ in range(_MAX_DEPTH):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, str):
                try:
                    value.encode()
                except UnicodeEncodeError as error:
                    message = "The body has text with an unpaired surrogate; send it in UTF-8."
                    raise RefusedError(message) from error
            elif isinstance(value, dict):
                inner += [*value, *value.values()]
            elif isinstance(value, list):
                inner += value
        level = inner
    if level:
        raise RefusedError(_TOO_DEEP)


def _list_allowed_methods(request: Request) -> str:
    """Returns the value of the `Allow` header: the methods of all routes of a path."""
    methods: set[str] = set()
    for route in request.app.routes:
        if route.matches(request.scope)[0] != Match.NONE:
            methods |= route.methods
    return ", ".join(sorted(methods))


def _make_error_response(request: Request, error: Exception) -> Response:
    """Returns an error response in OpenAI's format."""
    headers: dict[str, str] = {}
    should_retry = False
    if isinstance(error, RefusedError):
        status, code, param, message = error.status, error.code, error.param, str(error)
        should_retry = error.retry_after is not None
        if error.retry_after is not None:
            headers["Retry-After"] = str(max(round(error.retry_after), 1))
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
    elif isinstance(error, InputError):
        status, code, message = 400, "invalid_request", str(error)
        match = re.fullmatch(r"`?(\w+)`?", error.what)
        param = None if match is None else error.naming.names.get(match[1], match[1])
    elif isinstance(error, HTTPException):
        status, code, param, message = error.status_code, "http", None, error.detail
        headers.update(error.headers or {})
        if status == 405:
            headers["Allow"] = _list_allowed_methods(request)
    elif isinstance(error, MultiPartException):
        status, code, param, message = 400, "invalid_form", None, error.message
    else:
        status, code, param, message = 500, "internal_error", None, "Internal error."
    message = message.encode(errors="replace").decode()
    param = None if param is None else param.encode(errors="replace").decode()
    headers["x-should-retry"] = "true" if should_retry else "false"
    error_type = "invalid_request_error" if status < 500 else "server_error"
    body = {"error": {"message": message, "type": error_type, "param": param, "code": code}}
    return JSONResponse(body, status, headers)


def _answer_disconnect(request: Request, _: Exception) -> Response:
    """Returns status 499 for a client that has disconnected; this is not logged as an error."""
    logger.debug("A client disconnected from %s.", request.url.path)
    return Response(status_code=499)


class Guard:
    """ASGI middleware that refuses unknown hosts and origins, wrong keys and large bodies."""

    def __init__(
        self,
        app: ASGIApp,
        hosts: Sequence[str],
        api_key: str | None,
        most_bytes: int,
        is_busy: Callable[[], bool],
    ) -> None:
        """Wraps an application.

        Args:
            hosts: Allowed values of the `Host` header, without ports.
            api_key: Required token of `Authorization: Bearer`; None: no key is required.
            most_bytes: Maximum size of a body.
            is_busy: Returns whether only /health and /liveness are answered.
        """
        self._app, self._hosts, self._key, self._max_bytes = app, hosts, api_key, most_bytes
        self._is_busy = is_busy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        refusal = self._check_request(request)
        if refusal is not None:
            await _make_error_response(request, refusal)(scope, receive, send)
            return
        num_bytes = 0

        async def limited_receive() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise self._make_too_large_error()
            return message

        has_started = False

        async def tracked_send(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, limited_receive, tracked_send)
        except FileNotFoundError:
            if not has_started:
                raise
            logger.info("A file was deleted before it was sent.")  # uvicorn closes the connection

    def _check_request(self, request: Request) -> RefusedError | None:
        host = request.headers.get("host", "")
        if _strip_port(host) not in self._hosts:
            message = "This host name is not served; start the service with it as --host_name."
            return RefusedError(message, 421)
        origin = request.headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return RefusedError("Pages of other sites may not use this service.", 403)
        length = request.headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 18 or int(length) > self._max_bytes:
            return self._make_too_large_error()
        if request.url.path not in ("/health", "/liveness") and self._is_busy():
            message = "Too many requests are in progress; try again."
            return RefusedError(message, 503, "busy", retry_after=5)
        if self._key is not None and request.url.path not in ("/", "/health", "/liveness"):
            scheme, _, token = request.headers.get("authorization", "").partition(" ")
            token = token.strip() if scheme.lower() == "bearer" else ""
            if not hmac.compare_digest(token.encode(), self._key.encode()):
                return RefusedError("The API key is missing or wrong.", 401, "invalid_api_key")
        return None

    def _make_too_large_error(self) -> RefusedError:
        return RefusedError(f"The body is too large; {self._max_bytes} bytes are allowed.", 413)


def _strip_port(host: str) -> str:
    name, _, port = host.rpartition(":")
    return (name if name and port.isdecimal() else host).lower()


def is_local(host: str) -> bool:
    """Returns whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _stop_if_failed(task: asyncio.Task[None]) -> None:
    """Ends the process if the service has failed, so that a supervisor can restart it."""
    if not task.cancelled() and task.exception() is not None:
        logger.error("The service has failed.", exc_info=task.exception())
        os.kill(os.getpid(), signal.SIGTERM)


def make_app(
    service: Service,
    metrics: Metrics,
    *,
    host: str,
    names: Sequence[str] = (),
    api_key: str | None = None,
    most_bytes: int = 64_000_000,
    is_busy: Callable[[], bool] = lambda: False,
) -> ASGIApp:
    """Returns the ASGI application.

    Args:
        service: Started and stopped with the application.
        metrics: Shown by /metrics.
        host: The address that the server listens on.
        names: Further allowed host names.
        api_key: Required from requests; None: no key is required.
        most_bytes: Maximum size of a request body.
        is_busy: Returns whether only /health and /liveness are answered.
    """

    @asynccontextmanager
    async def lifespan(_: Starlette) -> Any:
        running = asyncio.create_task(service.serve_forever())
        running.add_done_callback(_stop_if_failed)
        try:
            yield
        finally:
            await service.stop()
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

    errors = (RefusedError, InputError, HTTPException, MultiPartException, Exception)
    handlers: dict[Any, Any] = dict.fromkeys(errors, _make_error_response)
    handlers[ClientDisconnect] = _answer_disconnect
    routes = Routes(service, metrics).list_routes()
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    hosts = [*_LOCAL_HOSTS, host.lower(), *(n.lower() for n in names)]
    return Guard(app, hosts, api_key, most_bytes, is_busy)
