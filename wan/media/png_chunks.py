"""Leaves out the parts of a PNG for which Pillow would refuse all of it."""

from __future__ import annotations

import io
import zlib
from typing import BinaryIO

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_MAX_BYTES = 1 << 20  # of one text or profile, as Pillow allows
_MAX_TEXT_BYTES = 32 << 20  # of all texts; Pillow allows twice as much
_MAX_PROFILE_BYTES = 16 << 20


def open_without_large_text(file: BinaryIO) -> tuple[BinaryIO, bytes | None]:
    """Returns a PNG without the texts and the color profile that are too large for Pillow.

    Programs store the history of an image in it, and profiles may have large tables. Other files,
    and PNGs without such parts, are returned as they are.

    Returns:
        The file at its start, and the color profile that was left out.
    """
    data = file.read(len(_SIGNATURE))
    if data == _SIGNATURE:
        data += file.read()
        selected, profile = _select_chunks(data)
        if len(selected) < len(data):
            return io.BytesIO(selected), profile
    file.seek(0)
    return file, None


def _select_chunks(data: bytes) -> tuple[bytes, bytes | None]:
    """Returns a PNG without its large texts and profile, and that profile."""
    parts, start, text_bytes, profile = [data[:8]], 8, 0, None
    while start + 12 <= len(data):
        end = start + 12 + int.from_bytes(data[start : start + 4], "big")
        kind, content = data[start + 4 : start + 8], data[start + 8 : end - 4]
        is_kept = True
        if kind in (b"tEXt", b"zTXt", b"iTXt"):
            size = _count_text_bytes(kind, content)
            text_bytes += size
            is_kept = size <= _MAX_BYTES and text_bytes <= _MAX_TEXT_BYTES
        elif kind == b"iCCP":
            values = _decompress(content.partition(b"\0")[2][1:], _MAX_PROFILE_BYTES + 1)
            is_kept = len(values) <= _MAX_BYTES
            profile = values if _MAX_BYTES < len(values) <= _MAX_PROFILE_BYTES else None
        if is_kept:
            parts.append(data[start:end])
        start = end
    return b"".join([*parts, data[start:]]), profile


def _count_text_bytes(kind: bytes, content: bytes) -> int:
    """Returns the bytes of a text, or 1 more than are allowed."""
    text = content.partition(b"\0")[2]
    if kind == b"zTXt":
        return len(_decompress(text[1:], _MAX_BYTES + 1))
    if kind == b"iTXt" and text[:1] == b"\1":  # after it: method, language, translated keyword
        return len(_decompress(text[2:].partition(b"\0")[2].partition(b"\0")[2], _MAX_BYTES + 1))
    return len(text)


def _decompress(data: bytes, limit: int) -> bytes:
    """Returns at most `limit` bytes; Pillow reports damaged ones."""
    try:
        return zlib.decompressobj().decompress(data, limit)
    except zlib.error:
        return b""
