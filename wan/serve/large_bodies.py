"""Parses large bodies in short steps: their files are taken out before the rest is parsed.

A large body is parsed in a thread. No step of it keeps the event loop from running, which a single
call for all bytes would, since Python runs one thread at a time.
"""

from __future__ import annotations

import codecs
import json
import re
import secrets
from collections.abc import Iterator
from typing import NoReturn
from urllib.parse import unquote_to_bytes

from wan.serve.repeats import RefusedError
from wan.serve.threads import DaemonThreads

SHORT = 65_536
"""Bytes of a body or of a text that is parsed at once."""
PARSERS = DaemonThreads(2)
"""Threads that parse large bodies."""
MAX_DEPTH = 8
"""Nesting levels of a body; lists of image references need four."""
TOO_DEEP = f"The body is nested too deeply; give at most {MAX_DEPTH} levels."
_MAX_TEXT = 250_000  # bytes of a large body without its files; prompts have 10 000 characters
_MAX_VALUES = 20_000  # numbers, texts, lists and objects of a large body
_STEP = 65_536  # bytes of one step
_MAX_FIELDS = 100  # of a form
_TEXT = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)


def decode_to_utf8(content: bytearray) -> bytearray:
    """Returns JSON in UTF-8 without a byte order mark; raises ValueError if it is invalid."""
    encoding = json.detect_encoding(content)
    if encoding == "utf-8":
        return content
    steps = (bytes(content[i : i + _STEP]) for i in range(0, len(content), _STEP))
    decoded = bytearray()
    for text in codecs.iterdecode(steps, encoding):
        decoded += text.encode()
    return decoded


def take_out_files(content: bytearray, key: str | None) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Replaces the long data URLs in a JSON text.

    Args:
        content: The text, in UTF-8.
        key: The field that has it; None: the body.

    Returns:
        The JSON text with an unguessable text in the place of each data URL, and the start and end
        of the data URLs in `content` by these texts.

    Raises:
        RefusedError: There is too much besides the files.
    """
    files: dict[str, tuple[int, int]] = {}
    json_text, position, token = bytearray(), 0, secrets.token_hex(8)
    num_values = depth = 0
    while position < len(content):
        start = content.find(b'"', position, position + _MAX_TEXT)
        gap = content[position : position + _MAX_TEXT if start < 0 else start]
        num_opened, num_closed = (
            sum(map(gap.count, pair)) for pair in ((b"[", b"{"), (b"]", b"}"))
        )
        num_values += gap.count(b",") + num_opened
        depth += num_opened - num_closed
        json_text += gap
        position += len(gap)
        if start >= 0:
            position = end = _find_text_end(content, start + 1)
            is_file = content[start + 1 : start + 6].lower() == b"data:" and end - start > SHORT
            if is_file and end < len(content):
                name = f"{token}-{len(files)}"
                files[name] = start + 1, end
                json_text += f'"{name}"'.encode()
                position += 1
            else:
                position = min(end + 1, len(content))
                _check_text_length(len(json_text) + position - start, key)
                json_text += content[start:position]
        _check_text_length(len(json_text), key)
        if depth > MAX_DEPTH:
            raise RefusedError(TOO_DEEP, param=key)
        if num_values > _MAX_VALUES:
            subject = "The body" if key is None else key
            message = f"{subject} has more than {_MAX_VALUES} values; give fewer."
            raise RefusedError(message, param=key)
    return bytes(json_text), files


def iter_json_text(content: bytearray, start: int, end: int) -> Iterator[str]:
    """Yields the characters of a JSON string between its quotation marks, in pieces.

    Raises:
        ValueError: The string is invalid.
    """
    while start < end:
        match = _TEXT.match(content, start, min(start + _STEP, end))
        assert match is not None
        if match.end() == start:
            raise ValueError("an escape is cut off")
        yield json.loads(b'"' + match[0] + b'"')
        start = match.end()


def iter_plain_text(content: bytearray) -> Iterator[str]:
    """Yields an ASCII text in pieces; raises ValueError if it is not ASCII."""
    for start in range(0, len(content), _STEP):
        yield content[start : start + _STEP].decode("ascii")


def iter_form_fields(content: bytearray) -> Iterator[tuple[str, str | bytearray]]:
    """Yields names and values of an `application/x-www-form-urlencoded` body.

    Values of more than `SHORT` bytes are not decoded from UTF-8.

    Raises:
        RefusedError: There are too many fields.
    """
    position = count = 0
    while position < len(content):
        end = _find(content, b"&", position, len(content))
        if end > position:
            middle = _find(content, b"=", position, end)
            name = _decode_percents(content, position, middle).decode("utf-8", "replace")
            value = _decode_percents(content, min(middle + 1, end), end)
            yield name, value if len(value) > SHORT else value.decode("utf-8", "replace")
            count += 1
        if count > _MAX_FIELDS:
            raise RefusedError(f"The form has more than {_MAX_FIELDS} fields; give fewer.")
        position = end + 1


def refuse_long_text(key: str | None) -> NoReturn:
    """Refuses a text that is too long and is not a file."""
    subject = "The body" if key is None else key
    message = (
        f"{subject} has more than {_MAX_TEXT} bytes besides its files; give less text, and files "
        "as base64 data URLs or in a form."
    )
    raise RefusedError(message, param=key)


def _check_text_length(count: int, key: str | None) -> None:
    if count > _MAX_TEXT:
        refuse_long_text(key)


def _find_text_end(content: bytearray, start: int) -> int:
    """Returns the position of the quotation mark that ends a JSON string; if it is absent, the end.

    start: The position after the first quotation mark.
    """
    while start < len(content) and content[start] != ord('"'):
        match = _TEXT.match(content, start, start + _STEP)
        if match is None or match.end() == start:  # a backslash at the end
            return len(content)
        start = match.end()
    return start


def _find(content: bytearray, byte: bytes, start: int, end: int) -> int:
    """Returns the first position of a byte; `end` if it is absent."""
    for first in range(start, end, 100 * _STEP):
        position = content.find(byte, first, min(first + 100 * _STEP, end))
        if position >= 0:
            return position
    return end


def _decode_percents(content: bytearray, start: int, end: int) -> bytearray:
    """Returns the bytes of an encoded name or value of a form."""
    decoded = bytearray()
    while start < end:
        stop = min(start + _STEP, end)
        if stop < end:  # not inside of %XX
            stop -= content[stop - 2 : stop][::-1].find(b"%") + 1
        decoded += unquote_to_bytes(bytes(content[start:stop]).replace(b"+", b" "))
        start = stop
    return decoded
