"""The ASGI application of the service."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from wan.serve.addresses import Network
from wan.serve.events import MAX_LISTENERS
from wan.serve.guard import Guard
from wan.serve.metrics import Metrics
from wan.serve.repeats import RefusedError
from wan.serve.responses import answer_disconnect, make_error_response
from wan.serve.root_path import RootPath
from wan.serve.routes import Routes
from wan.serve.service import Service
from wan.serve.store import Store
from wan.settings.errors import InputError
from wan.utils.log import logger

_EXPOSED_HEADERS = (
    *("ETag", "Content-Range", "Retry-After", "openai-poll-after-ms", "x-should-retry"),
    *("X-Request-Id", "X-Model", "X-Inference-Time-S", "X-Stage-Durations", "X-Peak-Memory-MB"),
)
"""Headers that pages of other sites may read."""
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")


def _stop_if_ended(task: asyncio.Task[None]) -> None:
    """Ends the process if the service has ended, so that a supervisor can restart it."""
    if task.cancelled():
        return
    if task.exception() is not None:
        logger.error("The service has failed.", exc_info=task.exception())
    os.kill(os.getpid(), signal.SIGTERM)


def make_app(
    service: Service,
    metrics: Metrics,
    *,
    host: str,
    names: Sequence[str] = (),
    origins: Sequence[str] = (),
    proxies: Sequence[Network] = (),
    api_key: str | None = None,
    most_bytes: int = 64_000_000,
    is_busy: Callable[[], bool] = lambda: False,
    store: Store | None = None,
    max_listeners: int = MAX_LISTENERS,
    root_path: str = "",
) -> ASGIApp:
    """Returns the ASGI application.

    Args:
        service: Started and stopped with the application.
        metrics: Shown by /metrics.
        host: The address that the server listens on.
        names: Further allowed host names.
        origins: Sites whose pages may use the service.
        proxies: Addresses of proxies whose `X-Forwarded-Host` is believed.
        api_key: Required from requests; None: no key is required.
        most_bytes: Maximum size of a request body.
        is_busy: Returns whether only /health and /liveness are answered.
        store: Has the videos that were uploaded.
        max_listeners: Maximum of open streams of events.
        root_path: Path below which a proxy serves the application, such as `/wan`.
    """
    service.root_path = root_path

    @asynccontextmanager
    async def lifespan(_: Starlette) -> Any:
        running = asyncio.create_task(service.serve_forever())
        running.add_done_callback(_stop_if_ended)
        try:
            yield
        finally:
            await service.stop()
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

    async def answer_error(request: Request, error: Exception) -> Response:
        is_gone = isinstance(error, ClientDisconnect)  # without a thread, as all may be busy
        return (answer_disconnect if is_gone else make_error_response)(request, error)

    errors = (RefusedError, InputError, HTTPException, MultiPartException, Exception)
    handlers: dict[Any, Any] = dict.fromkeys((*errors, ClientDisconnect), answer_error)
    routes = Routes(service, metrics, store, max_listeners).list_routes()
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    app.router.redirect_slashes = False
    hosts = (*_LOCAL_HOSTS, host, *names)
    guarded: ASGIApp = Guard(app, hosts, api_key, most_bytes, is_busy, origins, proxies)
    if origins:
        guarded = CORSMiddleware(
            guarded,
            allow_origins=origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=_EXPOSED_HEADERS,
        )
    return RootPath(guarded, root_path)
