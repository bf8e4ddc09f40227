"""Zip archives that are written while they are sent."""

from __future__ import annotations

import asyncio
import re
import zipfile
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path

_CHUNK = 1 << 20  # bytes of a file that are read at once
_LARGE = 1_900_000_000  # bytes; larger files need zip64, which not all programs read


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
