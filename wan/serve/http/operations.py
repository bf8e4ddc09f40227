"""All routes of the service. The application and /openapi.json are made from `OPERATIONS`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

from wan.settings.errors import InputError
from wan.settings.values import Reader, format_value

_PARAMETER = dict[str, Any]
_TEXT = {"type": "string"}
_INDEX = {"name": "index", "in": "query", "schema": {"type": "integer", "minimum": 0}}
_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "schema": _TEXT,
    "description": "A repeated request with this key gets the video of the first one; without "
    "a key every request makes a new video.",
}
_CREATION_ERRORS = ("400", "413", "422", "429", "503", "507")
PAGE_FILES = ("page.css", "page.js", "form.js", "videos.js", "api.js")
"""Files of the page `page.html`; like the page they are sent without an API key."""
MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
"""Suffix of a file of the page -> its media type."""


@dataclass(frozen=True)
class Operation:
    """A method of a route.

    Attributes:
        path: With the parameters in braces.
        id: The `operationId`, by which `Routes` finds the handler.
        answer: Schema of the JSON answer in the components of the document, or its media type.
        errors: Status codes of refusals.
        body: Schema of the fields of the request in the components; None: it has no body.
        parameters: Parameters of the query and headers.
        needs_key: Whether a service with an API key requires it.
        error_answer: Schema of the answer for `errors`.
    """

    method: str
    path: str
    id: str
    summary: str
    answer: str
    errors: tuple[str, ...] = ()
    body: str | None = None
    parameters: tuple[_PARAMETER, ...] = ()
    needs_key: bool = True
    error_answer: str = "Error"


def make_page_operation(name: str) -> Operation:
    """Returns the operation that sends a file of the page."""
    path = "/" if name == "page.html" else f"/{name}"
    operation_id = f"get_{name.replace('.', '_')}"
    media_type = MEDIA_TYPES[name.rpartition(".")[2]]
    return Operation("GET", path, operation_id, "A file of the page", media_type, needs_key=False)


_LIST_PARAMETERS = (
    {"name": "after", "in": "query", "schema": _TEXT},
    {
        "name": "limit",
        "in": "query",
        "schema": {"type": "integer", "minimum": 0, "maximum": 100, "default": 20},
    },
    {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"], "default": "desc"}},
    {
        "name": "status",
        "in": "query",
        "schema": _TEXT,
        "description": "only these, separated by commas: queued, in_progress, completed, failed",
    },
    {
        "name": "search",
        "in": "query",
        "schema": _TEXT,
        "description": "only videos with all of these words",
    },
)
_VARIANT = {
    "name": "variant",
    "in": "query",
    "schema": {"enum": ["video", "thumbnail", "spritesheet", "preview"]},
}
_STREAM = {
    "name": "stream",
    "in": "query",
    "schema": {"type": "boolean", "default": False},
    "description": "send a video that is being made as it grows, without ranges",
}

OPERATIONS = (
    Operation(
        "POST", "/v1/videos", "createVideo", "Queue a video", "Video",
        _CREATION_ERRORS, "VideoRequest", (_KEY,),
    ),
    Operation(
        "GET", "/v1/videos", "listVideos", "List videos", "Videos",
        ("400",), parameters=_LIST_PARAMETERS,
    ),
    Operation(
        "POST", "/v1/videos/sync", "createVideoAndWait", "Wait for a video", "video/mp4",
        (*_CREATION_ERRORS, "500"), "VideoRequest", (_KEY,),
    ),
    Operation("GET", "/v1/videos/{id}", "getVideo", "Return a video", "Video", ("404",)),
    Operation(
        "DELETE", "/v1/videos/{id}", "deleteVideo", "Delete a video, or cancel it",
        "DeletedVideo", ("404",),
    ),
    Operation(
        "GET", "/v1/videos/{id}/content", "getContent", "Download a video or a picture of it",
        "video/mp4", ("400", "404", "410", "416", "500", "503"),
        parameters=(_VARIANT, _INDEX, _STREAM),
    ),
    Operation(
        "GET", "/v1/videos/{id}/archive", "getArchive",
        "Download videos, saved latents, the video object and the uploaded files as one zip",
        "application/zip", ("404", "410"),
    ),
    Operation(
        "GET", "/v1/videos/{id}/events", "streamEvents", "Stream the progress",
        "text/event-stream", ("404", "503"),
    ),
    Operation(
        "GET", "/v1/videos/{id}/inputs/{field}", "getInput",
        "Download an uploaded file of a request", "application/octet-stream",
        ("404", "410", "416"), parameters=(_INDEX,),
    ),
    Operation(
        "POST", "/v1/videos/{id}/remix", "remixVideo",
        "Queue a video with the same settings and files and another prompt", "Video",
        (*_CREATION_ERRORS, "404"), "RemixRequest", (_KEY,),
    ),
    Operation("GET", "/v1/models", "listModels", "Names of the loaded model", "Models"),
    Operation("GET", "/v1/loras", "listLoras", "LoRAs that requests may name", "Loras"),
    Operation(
        "GET", "/health", "getHealth", "State of the service", "Health",
        ("503",), needs_key=False, error_answer="Health",
    ),
    Operation(
        "GET", "/liveness", "getLiveness", "Whether the HTTP process answers", "Liveness",
        needs_key=False,
    ),
    Operation("GET", "/metrics", "getMetrics", "Metrics for Prometheus", "text/plain"),
    Operation("GET", "/openapi.json", "getOpenapi", "This description", "Description"),
    *map(make_page_operation, ("page.html", *PAGE_FILES)),
)  # fmt: skip
"""The routes, in the order in which they are tried; each GET also answers HEAD."""
PATHS_WITHOUT_KEY = tuple(operation.path for operation in OPERATIONS if not operation.needs_key)
"""Paths that are answered without an API key."""


@partial(Reader, metavar="PATH")
def read_root_path(name: str, raw: object) -> str:
    """Reads a path such as `/wan`; returns it without a slash at its end."""
    text = str(raw).rstrip("/")
    if text and re.fullmatch(r"(/(?!\.{1,2}(/|$))[\w.~-]+)+", text, re.ASCII) is None:
        why = "must be a path of letters, digits, -, _, . and ~, such as /wan"
        raise InputError(name, format_value(raw), why, "give the path that the proxy serves")
    first_names = {operation.path.split("/")[1] for operation in OPERATIONS} - {""}
    if text and text.split("/")[1] in first_names:
        why = "begins as a path of the service itself"
        raise InputError(name, format_value(raw), why, "serve it below another path, such as /wan")
    return text
