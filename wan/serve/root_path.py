"""The path below which a proxy serves the service, as `--root_path` of uvicorn and FastAPI."""

from __future__ import annotations

import re
from functools import partial

from starlette.types import ASGIApp, Receive, Scope, Send

from wan.serve.operations import OPERATIONS
from wan.settings.errors import InputError
from wan.settings.values import Reader, format_value


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


class RootPath:
    """ASGI middleware that removes the root path, if the proxy has not removed it."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app, self._root_path = app, root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            root_path = self._root_path or scope.get("root_path", "").rstrip("/")
            path = scope["path"]
            if root_path and f"{path}/".startswith(f"{root_path}/"):
                path = path[len(root_path) :] or "/"
            scope = dict(scope) | {"path": path, "raw_path": path.encode(), "root_path": ""}
        await self._app(scope, receive, send)
