"""HTTP routes: the video APIs of OpenAI and vllm-omni, health, and metrics."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from wan.app.notices import has_random_weights
from wan.app.run import Run
from wan.checkpoint.formats.tensor_info import FileState, read_file_state
from wan.checkpoint.lora.folder import describe_lora, find_lora_files
from wan.serve.events.sse import MAX_LISTENERS, JobEvents
from wan.serve.events.video_object import (
    make_file_name,
    make_video_object,
    select_record_fields,
)
from wan.serve.events.video_streams import VideoStreams
from wan.serve.http import listing
from wan.serve.http.bodies import call_by_size, count_file_bytes, read_body
from wan.serve.http.downloads import (
    ArchiveFile,
    get_stored_size,
    make_entry_name,
    make_gone_error,
    make_stored_response,
    read_once,
    read_parts,
    read_range,
    stream_archive,
    wait_while_connected,
)
from wan.serve.http.metrics import Metrics
from wan.serve.http.openapi import make_openapi
from wan.serve.http.operations import MEDIA_TYPES, OPERATIONS, PAGE_FILES, make_page_operation
from wan.serve.jobs.files import make_picture, make_picture_path
from wan.serve.jobs.job import ServiceJob, hash_request
from wan.serve.queue.service import Service
from wan.serve.requests import fields
from wan.serve.requests.refusals import RefusedError
from wan.serve.requests.schema import check_needed_fields, make_request_schema
from wan.serve.requests.webhook_hosts import read_url
from wan.serve.store.videos import Store
from wan.settings.values import format_value, integer, switch

RouteHandler = Callable[[Request], Awaitable[Response]]
_PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' blob: data:; media-src 'self' blob:; connect-src 'self'; base-uri 'self'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_POLL_SECONDS = 1.0  # seconds; shortest polling interval of clients and of the synchronous routes


class LoraCatalog:
    """Describes the LoRAs of `--lora_folder`; each file is read once, unless it changes."""

    def __init__(self, run: Run) -> None:
        """Lists the files. run: The run that the ranks were started with."""
        folder = run.setup.lora_options.lora_folder
        self._files = {} if folder is None else find_lora_files(folder)
        self._checkpoint = run.setup.checkpoint
        self._descriptions: dict[str, tuple[FileState | None, dict[str, Any]]] = {}

    def describe_all(self) -> list[dict[str, Any]]:
        """Returns name, bytes, experts, kind, SHA-256 and error of each LoRA."""
        for name, path in self._files.items():
            try:
                state = read_file_state(path)
            except OSError:
                state = None
            if name not in self._descriptions or self._descriptions[name][0] != state:
                self._descriptions[name] = state, describe_lora(name, path, self._checkpoint)
        return [self._descriptions[name][1] for name in self._files]


class Routes:
    """Handlers of all HTTP routes."""

    def __init__(
        self,
        service: Service,
        metrics: Metrics,
        store: Store | None = None,
        max_listeners: int = MAX_LISTENERS,
    ) -> None:
        self._service, self._metrics, self._store = service, metrics, store
        self._loras = LoraCatalog(service.startup_run)
        self._events = JobEvents(service, max_listeners)
        self._streams = VideoStreams(service, max_listeners)
        self._list_lock = asyncio.Lock()

    def list_routes(self) -> list[Route]:
        """Returns the Starlette routes of all operations."""
        handlers = make_page_handlers(self._service) | {
            "createVideo": self.create,
            "createVideoAndWait": self.sync,
            "listVideos": self.list,
            "getVideo": self.retrieve,
            "deleteVideo": self.delete,
            "getContent": self.content,
            "getArchive": self.archive,
            "getInput": self.input,
            "streamEvents": self.events,
            "remixVideo": self.remix,
            "listModels": self.models,
            "listLoras": self.loras,
            "getHealth": self.health,
            "getLiveness": self.liveness,
            "getMetrics": self.metrics,
        }
        return [
            Route(operation.path, handlers[operation.id], methods=[operation.method])
            for operation in OPERATIONS
        ]

    async def create(self, request: Request) -> Response:
        job, _ = await self._create_job(request, await read_body(request))
        self._service.waiters.claim(job)
        return self._make_video_response(job)

    async def retrieve(self, request: Request) -> Response:
        return self._make_video_response(self._service.find_job(request.path_params["id"]))

    async def delete(self, request: Request) -> Response:
        job = self._service.find_job(request.path_params["id"])
        self._service.delete(job)
        is_recorded = await self._service.journal.save()
        answer = {"id": job.id, "deleted": True, "object": "video.deleted"}
        return JSONResponse(answer, 200 if is_recorded else 202)

    async def list(self, request: Request) -> Response:
        query = _read_query(request)
        order, limit = query.get("order", "desc"), query.get("limit", "20")
        if order not in ("asc", "desc"):
            raise RefusedError("order must be asc or desc.", param="order")
        after = query.get("after") or None
        if after is not None and self._service.journal.get_state(after) is None:
            self._service.find_job(after)
        job_filter = listing.read_filter(query.get("status", ""), query.get("search", ""))
        max_jobs = integer(0, 100)("limit", limit)
        async with self._list_lock:  # a turn of the event loop has one job of one list
            page = await listing.find_jobs(
                self._service.journal, job_filter, after, max_jobs, order == "desc"
            )
            videos: list[str] = []
            for job in page.jobs:
                video = make_video_object(self._service, job)
                videos.append(json.dumps(video, ensure_ascii=False, separators=(",", ":")))
                await asyncio.sleep(0)
        page_fields = {
            "object": "list",
            "has_more": page.has_more,
            "first_id": page.jobs[0].id if page.jobs else None,
            "last_id": page.last_id,
        }
        content = f'{json.dumps(page_fields)[:-1]},"data":[{",".join(videos)}]}}'
        return Response(content, media_type="application/json")

    async def content(self, request: Request) -> Response:
        job = self._service.find_job(request.path_params["id"])
        variant, index, follows = _read_variant(request)
        if index is not None and index >= job.num_outputs:
            message = f"This request has {job.num_outputs} videos; index starts with 0."
            raise RefusedError(message, 404, "not_found", "index")
        if variant == "preview":
            return await self._make_preview_response(request, job, index)
        index = index or 0
        if follows and index >= job.num_completed and not job.is_ended:
            return await self._follow_video(request, job, index)
        _check_completed(job, index)
        path, media_type = self._service.files.video_path(job, index), "video/mp4"
        if variant != "video":
            path, media_type = make_picture_path(path, variant), "image/jpeg"
            if job.store_state != "stored":
                path = await self._load_picture(job, variant, index)
        name = make_file_name(job, index, path.suffix)
        headers = {"content-disposition": f'inline; filename="{name}"'}
        answer = await self._send_file(request, job, path, media_type, headers)
        if _matches_etag(request, answer.headers["etag"]):
            names = {"etag", "last-modified"} & {*answer.headers}
            headers = {name: answer.headers[name] for name in names}
            return Response(status_code=304, headers=headers)
        return answer

    async def _follow_video(self, request: Request, job: ServiceJob, index: int) -> Response:
        """Answers with the bytes of an unfinished video, as they are written."""
        headers = {
            "content-disposition": f'inline; filename="{make_file_name(job, index)}"',
            "accept-ranges": "none",
            "cache-control": "no-store",
            "X-Accel-Buffering": "no",
        }
        if request.method == "HEAD":
            self._streams.check_stream(job)
            return Response(headers=headers, media_type="video/mp4")
        chunks = self._streams.follow(job, index)
        if await wait_while_connected(request, anext(chunks, None)) is None:  # it is complete
            return await self.content(request)
        return StreamingResponse(chunks, media_type="video/mp4", headers=headers)

    async def archive(self, request: Request) -> Response:
        """Answers with a zip of all that clients may download of a job."""
        job = self._service.find_job(request.path_params["id"])
        _check_completed(job, 0)
        files = await self._find_archive_files(request, job)
        headers = {"content-disposition": f'attachment; filename="{job.id}.zip"'}
        if request.method == "HEAD":
            return Response(headers=headers, media_type="application/zip")
        content = stream_archive(files)
        return StreamingResponse(content, media_type="application/zip", headers=headers)

    async def _read_video(self, job: ServiceJob, path: Path, size: int) -> AsyncIterator[bytes]:
        """Yields the bytes of a video from the disk, or from the store if it has moved there."""
        try:
            async for part in read_parts(path):
                yield part
        except FileNotFoundError:  # nothing is yielded yet: an open file stays readable
            current = self._service.journal.get(job.id)
            if current is None or current.store_state != "stored":
                raise
            async for part in self._get_store().read(job.id, path.name, 0, size):
                yield part

    async def _find_archive_files(self, request: Request, job: ServiceJob) -> Sequence[ArchiveFile]:
        """Returns the complete videos with saved latents, the video object, and the uploads."""
        video = make_video_object(self._service, job)
        text = json.dumps(video, indent=1, ensure_ascii=False).encode()
        files = [ArchiveFile(f"{job.id}.json", len(text), read_once(text))]
        paths: dict[str, Path] = {}  # of local files, by name
        job_files, folder_files = self._service.files, self._service.folder_files
        for index in range(job.num_completed):
            path, name = job_files.video_path(job, index), make_file_name(job, index)
            if job.store_state == "stored":
                size = await get_stored_size(request, self._get_store(), job.id, path.name)
            else:
                size = self._stat_file(job, path).st_size
            files.append(ArchiveFile(name, size, self._read_video(job, path, size)))
            for suffix, latents in job_files.list_latents(job, index):
                paths[make_file_name(job, index, suffix)] = latents
        for field, uploads in job_files.list_inputs(job, folder_files).items():
            for number, path in enumerate(uploads, 1):
                name = job_files.read_upload_name(job, path)
                paths[make_entry_name(field, number if len(uploads) > 1 else None, name)] = path
        for name, path in paths.items():
            files.append(ArchiveFile(name, self._stat_file(job, path).st_size, read_parts(path)))
        return files

    async def input(self, request: Request) -> Response:
        """Answers with an uploaded file; never with a type that a browser would run."""
        job, field = self._service.find_job(request.path_params["id"]), request.path_params["field"]
        paths = self._service.files.list_inputs(job, self._service.folder_files).get(field, [])
        index = integer(0, 10_000)("index", _read_query(request).get("index", "0"))
        if index >= len(paths):
            message = f"This video has no such file {field[:100]!r}."
            raise RefusedError(message, 404, "not_found", "field")
        status = self._stat_file(job, paths[index])
        read_range(request, status.st_size)
        return FileResponse(
            paths[index],
            media_type="application/octet-stream",
            headers={"X-Content-Type-Options": "nosniff"},
            filename=self._service.files.read_upload_name(job, paths[index]),
            stat_result=status,
        )

    async def events(self, request: Request) -> Response:
        """Streams the events of a job until it has ended."""
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        if request.method == "HEAD":
            self._service.find_job(request.path_params["id"])
            return Response(headers=headers, media_type="text/event-stream")
        last_id = re.fullmatch(r"\d{1,18}", request.headers.get("last-event-id", ""), re.ASCII)
        number = -1 if last_id is None else int(last_id[0])
        stream = self._events.open_stream(request.path_params["id"], number)
        if stream is None:  # so that browsers do not connect again
            return Response(status_code=204)
        await anext(stream)  # takes a place among the listeners, or refuses
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)

    async def _send_file(
        self,
        request: Request,
        job: ServiceJob,
        path: Path,
        media_type: str,
        headers: Mapping[str, str],
    ) -> Response:
        """Returns a response with a file of a completed job, from the disk or from the store."""
        if job.store_state == "stored":
            return await make_stored_response(
                request, self._get_store(), job.id, path.name, media_type, headers
            )
        status = self._stat_file(job, path)
        read_range(request, status.st_size)
        return FileResponse(path, media_type=media_type, headers=headers, stat_result=status)

    def _get_store(self) -> Store:
        """Returns the store; refuses a request for a stored file if the service has none."""
        if self._store is None:
            raise make_gone_error("is in a store, which needs --store")
        return self._store

    async def _make_preview_response(
        self, request: Request, job: ServiceJob, index: int | None
    ) -> Response:
        """Answers with the newest preview, which is read at once since it may be replaced."""
        try:
            content = await asyncio.to_thread(self._service.files.read_preview, job, index)
        except OSError as error:
            self._service.find_job(job.id)
            message = "This video has no preview now; ask for previews with preview: true."
            raise RefusedError(message, 404, "not_ready", "video_id") from error
        etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        headers = {"etag": etag, "cache-control": "no-cache"}
        if _matches_etag(request, etag):
            return Response(status_code=304, headers=headers)
        return Response(content, media_type="image/jpeg", headers=headers)

    async def _load_picture(self, job: ServiceJob, variant: str, index: int) -> Path:
        """Returns the path of a JPEG of a video.

        Raises:
            RefusedError: The video is damaged or was deleted meanwhile.
        """
        path = self._service.files.video_path(job, index)
        try:
            return await asyncio.to_thread(make_picture, path, variant, job.frames)
        except (OSError, ValueError, RuntimeError) as error:
            self._stat_file(job, path)
            raise make_gone_error("cannot be read") from error

    def _stat_file(self, job: ServiceJob, path: Path) -> os.stat_result:
        """Returns the status of a file of a job.

        Raises:
            RefusedError: The job was deleted, or the file is missing.
        """
        self._service.find_job(job.id)
        try:
            status = path.stat()
        except OSError as error:
            raise make_gone_error("is gone") from error
        if not stat.S_ISREG(status.st_mode):
            raise make_gone_error("is no file")
        return status

    async def remix(self, request: Request) -> Response:
        body = {k: v for k, v in (await read_body(request)).items() if v is not None}
        url = body.pop("webhook_url", None)
        if {*body} != {"prompt"} or not isinstance(body["prompt"], str):
            message = "A remix takes a prompt, a webhook_url, and nothing else."
            raise RefusedError(message, param="prompt")
        fields.check_prompt(body["prompt"])
        url = None if url is None else read_url(url)
        key = request.headers.get("idempotency-key")
        job = await self._service.remix(request.path_params["id"], body["prompt"], url, key)
        self._service.waiters.claim(job)
        return self._make_video_response(job)

    async def sync(self, request: Request) -> Response:
        """Answers with the video; its job is cancelled when the last client disconnects."""
        job, is_existing = await self._create_job(request, await read_body(request), 1)
        job = await self._wait_for_job(request, job, is_existing)
        record = select_record_fields(self._service.files.read_record(job))
        headers = {
            "X-Request-Id": job.id,
            "X-Model": job.model,
            "X-Inference-Time-S": f"{job.seconds:.3f}",
            "X-Stage-Durations": json.dumps(record["stage_durations"] or {}),
            "X-Peak-Memory-MB": str(record["peak_memory_mb"] or 0.0),
        }
        path = self._service.files.video_path(job)
        return await self._send_file(request, job, path, "video/mp4", headers)

    async def models(self, _: Request) -> Response:
        model = {"object": "model", "owned_by": "wan", "created": 0}
        data = [{"id": name} | model for name in self._service.models]
        return JSONResponse({"object": "list", "data": data})

    async def loras(self, _: Request) -> Response:
        data = await asyncio.to_thread(self._loras.describe_all)
        return JSONResponse({"object": "list", "data": data})

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
            "seconds_ahead": round(service.estimates.estimate_wait(), 1),
        }
        return JSONResponse(answer, 200 if state == "ok" else 503)

    async def liveness(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def metrics(self, _: Request) -> Response:
        content, media_type = self._metrics.render(self._service)
        return Response(content, media_type=media_type)

    async def _create_job(
        self, request: Request, body: dict[str, Any], max_outputs: int = fields.MAX_OUTPUTS
    ) -> tuple[ServiceJob, bool]:
        key, service = request.headers.get("idempotency-key"), self._service
        size = count_file_bytes(body)
        digest = await call_by_size(size, hash_request, body) if key else ""
        parsed_request = await call_by_size(
            size, fields.parse_request, body, service.startup_run, service.models
        )
        check_needed_fields(parsed_request.settings, parsed_request.files, service.startup_run)
        if parsed_request.num_outputs > max_outputs:
            message = "This route answers with one video; ask for several with POST /v1/videos."
            raise RefusedError(message, param="n")
        return await service.create(parsed_request, digest, key)

    async def _wait_for_job(
        self, request: Request, job: ServiceJob, is_existing: bool
    ) -> ServiceJob:
        """Waits until a job is completed and returns its present state.

        Args:
            is_existing: An earlier request created the job.

        Raises:
            RefusedError: The job failed, or the service stops.
            ClientDisconnect: The client has disconnected.
        """
        with self._service.waiters.wait(job, is_existing) as note_disconnect:
            while True:
                current = self._service.find_job(job.id)
                if current.is_ended:
                    break
                self._service.refuse_when_stopping()
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
            is_queued = job.state == "queued"
            wait = self._service.estimates.estimate_wait(queued_job=job) if is_queued else 0.0
            milliseconds = int(1000 * min(max(wait / 2, _POLL_SECONDS), 60))
            headers["openai-poll-after-ms"] = str(milliseconds)
        return JSONResponse(make_video_object(self._service, job), headers=headers)


def make_page_handlers(service: Service) -> dict[str, RouteHandler]:
    """Returns the handlers of the page and of /openapi.json by the ids of their operations."""

    @cache
    def render_openapi() -> bytes:
        limits = service.limits
        schema = make_request_schema(
            service.startup_run, service.models, limits.frames, limits.prompt
        )
        is_random = has_random_weights(service.startup_run)
        document = make_openapi(schema, service.root_path, is_random)
        return json.dumps(document, ensure_ascii=False).encode()

    async def send_openapi(_: Request) -> Response:
        return Response(render_openapi(), media_type="application/json")

    handlers: dict[str, RouteHandler] = {"getOpenapi": send_openapi}
    return handlers | {
        make_page_operation(name).id: partial(_send_page_file, name, service)
        for name in ("page.html", *PAGE_FILES)
    }


async def _send_page_file(name: str, service: Service, _: Request) -> Response:
    """Answers with a file of the page, whose addresses are relative."""
    content = resources.files("wan.serve").joinpath("page", name).read_text("utf-8")
    if name == "page.html" and service.root_path:  # /wan and /wan/ are the same page
        content = content.replace("<head>", f'<head>\n<base href="{service.root_path}/">', 1)
    media_type = MEDIA_TYPES[name.rpartition(".")[2]]
    return Response(content, media_type=media_type, headers=_PAGE_HEADERS)


def _check_completed(job: ServiceJob, index: int) -> None:
    """Refuses a request for one of a job's videos that is not complete."""
    if index >= job.num_completed:
        why = "has failed" if job.state == "failed" else "is not done yet"
        raise RefusedError(f"The video {why}; see its status.", 404, "not_ready", "video_id")


def _read_query(request: Request) -> dict[str, str]:
    """Returns the parameters of the query; refuses one that is given twice."""
    query: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name in query:
            raise RefusedError(f"{format_value(name)} is given twice; give it once.", param=name)
        query[name] = value
    return query


def _read_variant(request: Request) -> tuple[str, int | None, bool]:
    """Returns which file is requested, of which one of several videos, and whether to follow it.

    A number as the variant is the index of a video, as SGLang reads it.
    """
    query = _read_query(request)
    variant, index = query.get("variant", "video"), query.get("index")
    if variant.isdecimal() and index is None:
        variant, index = "video", variant
    if variant not in ("video", "thumbnail", "spritesheet", "preview"):
        allowed = "video, thumbnail, spritesheet or preview"
        raise RefusedError(f"variant must be {allowed}.", param="variant")
    follows = switch("stream", query.get("stream", "false"))
    if follows and variant != "video":
        raise RefusedError("stream is for variant=video only; drop one of them.", param="stream")
    return variant, None if index is None else integer(0, 10_000)("index", index), follows


def _matches_etag(request: Request, etag: str) -> bool:
    """Returns whether an If-None-Match header (RFC 9110) matches an ETag."""
    tags = [tag.strip() for tag in request.headers.get("if-none-match", "").split(",")]
    return "*" in tags or etag in [tag.removeprefix("W/") for tag in tags]
