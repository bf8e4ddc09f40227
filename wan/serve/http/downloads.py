"""Responses with files of a store."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from wan.serve.events.video_object import make_gone_error, read_range, wait_while_connected
from wan.serve.requests.refusals import RefusedError
from wan.serve.store.videos import Store, StoreError


async def make_stored_response(
    request: Request,
    store: Store,
    job_id: str,
    name: str,
    media_type: str,
    headers: Mapping[str, str],
) -> Response:
    """Returns a response with a file of a job, or with the requested range of it.

    Raises:
        RefusedError: The file is gone, the store does not answer, or no byte of the range exists.
    """
    size = await get_stored_size(request, store, job_id, name)
    etag = f'"{hashlib.sha256(f"{job_id}/{name}/{size}".encode()).hexdigest()[:32]}"'
    all_headers = {**headers, "etag": etag, "accept-ranges": "bytes"}
    start, end, status = 0, size, 200
    if Headers(scope=request.scope).get("if-range", etag) == etag:
        requested_range = read_range(request, size)
        if requested_range is not None:
            (start, end), status = requested_range, 206
            all_headers["content-range"] = f"bytes {start}-{end - 1}/{size}"
    all_headers["content-length"] = str(end - start)
    if request.method == "HEAD":
        return Response(status_code=status, headers=all_headers, media_type=media_type)
    content = store.read(job_id, name, start, end)
    return StreamingResponse(content, status, all_headers, media_type)


async def get_stored_size(request: Request, store: Store, job_id: str, name: str) -> int:
    """Returns the size of a file of a job in bytes; stops when the client disconnects.

    Raises:
        RefusedError: The file is gone, or the store does not answer.
    """
    try:
        size = await wait_while_connected(request, store.get_size(job_id, name))
    except StoreError as error:
        raise _make_store_refusal() from error
    if size is None:
        raise make_gone_error("is gone")
    return size


def _make_store_refusal() -> RefusedError:
    message = "The store of the videos does not answer; try again."
    return RefusedError(message, 503, "store_unavailable", retry_after=10)
