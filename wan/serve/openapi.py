"""The OpenAPI 3.1 description of the service, made from the table of its fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wan.serve.request_schema import DATA_URL, RequestSchema, Schema
from wan.utils.version import __version__

_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "schema": {"type": "string"},
    "description": "A repeated request with this key gets the video of the first one; without "
    "a key every request makes a new video.",
}
_URLS = ("image_url", "video_url", "audio_url", "url")
_STATES = ("queued", "in_progress", "completed", "failed")
_VARIANTS = {"enum": ["video", "thumbnail", "spritesheet", "preview"]}
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
_CREATION_ERRORS = ("400", "413", "422", "429", "503", "507")


def make_openapi(request: RequestSchema) -> Schema:
    """Returns the description of all routes.

    request: Fields of a request.
    """
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Wan2.2 videos",
            "version": __version__,
            "description": "Defaults are those that the service was started with. Fields that are "
            "null count as left out. Unknown fields are refused.",
        },
        "paths": _list_paths(request) | _list_state_paths(),
        "components": {
            "schemas": _list_components(request),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _list_paths(request: RequestSchema) -> dict[str, Schema]:
    """Returns the routes of videos."""
    video, body = _answer("A video.", "Video"), _make_body(request)
    return {
        "/v1/videos": {
            "post": _operation("createVideo", "Queue a video", video, _CREATION_ERRORS, body)
            | {"parameters": [_KEY]},
            "get": _operation("listVideos", "List videos", _answer("Videos.", "Videos"), ("400",))
            | {"parameters": _list_query_parameters()},
        },
        "/v1/videos/{id}": {
            "parameters": [_ID],
            "get": _operation("getVideo", "Return a video", video, ("404",)),
            "delete": _operation(
                "deleteVideo", "Delete a video, or cancel it", _answer("Deleted.", "DeletedVideo"),
                ("404",),
            ),
        },
        "/v1/videos/{id}/content": {
            "parameters": [_ID],
            "get": _operation(
                "getContent", "Download a video or a picture of it", _file("video/mp4"),
                ("400", "404", "410", "416"),
            )
            | {"parameters": [_query("variant", _VARIANTS), _query("index", _COUNT)]},
        },
        "/v1/videos/{id}/events": {
            "parameters": [_ID],
            "get": _operation(
                "streamEvents", "Stream the progress", _file("text/event-stream"), ("404", "503")
            ),
        },
        "/v1/videos/{id}/inputs/{field}": {
            "parameters": [_ID, _ID | {"name": "field"}],
            "get": _operation(
                "getInput",
                "Download an uploaded file of a request",
                _file("application/octet-stream"),
                ("404",),
            )
            | {"parameters": [_query("index", _COUNT)]},
        },
        "/v1/videos/{id}/remix": {
            "parameters": [_ID],
            "post": _operation(
                "remixVideo",
                "Queue a video with the same settings and files and another prompt",
                video,
                (*_CREATION_ERRORS, "404"),
                {
                    "application/json": {
                        "schema": {
                            "type": "object",
                            "properties": {
                                name: request.properties[name] for name in ("prompt", "webhook_url")
                            },
                            "required": ["prompt"],
                        }
                    }
                },
            ),
        },
        "/v1/videos/sync": {
            "post": _operation(
                "createVideoAndWait", "Wait for a video", _file("video/mp4"),
                (*_CREATION_ERRORS, "500"), body,
            )
            | {"parameters": [_KEY]},
        },
    }  # fmt: skip


def _list_state_paths() -> dict[str, Schema]:
    """Returns the routes of the service's state."""
    health = _operation("getHealth", "State of the service", _answer("Ready.", "Health"), ())
    health["responses"]["503"] = _answer("Not ready.", "Health")["200"]
    models = _operation("listModels", "Names of the loaded model", _answer("Names.", "Models"), ())
    loras = _operation("listLoras", "LoRAs that requests may name", _answer("LoRAs.", "Loras"), ())
    return {"/v1/models": {"get": models}, "/v1/loras": {"get": loras}, "/health": {"get": health}}


def _operation(
    name: str,
    summary: str,
    answers: Mapping[str, Any],
    errors: tuple[str, ...],
    content: Mapping[str, Any] | None = None,
) -> Schema:
    """Returns an operation.

    Args:
        content: Media type -> schema of the body; None: no body.
    """
    refusals = {
        code: {"description": _ERROR_CODES[code]} | _make_json_content("Error")
        for code in sorted({*errors, "401"} - ({"401"} if name == "getHealth" else set()))
    }
    operation = {
        "operationId": name,
        "summary": summary,
        "responses": dict(answers) | refusals,
    }
    if content is not None:
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _make_json_content(component: str) -> Schema:
    schema = {"$ref": f"#/components/schemas/{component}"}
    return {"content": {"application/json": {"schema": schema}}}


def _answer(description: str, component: str) -> Schema:
    """Returns the answer 200 with a JSON object."""
    return {"200": {"description": description} | _make_json_content(component)}


def _file(media_type: str) -> Schema:
    """Returns the answer 200 with a file."""
    return {"200": {"description": "The file.", "content": {media_type: {}}}}


def _query(name: str, schema: Schema) -> Schema:
    return {"name": name, "in": "query", "schema": schema}


def _list_query_parameters() -> list[Schema]:
    """Returns the parameters of the list of videos."""
    return [
        _query("after", _TEXT),
        _query("limit", {"type": "integer", "minimum": 0, "maximum": 100, "default": 20}),
        _query("order", {"enum": ["asc", "desc"], "default": "desc"}),
        _query("status", _TEXT)
        | {
            "description": "only these, separated by commas: queued, in_progress, completed, failed"
        },
        _query("search", _TEXT) | {"description": "only videos with all of these words"},
    ]


def _make_body(request: RequestSchema) -> Schema:
    """Returns the bodies of a request: JSON, or a form with files."""
    form = {
        name: {"contentMediaType": "application/octet-stream"} if name in request.files else entry
        for name, entry in request.properties.items()
    }
    encoding = {name: {"contentType": media} for name, media in request.files.items()}
    schema = {"type": "object", "properties": form, "required": [*request.required]}
    return {
        "application/json": {"schema": {"$ref": "#/components/schemas/VideoRequest"}},
        "multipart/form-data": {"schema": schema, "encoding": encoding},
    }


def _list_components(request: RequestSchema) -> dict[str, Schema]:
    """Returns the schemas of requests and answers."""
    one_url = [{"required": [key], "properties": {key: DATA_URL}} for key in _URLS]
    error = {"message": _TEXT, "type": _TEXT, "param": _nullable(_TEXT), "code": _nullable(_TEXT)}
    page = {"data": {"type": "array", "items": {"$ref": "#/components/schemas/Video"}}}
    page |= {"has_more": {"type": "boolean"}}
    page |= {"first_id": _nullable(_TEXT), "last_id": _nullable(_TEXT)}
    model = _make_object({"id": _TEXT, "object": {"const": "model"}})
    return {
        "VideoRequest": {
            "type": "object",
            "properties": request.properties,
            "required": [*request.required],
            "additionalProperties": False,
        },
        "FileReference": {
            "description": "a base64 data URL, also in an object",
            "anyOf": [DATA_URL, {"type": "object", "maxProperties": 1, "anyOf": one_url}],
        },
        "Video": _make_object(_list_video_properties()),
        "Videos": _make_object({"object": {"const": "list"}, **page}),
        "DeletedVideo": _make_object(
            {"id": _TEXT, "object": {"const": "video.deleted"}, "deleted": {"const": True}}
        ),
        "Models": _make_object(
            {"object": {"const": "list"}, "data": {"type": "array", "items": model}}
        ),
        "Loras": _make_object(
            {
                "object": {"const": "list"},
                "data": {"type": "array", "items": _make_object({"name": _TEXT})},
            }
        ),
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
        "Error": _make_object({"error": _make_object(error)}),
    }


def _list_video_properties() -> dict[str, Schema]:
    """Returns the properties that every video has."""
    return {
        "id": _TEXT,
        "object": {"const": "video"},
        "model": _TEXT,
        "status": {"enum": [*_STATES]},
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
                    "status": {"enum": [*_STATES]},
                    "file_name": _nullable(_TEXT),
                    "url": _nullable(_TEXT),
                }
            ),
        },
        "request": {"type": "object", "description": "the fields of the request without files"},
        "inputs": {
            "type": "object",
            "description": "number of uploaded files by field",
            "additionalProperties": _COUNT,
        },
    }


def _nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _make_object(properties: Mapping[str, Schema]) -> Schema:
    """Returns the schema of an answer: an object with at least these properties."""
    return {"type": "object", "properties": properties, "required": [*properties]}
