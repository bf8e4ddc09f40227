"""Routes of the web page, and of the OpenAPI description from which it makes its form."""

from __future__ import annotations

import json
from functools import cache, partial
from importlib import resources
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from wan.serve.openapi import make_openapi
from wan.serve.request_schema import make_request_schema

if TYPE_CHECKING:
    from wan.serve.service import Service

_MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
PAGE_FILES = ("page.css", "page.js", "form.js", "videos.js", "api.js")
"""Files of the page `page.html`; like the page they are sent without an API key."""
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' blob: data:; media-src 'self' blob:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def list_page_routes(service: Service) -> list[Route]:
    """Returns the routes of the page and of /openapi.json."""

    @cache
    def render_openapi() -> bytes:
        limits = service.limits
        schema = make_request_schema(
            service.startup_run, service.models, limits.frames, limits.prompt
        )
        return json.dumps(make_openapi(schema), ensure_ascii=False).encode()

    async def serve_openapi(_: Request) -> Response:
        return Response(render_openapi(), media_type="application/json")

    async def serve_file(name: str, _: Request) -> Response:
        content = resources.files("wan.serve").joinpath("page", name).read_text("utf-8")
        media_type = _MEDIA_TYPES[name.rpartition(".")[2]]
        return Response(content, media_type=media_type, headers=_HEADERS)

    return [
        Route("/openapi.json", serve_openapi),
        Route("/", partial(serve_file, "page.html")),
        *(Route(f"/{name}", partial(serve_file, name)) for name in PAGE_FILES),
    ]
