"""Handlers of the web page, and of the OpenAPI description from which it makes its form."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from functools import cache, partial
from importlib import resources
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from wan.serve.openapi import make_openapi
from wan.serve.operations import MEDIA_TYPES, PAGE_FILES, make_page_operation
from wan.serve.request_schema import make_request_schema

if TYPE_CHECKING:
    from wan.serve.service import Service

RouteHandler = Callable[[Request], Awaitable[Response]]
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' blob: data:; media-src 'self' blob:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def make_page_handlers(service: Service) -> dict[str, RouteHandler]:
    """Returns the handlers of the page and of /openapi.json by the ids of their operations."""

    @cache
    def render_openapi() -> bytes:
        limits = service.limits
        schema = make_request_schema(
            service.startup_run, service.models, limits.frames, limits.prompt
        )
        return json.dumps(make_openapi(schema), ensure_ascii=False).encode()

    async def send_openapi(_: Request) -> Response:
        return Response(render_openapi(), media_type="application/json")

    return {"getOpenapi": send_openapi} | {
        make_page_operation(name).id: partial(_send_file, name)
        for name in ("page.html", *PAGE_FILES)
    }


async def _send_file(name: str, _: Request) -> Response:
    """Answers with a file of the page."""
    content = resources.files("wan.serve").joinpath("page", name).read_text("utf-8")
    media_type = MEDIA_TYPES[name.rpartition(".")[2]]
    return Response(content, media_type=media_type, headers=_HEADERS)
