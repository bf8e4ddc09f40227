"""Reads the body of a request: a form or a JSON object."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from starlette.datastructures import UploadFile
from starlette.requests import Request

from wan.serve.fields import JSON_FIELDS, PICTURE_FIELDS, SEEDS
from wan.serve.job_files import UploadedFile
from wan.serve.repeats import RefusedError
from wan.settings.json_text import DuplicateNameError, parse_json
from wan.settings.values import format_value
from wan.settings.video_options import MAX_REFERENCE_IMAGES

_MAX_DEPTH = 8  # nesting levels of a body; lists of image references need four
_TOO_DEEP = f"The body is nested too deeply; give at most {_MAX_DEPTH} levels."


async def read_body(request: Request) -> dict[str, Any]:
    """Reads the fields of a form or of a JSON object; files become bytes."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type in ("multipart/form-data", "application/x-www-form-urlencoded"):
        try:
            body = await _read_form(request)
        except ValueError as error:  # from decoding or from the form parser
            raise RefusedError(f"The form cannot be read ({format_value(str(error))}).") from error
    else:
        body = _parse_json_body(await request.body() or b"{}")
    body |= {key: _parse_json_field(key, body[key]) for key in JSON_FIELDS & {*body}}
    _check_body_values(body)
    return body


async def _read_form(request: Request) -> dict[str, Any]:
    """Reads the fields of a form."""
    form_fields: dict[str, Any] = {}
    max_parts = 8 + MAX_REFERENCE_IMAGES
    # `Guard` limits the size of the body.
    async with request.form(max_files=max_parts, max_fields=100, max_part_size=sys.maxsize) as form:
        for key, value in form.multi_items():
            part: Any = value
            if isinstance(value, UploadFile):
                part = UploadedFile(await value.read())
                part.name = _read_file_name(value.filename or "")
            if isinstance(value, UploadFile) and not value.filename and not part:
                continue  # a file input without a file
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
    return form_fields


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


def _parse_json_body(content: bytes) -> dict[str, Any]:
    """Parses a body as a JSON object."""
    body = _parse_json_text(content)
    if not isinstance(body, dict):
        raise RefusedError("The body must be a JSON object or a form.")
    return body


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
        raise RefusedError(_TOO_DEEP, param=key) from error
    except ValueError as error:  # Python's message about too many digits is for programmers
        why = "a number has too many digits" if "digits" in str(error) else format_value(str(error))
        raise RefusedError(f"{subject} is no JSON object ({why}).", param=key) from error


def _check_body_values(body: Mapping[str, Any]) -> None:
    """Refuses values that JSON files cannot store: deep nesting and unpaired surrogates."""
    level: list[Any] = [body]
    for _ in range(_MAX_DEPTH):
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
        raise RefusedError(_TOO_DEEP)
