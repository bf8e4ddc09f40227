"""Reads the body of a request: a form or a JSON object.

A large body is parsed in a thread, and its files are taken out before the rest is parsed. No step
keeps the event loop from running, which a single call for all bytes would, since Python runs one
thread at a time.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import sys
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar
from urllib.parse import parse_qsl

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartParser
from starlette.requests import Request

from wan.serve.jobs.files import UploadedFile
from wan.serve.requests.fields import JSON_FIELDS, PICTURE_FIELDS, SEEDS, URL_KEYS, decode_data_url
from wan.serve.requests.refusals import RefusedError
from wan.settings.json_text import DuplicateNameError, parse_json
from wan.settings.values import format_value
from wan.settings.video_options import MAX_REFERENCE_IMAGES
from wan.utils.threads import DaemonThreads

SHORT = 65_536
"""Bytes of a body or of a text that are parsed at once, and of a step of longer ones."""
PARSERS = DaemonThreads(2)
"""Threads that parse large bodies."""
MAX_DEPTH = 8
"""Nesting levels of a body; lists of image references need four."""
TOO_DEEP = f"The body is nested too deeply; give at most {MAX_DEPTH} levels."
_MAX_TEXT = 250_000  # bytes of a large body without its files; prompts have 10 000 characters
_MAX_VALUES = 20_000  # numbers, texts, lists and objects of a large body
_MAX_FIELDS = 100  # of a form
_TEXT = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)


def take_out_files(content: bytearray, key: str | None) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Replaces the long data URLs in a JSON text.

    Args:
        content: The text, in UTF-8.
        key: The field that has it; None: the body.

    Returns:
        The JSON text with an unguessable text in the place of each data URL, and the start and end
        of the data URLs in `content` by these texts.

    Raises:
        RefusedError: There is too much without the files.
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
        match = _TEXT.match(content, start, min(start + SHORT, end))
        assert match is not None
        if match.end() == start:
            raise ValueError("an escape is cut off")
        yield json.loads(b'"' + match[0] + b'"')
        start = match.end()


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
        match = _TEXT.match(content, start, start + SHORT)
        if match is None or match.end() == start:  # a backslash at the end
            return len(content)
        start = match.end()
    return start


T = TypeVar("T")


async def read_body(request: Request) -> dict[str, Any]:
    """Reads the fields of a form or of a JSON object; files, also of long data URLs, become bytes.

    A large body is parsed in a thread.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type == "multipart/form-data":
        try:
            form = await _read_form(request)
        except ValueError as error:  # from decoding or from the form parser
            raise RefusedError(f"The form cannot be read ({format_value(str(error))}).") from error
        size = sum(len(value) for _, value in form if isinstance(value, str))
        return await call_by_size(size, _parse_form, form)
    content = bytearray()  # one of `request.body` would be copied as a whole
    async for part in _iter_content(request):
        content += part
    if media_type == "application/x-www-form-urlencoded":
        return _parse_encoded_form(content)
    return await call_by_size(len(content), _parse_json_body, content)


async def call_by_size(size: int, function: Callable[..., T], *args: Any) -> T:
    """Calls a function that reads `size` bytes of a body: in a thread if these are many."""
    return function(*args) if size <= SHORT else await PARSERS.call(function, *args)


def count_file_bytes(body: Mapping[str, Any]) -> int:
    """Returns the size of the files of a body."""
    values = [x for value in body.values() for x in (value if isinstance(value, list) else [value])]
    return sum(len(value) for value in values if isinstance(value, bytes | bytearray))


async def _iter_content(request: Request) -> AsyncGenerator[bytes, None]:
    """Yields the content of a body in pieces, between which the event loop does other work."""
    async for part in request.stream():
        for start in range(0, len(part), SHORT):
            yield part[start : start + SHORT]
            await asyncio.sleep(0)


async def _read_form(request: Request) -> list[tuple[str, Any]]:
    """Reads names and values of a multipart form."""
    max_parts = 8 + MAX_REFERENCE_IMAGES
    # `Guard` limits the size of the body.
    limits: dict[str, int] = {"max_files": max_parts, "max_fields": 100}
    parser = MultiPartParser(
        request.headers, _iter_content(request), **limits, max_part_size=sys.maxsize
    )
    form = await parser.parse()
    try:
        parts: list[tuple[str, Any]] = []
        for key, value in form.multi_items():
            part: Any = value
            if isinstance(value, UploadFile):
                part = await call_by_size(value.size or 0, _read_upload, value)
                if not value.filename and not part:
                    continue  # a file input without a file
            parts.append((key, part))
        return parts
    finally:
        await form.close()


def _read_upload(upload: UploadFile) -> UploadedFile:
    """Reads an uploaded file and its name."""
    file = UploadedFile(upload.file.read())
    file.name = _read_file_name(upload.filename or "")
    return file


def _parse_encoded_form(content: bytearray) -> dict[str, Any]:
    """Parses a form without files."""
    if len(content) > _MAX_TEXT:
        message = f"A form of this type has at most {_MAX_TEXT} bytes; send a multipart form."
        raise RefusedError(message)
    try:
        form = parse_qsl(content.decode("utf-8", "replace"), True, max_num_fields=_MAX_FIELDS)
    except ValueError as error:
        message = f"The form has more than {_MAX_FIELDS} fields; give fewer."
        raise RefusedError(message) from error
    return _parse_form(form)


def _parse_form(parts: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Parses the fields of a form."""
    form_fields: dict[str, Any] = {}
    for key, value in parts:
        is_long = isinstance(value, str) and len(value) > SHORT
        part = _parse_long_text(key, value) if is_long else value
        # The openai client sends lists like this.
        name = key.removesuffix("[]")
        is_list = name in PICTURE_FIELDS or (name in SEEDS and name != key)
        name = name if is_list else key
        if name not in form_fields:
            form_fields[name] = [part] if is_list else part
        elif is_list and isinstance(form_fields[name], list):
            form_fields[name].append(part)
        else:
            message = f"{format_value(name)} is given twice; give it once."
            raise RefusedError(message, param=name)
    return _parse_json_fields(form_fields)


def _parse_json_fields(body: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a body, with the values of those that may be JSON text parsed."""
    body |= {key: _parse_json_field(key, body[key]) for key in JSON_FIELDS & {*body}}
    _check_body_values(body)
    return body


def _parse_long_text(key: str, value: str) -> Any:
    """Parses a long text of a form: a data URL or JSON with data URLs."""
    start = value[:100].lstrip()
    if key.removesuffix("[]") in JSON_FIELDS and start[:1] in ("{", "["):
        return _parse_long_json(bytearray(value.encode()), key)
    if start[:5].lower() != "data:":
        refuse_long_text(key)
    chunks = (value[index : index + SHORT] for index in range(0, len(value), SHORT))
    return decode_data_url(key, chunks)


def _read_file_name(text: str) -> str:
    """Returns the last part of a client's path, as far as it is printable."""
    name = text.replace("\\", "/").rpartition("/")[2]
    return "".join(character for character in name if character.isprintable())[-200:]


def _parse_json_field(key: str, value: Any) -> Any:
    """Returns the value of a field, parsed if it is the text of a JSON object or list."""
    if isinstance(value, list):
        return [_parse_json_field(key, item) for item in value]
    if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "["):
        return value
    return _parse_json_text(value.encode(errors="surrogatepass"), key)


def _parse_json_body(content: bytearray) -> dict[str, Any]:
    """Parses a body as a JSON object."""
    if len(content) <= SHORT:
        body = _parse_json_text(bytes(content) or b"{}")
    else:
        body = _parse_long_json(content)
    if not isinstance(body, dict):
        raise RefusedError("The body must be a JSON object or a form.")
    return _parse_json_fields(body)


def _parse_long_json(content: bytearray, key: str | None = None) -> Any:
    """Parses long JSON of the body, or of a field of it; data URLs become bytes."""
    try:
        encoding = json.detect_encoding(content)
        if encoding != "utf-8":
            content = bytearray(content.decode(encoding).encode())
    except ValueError as error:
        why = format_value(str(error))
        subject = "The body" if key is None else key
        raise RefusedError(f"{subject} is no JSON object ({why}).", param=key) from error
    text, files = take_out_files(content, key)
    value = _parse_json_text(text, key)
    _check_body_values({"": value})
    return _put_in_files(value, content, files, key or "")


def _put_in_files(
    value: Any, content: bytearray, files: Mapping[str, tuple[int, int]], key: str
) -> Any:
    """Returns a JSON value with the bytes of its data URLs. key: the field that has the value."""
    if isinstance(value, str) and value in files:
        return decode_data_url(key, iter_json_text(content, *files[value]))
    if isinstance(value, list):
        return [_put_in_files(item, content, files, key) for item in value]
    if isinstance(value, dict):
        return {
            name: _put_in_files(item, content, files, key if name in URL_KEYS else name)
            for name, item in value.items()
        }
    return value


def _parse_json_text(content: bytes, key: str | None = None) -> Any:
    """Parses JSON of the body, or of a field of it."""
    subject = "The body" if key is None else key

    def refuse(word: str) -> NoReturn:
        raise RefusedError(f"{subject} has a number that is not valid JSON: {word}.", param=key)

    try:
        return parse_json(content.decode(json.detect_encoding(content)), refuse)
    except DuplicateNameError as error:
        message = f"{format_value(error.name)} is given twice; give it once."
        raise RefusedError(message, param=error.name if key is None else key) from error
    except RecursionError as error:
        raise RefusedError(TOO_DEEP, param=key) from error
    except ValueError as error:  # Python's message about too many digits is for programmers
        why = "a number has too many digits" if "digits" in str(error) else format_value(str(error))
        raise RefusedError(f"{subject} is no JSON object ({why}).", param=key) from error


def _check_body_values(body: Mapping[str, Any]) -> None:
    """Refuses values that JSON files cannot store: deep nesting and unpaired surrogates."""
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
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
        raise RefusedError(TOO_DEEP)
