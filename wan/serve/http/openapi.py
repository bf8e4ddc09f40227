"""The OpenAPI 3.1 description of the service, made from the table of its fields."""

from __future__ import annotations

import re
from collections.abc import Mapping

from wan.serve.http.operations import OPERATIONS, Operation
from wan.serve.jobs.job import STATES
from wan.serve.requests.schema import DATA_URL, RequestSchema, Schema
from wan.utils.version import __version__

_URLS = ("image_url", "video_url", "audio_url", "url")
_NUMBER, _TEXT = {"type": "number"}, {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}
_ERROR_CODES = {
    "400": "A field is unknown, missing or not allowed; `param` names it.",
    "401": "The API key is missing or wrong.",
    "404": "There is no such video, or it is not ready.",
    "410": "The file of the video is gone.",
    "413": "The body is too large.",
    "416": "No byte of the range exists.",
    "422": "The Idempotency-Key belongs to another request.",
    "429": "The queue is full.",
    "500": "The video has failed.",
    "503": "The service cannot take jobs now.",
    "507": "The disk is full.",
}


def make_openapi(
    request: RequestSchema, root_path: str = "", has_random_weights: bool = False
) -> Schema:
    """Returns the description of all routes.

    Args:
        request: Fields of a request.
        root_path: Path below which the routes are served.
        has_random_weights: Whether the videos are noise.
    """
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Wan2.2 videos",
            "version": __version__,
            "description": "Defaults are those that the service was started with. Fields that are "
            "null count as left out. Unknown fields are refused."
            + " The weights are random, so videos are noise."
            * has_random_weights,
            "x-random-weights": has_random_weights,
        },
        "servers": [{"url": root_path or "/"}],
        "paths": _list_paths(request),
        "components": {
            "schemas": _list_bodies(request) | _list_components(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _list_paths(request: RequestSchema) -> dict[str, Schema]:
    """Returns the routes with their methods."""
    paths: dict[str, Schema] = {}
    for operation in OPERATIONS:
        entry = paths.setdefault(operation.path, {})
        if names := re.findall(r"{(\w+)}", operation.path):
            entry["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names
            ]
        described = _describe_operation(operation, request)
        entry[operation.method.lower()] = described
        if operation.method == "GET":
            entry["head"] = _describe_head(described)
    return paths


def _describe_operation(operation: Operation, request: RequestSchema) -> Schema:
    """Returns the description of a method of a route."""
    codes = sorted({*operation.errors, *(("401",) if operation.needs_key else ())})
    answer: Schema = {"description": "The file.", "content": {operation.answer: {}}}
    if "/" not in operation.answer:
        answer = {"description": "The answer."} | _make_json_content(operation.answer)
    refusal = _make_json_content(operation.error_answer)
    entry: Schema = {
        "operationId": operation.id,
        "summary": operation.summary,
        "responses": {"200": answer}
        | {code: {"description": _ERROR_CODES[code]} | refusal for code in codes},
    }
    if operation.parameters:
        entry["parameters"] = [*operation.parameters]
    if operation.body is not None:
        entry["requestBody"] = {"required": True, "content": _make_body(operation.body, request)}
    return entry if operation.needs_key else entry | {"security": []}


def _describe_head(entry: Schema) -> Schema:
    """Returns the description of HEAD, which answers as GET does and without a body."""
    name = entry["operationId"]
    answers = {
        code: {"description": answer["description"]} for code, answer in entry["responses"].items()
    }
    return entry | {"operationId": f"head{name[:1].upper()}{name[1:]}", "responses": answers}


def _make_json_content(component: str) -> Schema:
    schema = {"$ref": f"#/components/schemas/{component}"}
    return {"content": {"application/json": {"schema": schema}}}


def _make_body(component: str, request: RequestSchema) -> Schema:
    """Returns the bodies of a request: JSON, or a form, whose files are sent as they are."""
    schema = _list_bodies(request)[component]
    form = {
        name: {"contentMediaType": "application/octet-stream"} if name in request.files else entry
        for name, entry in schema["properties"].items()
    }
    encoding = {
        name: {"contentType": media} for name, media in request.files.items() if name in form
    }
    return dict(_make_json_content(component)["content"]) | {
        "multipart/form-data": {"schema": schema | {"properties": form}, "encoding": encoding}
    }


def _list_bodies(request: RequestSchema) -> dict[str, Schema]:
    """Returns the schemas of requests."""
    video = request.make_object_schema()
    remix = {name: request.properties[name] for name in ("prompt", "webhook_url")}
    return {
        "VideoRequest": video,
        "RemixRequest": {
            "type": "object",
            "properties": remix,
            "required": ["prompt"],
            "additionalProperties": False,
        },
    }


def _list_components() -> dict[str, Schema]:
    """Returns the schemas of answers, and of files in requests."""
    one_url = [{"required": [key], "properties": {key: DATA_URL}} for key in _URLS]
    error = {"message": _TEXT, "type": _TEXT, "param": _nullable(_TEXT), "code": _nullable(_TEXT)}
    page = {"data": {"type": "array", "items": {"$ref": "#/components/schemas/Video"}}}
    page |= {"has_more": {"type": "boolean"}}
    page |= {"first_id": _nullable(_TEXT), "last_id": _nullable(_TEXT)}
    return {
        "FileReference": {
            "description": "a base64 data URL, also in an object",
            "anyOf": [DATA_URL, {"type": "object", "maxProperties": 1, "anyOf": one_url}],
        },
        "Video": _make_object(_list_video_properties()),
        "Videos": _make_object({"object": {"const": "list"}, **page}),
        "DeletedVideo": _make_object(
            {"id": _TEXT, "object": {"const": "video.deleted"}, "deleted": {"const": True}}
        ),
        "Models": _make_list(_make_object({"id": _TEXT, "object": {"const": "model"}})),
        "Loras": _make_list(_make_object({"name": _TEXT})),
        "Health": _make_object(
            {
                "status": _TEXT,
                "queued": _COUNT,
                "running": _COUNT,
                "reason": _nullable(_TEXT),
                "restarts": _COUNT,
                "seconds_ahead": _NUMBER,
            }
        ),
        "Liveness": _make_object({"status": {"const": "ok"}}),
        "Description": _make_object({"openapi": _TEXT, "paths": {"type": "object"}}),
        "Error": _make_object({"error": _make_object(error)}),
    }


def _make_list(item: Schema) -> Schema:
    """Returns the schema of a list that comes as a whole."""
    return _make_object({"object": {"const": "list"}, "data": {"type": "array", "items": item}})


def _list_video_properties() -> dict[str, Schema]:
    """Returns the properties that every video has."""
    return {
        "id": _TEXT,
        "object": {"const": "video"},
        "model": _TEXT,
        "status": {"enum": [*STATES]},
        "progress": _COUNT | {"maximum": 100},
        "created_at": _COUNT,
        "completed_at": _nullable(_COUNT),
        "expires_at": _nullable(_COUNT),
        "error": _nullable(_make_object({"code": _TEXT, "message": _TEXT})),
        "prompt": _nullable(_TEXT),
        "remixed_from_video_id": _nullable(_TEXT),
        "seconds": _TEXT,
        "size": _TEXT,
        "num_frames": _COUNT,
        "fps": _NUMBER,
        "seed": _nullable({"type": "integer"}),
        "guidance": _nullable({"type": "object", "additionalProperties": _NUMBER}),
        "steps": {"type": "array", "items": _COUNT, "minItems": 2, "maxItems": 2},
        "attempt": _COUNT,
        "data": {
            "type": "array",
            "description": "each video of the request",
            "items": _make_object(
                {
                    "index": _COUNT,
                    "seed": _nullable({"type": "integer"}),
                    "status": {"enum": [*STATES]},
                    "file_name": _nullable(_TEXT),
                    "url": _nullable(_TEXT),
                    "stream_url": _nullable(_TEXT),
                }
            ),
        },
        "request": {"type": "object", "description": "the fields of the request without files"},
        "inputs": {
            "type": "object",
            "description": "number of uploaded files by field",
            "additionalProperties": _COUNT,
        },
        "input_names": {
            "type": "object",
            "description": "names of uploaded files by field, null where a file has none",
            "additionalProperties": {"type": "array", "items": _nullable(_TEXT)},
        },
    }


def _nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _make_object(properties: Mapping[str, Schema]) -> Schema:
    """Returns the schema of an answer: an object with at least these properties."""
    return {"type": "object", "properties": properties, "required": [*properties]}
