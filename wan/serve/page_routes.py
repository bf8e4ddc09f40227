"""Handlers of the web page, and of the OpenAPI description from which it makes its form."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from functools import cache, partial
from importlib import resources
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from wan.app.notices import has_random_weights
from wan.serve.openapi import make_openapi
from wan.serve.operations import MEDIA_TYPES, PAGE_FILES, make_page_operation
from wan.serve.request_schema import make_request_schema

if TYPE_CHECKING:
    from wan.serve.service import Service

RouteHandler = Callable[[Request], Awaitable[Response]]
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' blob: data:; media-src 'self' blob:; connect-src 'self'; base-uri 'self'; "
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
        is_random = has_random_weights(service.startup_run)
        document = make_openapi(schema, service.root_path, is_random)
        return json.dumps(document, ensure_ascii=False).encode()

    async def send_openapi(_: Request) -> Response:
        return Response(render_openapi(), media_type="application/json")

    handlers: dict[str, RouteHandler] = {"getOpenapi": send_openapi}
    return handlers | {
        make_page_operation(name).id: partial(_send_file, name, service)
        for name in ("page.html", *PAGE_FILES)
    }


async def _send_file(name: str, service: Service, _: Request) -> Response:
    """Answers with a file of the page, whose addresses are relative."""
    content = resources.files("wan.serve").joinpath("page", name).read_text("utf-8")
    if name == "page.html" and service.root_path:  # /wan and /wan/ are the same page
        content = content.replace("<head>", f'<head>\n<base href="{service.root_path}/">', 1)
    media_type = MEDIA_TYPES[name.rpartition(".")[2]]
    return Response(content, media_type=media_type, headers=_HEADERS)
