"""Responses with files of a store."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import AsyncIterator, Mapping

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from wan.serve.repeats import RefusedError
from wan.serve.responses import make_gone_error, wait_while_connected
from wan.serve.store import Store, StoreError

_MAX_RANGES = 16


async def make_stored_response(
    request: Request,
    store: Store,
    job_id: str,
    name: str,
    media_type: str,
    headers: Mapping[str, str],
) -> Response:
    """Returns a response with a file of a job, or with the requested ranges of it.

    Raises:
        RefusedError: The file is gone, or the store does not answer.
    """
    size = await wait_while_connected(request, _get_size(store, job_id, name))
    etag = f'"{hashlib.sha256(f"{job_id}/{name}/{size}".encode()).hexdigest()[:32]}"'
    all_headers = {**headers, "etag": etag, "accept-ranges": "bytes"}
    request_headers = Headers(scope=request.scope)  # `request.headers` has the ignored ranges, too
    ranges = None
    if request_headers.get("if-range", etag) == etag:
        ranges = _parse_ranges(request_headers.get("range", ""), size)
    if ranges == []:
        headers = {"content-range": f"bytes */{size}", "etag": etag}
        return Response(status_code=416, headers=headers)
    status = 200 if ranges is None else 206
    parts = [(b"", start, end) for start, end in ranges or [(0, size)]]
    end_bytes = b""
    if len(parts) > 1:
        boundary = secrets.token_hex(16)
        parts = [
            (_make_part_head(boundary, media_type, start, end, size), start, end)
            for _, start, end in parts
        ]
        media_type = f"multipart/byteranges; boundary={boundary}"
        end_bytes = f"\r\n--{boundary}--\r\n".encode()
    elif ranges:
        all_headers["content-range"] = f"bytes {ranges[0][0]}-{ranges[0][1] - 1}/{size}"
    length = sum(len(head) + end - start for head, start, end in parts) + len(end_bytes)
    all_headers["content-length"] = str(length)
    if request.method == "HEAD":
        return Response(status_code=status, headers=all_headers, media_type=media_type)

    async def iter_content() -> AsyncIterator[bytes]:
        for head, start, end in parts:
            yield head
            async for content in store.read(job_id, name, start, end):
                yield content
        yield end_bytes

    return StreamingResponse(iter_content(), status, all_headers, media_type)


def _parse_ranges(header: str, size: int) -> list[tuple[int, int]] | None:
    """Returns start and end of each range that has a byte of a file; None: the whole file.

    A request for more than `_MAX_RANGES` gets the whole file, as RFC 9110 allows.
    """
    texts = header.partition("=")[2].split(",") if header else []
    if not 1 <= len(texts) <= _MAX_RANGES:
        return None
    ranges = []
    for first, _, last in (text.strip().partition("-") for text in texts):
        start = int(first) if first else max(size - int(last), 0)
        end = min(int(last) + 1, size) if first and last else size
        if start < size:
            ranges.append((start, end))
    return ranges


def _make_part_head(boundary: str, media_type: str, start: int, end: int, size: int) -> bytes:
    """Returns the lines before the content of one of several ranges."""
    lines = (
        f"\r\n--{boundary}",
        f"Content-Type: {media_type}",
        f"Content-Range: bytes {start}-{end - 1}/{size}",
    )
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


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
