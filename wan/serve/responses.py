"""Responses: the video object of a job, and errors in OpenAI's format."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match

from wan.serve.journal import ServiceJob
from wan.serve.repeats import RefusedError
from wan.serve.request_schema import make_request_fields
from wan.serve.service import Service
from wan.serve.video_streams import has_stream
from wan.settings.errors import InputError, escape_controls
from wan.utils.log import logger

T = TypeVar("T")


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
        "stage": job.stage or None if job.state == "in_progress" else None,
        "created_at": int(job.created),
        "completed_at": int(job.ended) if job.state == "completed" and job.ended else None,
        "expires_at": None,
        "file_name": make_file_name(job, 0) if job.state == "completed" else None,
        "media_type": "video/mp4",
        "quality": "default",
        "error": job.error,
        "prompt": job.settings.get("prompt") or "\n".join(prompts) or None,
        "remixed_from_video_id": job.remixed_from,
        "seconds": f"{job.frames / (job.fps or 1):.3f}".rstrip("0").rstrip("."),
        "size": f"{job.width}x{job.height}",
        "num_frames": job.frames,
        "fps": job.fps,
        "seed": next(iter(job.seeds), None),
        "guidance": job.guidance or None,
        "lora": job.settings.get("video_lora"),
        "steps": [job.done, job.total],
        "preview_step": job.preview_step,
        "attempt": job.attempt,
        "request": make_request_fields(job),
    }
    names = service.files.list_input_names(job, service.folder_files)
    video |= {"inputs": {field: len(names[field]) for field in names}, "input_names": names}
    records = [
        select_record_fields(service.files.read_record(job, index))
        for index in range(job.num_completed)
    ]
    video["data"] = [
        _make_output_object(service, job, index, records) for index in range(job.num_outputs)
    ]
    if not job.is_ended:
        position, seconds = service.estimates.estimate_end(job)
        seconds_left = None if seconds is None else round(seconds, 1)
        video |= {"queue_position": position, "seconds_left": seconds_left}
    days = service.limits.keep_days
    if days is not None and job.ended is not None:
        video["expires_at"] = int(job.ended + 86400 * days)
    if job.state == "completed":
        video |= {"inference_time_s": job.seconds} | merge_record_fields(records)
    return video


def make_file_name(job: ServiceJob, index: int, suffix: str = ".mp4") -> str:
    """Returns the name under which clients save a file of one of the videos of a job."""
    return f"{job.id}-{index}{suffix}" if index else f"{job.id}{suffix}"


def _make_output_object(
    service: Service, job: ServiceJob, index: int, records: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Returns the description of one of the videos of a job.

    records: The record fields of the complete videos.
    """
    is_complete = index < len(records)
    path = f"{service.root_path}/v1/videos/{job.id}/content?index={index}"
    status = "completed" if is_complete else job.state
    if status == "in_progress" and index > len(records):
        status = "queued"
    is_growing = status == "in_progress" and has_stream(service, job)
    return {
        "index": index,
        "seed": job.seeds[index] if job.seeds else None,
        "status": status,
        "file_name": make_file_name(job, index) if is_complete else None,
        "url": path if is_complete else None,
        "stream_url": f"{path}&stream=true" if is_growing else None,
        **(records[index] if is_complete else {}),
    }


def merge_record_fields(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the record fields of a job: sums of seconds, and the largest memory.

    records: Those of its videos, from `select_record_fields`.
    """
    if len(records) == 1:
        return dict(records[0])
    durations: dict[str, float] = {}
    for record in records:
        for stage, seconds in (record["stage_durations"] or {}).items():
            durations[stage] = durations.get(stage, 0.0) + seconds
    peaks = [record["peak_memory_mb"] for record in records if record["peak_memory_mb"]]
    return {"stage_durations": durations or None, "peak_memory_mb": max(peaks, default=None)}


def select_record_fields(record: Mapping[str, Any]) -> dict[str, Any]:
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


async def wait_while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of a coroutine, which is cancelled when the client disconnects.

    Raises:
        ClientDisconnect: The client has disconnected.
    """

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.create_task(work), asyncio.create_task(wait_for_disconnect())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            return await tasks[0]
        raise ClientDisconnect
    finally:
        for task in tasks:
            task.cancel()


def read_range(request: Request, size: int) -> tuple[int, int] | None:
    """Returns start and end of the requested range of a file; None: the whole file is requested.

    A header that a server may ignore by RFC 9110 is removed, so that `FileResponse` ignores it,
    too: of another method than GET, of another unit, of several ranges, or an invalid one.

    Args:
        size: Bytes of the file.

    Raises:
        RefusedError: No byte of the range exists.
    """
    scope, text = request.scope, Headers(scope=request.scope).get("range", "")
    match = re.fullmatch(r"bytes=(\d{0,18})-(\d{0,18})", text, re.ASCII | re.IGNORECASE)
    first, last = match.groups() if match is not None and request.method == "GET" else ("", "")
    if not (first or last) or (first and last and int(first) > int(last)):
        scope["headers"] = [header for header in scope["headers"] if header[0] != b"range"]
        return None
    start = int(first) if first else max(size - int(last), 0)
    if start >= size:
        message = f"No byte of this range exists; the file has {size} bytes."
        content_range = {"Content-Range": f"bytes */{size}"}
        raise RefusedError(message, 416, "range_not_satisfiable", headers=content_range)
    return start, min(int(last) + 1, size) if first and last else size


def make_gone_error(why: str) -> RefusedError:
    """Returns the refusal for a video whose file cannot be sent."""
    return RefusedError(f"The file of this video {why}; delete it.", 410, "gone", "video_id")


def _list_allowed_methods(request: Request) -> str:
    """Returns the value of the `Allow` header: the methods of all routes of a path."""
    methods: set[str] = set()
    for route in request.app.routes:
        if route.matches(request.scope)[0] != Match.NONE:
            methods |= route.methods
    return ", ".join(sorted(methods))


def make_error_response(request: Request, error: Exception) -> Response:
    """Returns an error response in OpenAI's format."""
    headers: dict[str, str] = {}
    should_retry = False
    if isinstance(error, RefusedError):
        status, code, param, message = (
            error.status,
            error.code,
            error.param,
            escape_controls(str(error)),
        )
        headers |= error.headers
        should_retry = error.retry_after is not None
        if error.retry_after is not None:
            headers["Retry-After"] = str(max(round(error.retry_after), 1))
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
    elif isinstance(error, InputError):
        status, code, message = 400, "invalid_request", str(error)
        match = re.fullmatch(r"`?(\w+)`?", error.subject)
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


def answer_disconnect(request: Request, _: Exception) -> Response:
    """Returns status 499 for a client that has disconnected; this is not logged as an error."""
    logger.debug("A client disconnected from %s.", request.scope["path"])
    return Response(status_code=499)
