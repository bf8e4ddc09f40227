"""Files in answers: of a store, ranges of files, and zip archives written while they are sent."""

from __future__ import annotations

import asyncio
import hashlib
import re
import zipfile
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from wan.serve.requests.refusals import RefusedError
from wan.serve.store.videos import Store, StoreError

T = TypeVar("T")
_CHUNK = 1 << 20  # bytes of a file that are read at once
_LARGE = 1_900_000_000  # bytes; larger files need zip64, which not all programs read


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
        message = "The store of the videos does not answer; try again."
        raise RefusedError(message, 503, "store_unavailable", retry_after=10) from error
    if size is None:
        raise make_gone_error("is gone")
    return size


async def wait_while_connected(request: Request, work: Awaitable[T]) -> T:
    """Returns the result of an awaitable, which is cancelled when the client disconnects.

    Raises:
        ClientDisconnect: The client has disconnected.
    """

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(work), asyncio.create_task(wait_for_disconnect())
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


@dataclass(frozen=True)
class ArchiveFile:
    """A file of an archive.

    Attributes:
        size: Bytes; those of `content`.
    """

    name: str
    size: int
    content: AsyncIterator[bytes]


class _Buffer:
    """A file that `ZipFile` writes to and cannot seek in; `take` empties it."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: bytes, /) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def flush(self) -> None: ...

    def close(self) -> None: ...

    def take(self) -> bytes:
        content = b"".join(self._parts)
        self._parts.clear()
        return content


async def stream_archive(files: Iterable[ArchiveFile]) -> AsyncIterator[bytes]:
    """Yields the bytes of a zip with files; at most one part of a file is in memory.

    Videos and images are not compressed further. They are nevertheless in the format of deflate,
    because some programs cannot find the end of a stored file whose size is written after it.
    """
    buffer = _Buffer()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=0) as archive:
        for file in files:
            with archive.open(file.name, "w", force_zip64=file.size > _LARGE) as entry:
                async for part in file.content:
                    await asyncio.to_thread(entry.write, part)
                    yield buffer.take()
    yield buffer.take()


async def read_parts(path: Path) -> AsyncIterator[bytes]:
    """Yields the bytes of a local file."""
    file = await asyncio.to_thread(path.open, "rb")
    try:
        while part := await asyncio.to_thread(file.read, _CHUNK):
            yield part
    finally:
        file.close()


async def read_once(content: bytes) -> AsyncIterator[bytes]:
    """Yields bytes as one part."""
    yield content


def make_entry_name(field: str, number: int | None, name: str) -> str:
    """Returns the name of an uploaded file in an archive, which is valid on every file system.

    Args:
        field: The field of the request that it was uploaded as.
        number: Its number in a list of several files; None: it is the only one.
        name: The client's name of the file.
    """
    name = re.sub(r"[^\w.,()+ -]", "_", name)
    return f"inputs/{field}_{name}" if number is None else f"inputs/{field}_{number}_{name}"
