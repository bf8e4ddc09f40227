"""Responses with files of a store."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from wan.serve.repeats import RefusedError
from wan.serve.responses import make_gone_error
from wan.serve.store import Store, StoreError


async def make_stored_response(
    request: Request,
    store: Store,
    job_id: str,
    name: str,
    media_type: str,
    headers: Mapping[str, str],
) -> Response:
    """Returns a response with a file of a job, or with the one range of it that is requested.

    A request for several ranges gets the whole file, as RFC 9110 allows.

    Raises:
        RefusedError: The file is gone, or the store does not answer.
    """
    size = await _get_size(store, job_id, name)
    etag = f'"{hashlib.sha256(f"{job_id}/{name}/{size}".encode()).hexdigest()[:32]}"'
    all_headers = {**headers, "etag": etag, "accept-ranges": "bytes"}
    start, end, status = 0, size, 200
    request_headers = Headers(scope=request.scope)  # `request.headers` has the ignored ranges, too
    match = re.fullmatch(r"bytes=\s*(\d*)-(\d*)\s*", request_headers.get("range", ""), re.I)
    if match is not None and request_headers.get("if-range", etag) == etag:
        first, last = match[1], match[2]
        start = int(first) if first else max(size - int(last), 0)
        end = min(int(last) + 1, size) if first and last else size
        status = 206
        if start >= size:
            headers = {"content-range": f"bytes */{size}", "etag": etag}
            return Response(status_code=416, headers=headers)
        all_headers["content-range"] = f"bytes {start}-{end - 1}/{size}"
    all_headers["content-length"] = str(end - start)
    if request.method == "HEAD":
        return Response(status_code=status, headers=all_headers, media_type=media_type)
    content = store.read(job_id, name, start, end)
    return StreamingResponse(content, status, all_headers, media_type)


async def read_stored_file(store: Store, job_id: str, name: str) -> bytes:
    """Returns the content of a file of a job; raises as `make_stored_response`."""
    size = await _get_size(store, job_id, name)
    try:
        return b"".join([part async for part in store.read(job_id, name, 0, size)])
    except StoreError as error:
        raise _make_store_refusal() from error


async def _get_size(store: Store, job_id: str, name: str) -> int:
    try:
        size = await store.get_size(job_id, name)
    except StoreError as error:
        raise _make_store_refusal() from error
    if size is None:
        raise make_gone_error("is gone")
    return size


def _make_store_refusal() -> RefusedError:
    message = "The store of the videos does not answer; try again."
    return RefusedError(message, 503, "store_unavailable", retry_after=10)
