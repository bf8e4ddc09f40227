"""The ASGI application of the service, and the checks of each request before its route.

Every check reads the ASGI scope. `request.url` is built from the header `Host`, so that its path
may differ from the one that is routed.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import re
import signal
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from wan.serve.events.sse import MAX_LISTENERS
from wan.serve.http.metrics import Metrics
from wan.serve.http.operations import PATHS_WITHOUT_KEY
from wan.serve.http.routes import Routes
from wan.serve.queue.service import Service
from wan.serve.requests.addresses import Network, is_in_networks, normalize_host, split_host
from wan.serve.requests.refusals import RefusedError
from wan.serve.store.videos import Store, StoreError
from wan.settings.errors import InputError, escape_controls
from wan.utils.log import logger

_DISCARD_SECONDS = 5.0  # seconds in which the rest of a refused body is read


class Guard:
    """ASGI middleware that refuses unknown hosts and origins, wrong keys and large bodies."""

    def __init__(
        self,
        app: ASGIApp,
        hosts: Sequence[str],
        api_key: str | None,
        most_bytes: int,
        is_busy: Callable[[], bool],
        origins: Sequence[str] = (),
        proxies: Sequence[Network] = (),
        root_path: str = "",
    ) -> None:
        """Wraps an application.

        Args:
            hosts: Allowed values of the `Host` header; their ports are ignored.
            api_key: Required token of `Authorization: Bearer`; None: no key is required.
            most_bytes: Maximum size of a body.
            is_busy: Returns whether only /health and /liveness are answered.
            origins: Sites whose pages may send requests.
            proxies: Addresses of clients whose `X-Forwarded-Host` is the host that pages use.
            root_path: Removed from the start of paths; "": that of the ASGI scope.
        """
        self._hosts = frozenset((split_host(host) or [normalize_host(host)])[0] for host in hosts)
        self._origins, self._proxies = frozenset(origins), tuple(proxies)
        self._app, self._key, self._max_bytes = app, api_key, most_bytes
        self._is_busy, self._root_path = is_busy, root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, root = scope["path"], self._root_path or scope.get("root_path", "").rstrip("/")
        if root and f"{path}/".startswith(f"{root}/"):  # the proxy has not removed it
            path = path[len(root) :] or "/"
        if path.endswith("/"):  # a redirect would name the host that a proxy uses
            path = path.rstrip("/") or "/"
        scope = dict(scope) | {"path": path, "raw_path": path.encode(), "root_path": ""}
        request = Request(scope)
        refusal = self._check_request(request)
        if refusal is not None:
            await _discard_body(request, receive)
            await _make_error_response(request, refusal)(scope, receive, send)
            return
        num_bytes = 0

        async def limited_receive() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                if message.get("more_body"):
                    await _discard_body(request, receive)
                raise self._make_too_large_error()
            return message

        has_started = False

        async def tracked_send(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, limited_receive, tracked_send)
        except (FileNotFoundError, StoreError) as error:
            if not has_started:
                raise
            logger.info("A file was not sent as a whole (%s).", error)  # uvicorn disconnects

    def _check_request(self, request: Request) -> RefusedError | None:
        """Returns the refusal of a request, or None."""
        host, path = _read_host(request), request.scope["path"]
        if host is None or not path.startswith("/"):
            return RefusedError("The header Host or the request target is malformed.", 421)
        if host[0] not in self._hosts:
            message = "This host name is not served; start the service with it as --host_name."
            return RefusedError(message, 421)
        if not self._allows_origin(request, host):
            message = "Pages of other sites may not use this service without --origin."
            return RefusedError(message, 403)
        length = request.headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 18 or int(length) > self._max_bytes:
            return self._make_too_large_error()
        if path not in ("/health", "/liveness") and self._is_busy():
            message = "Too many requests are in progress; try again."
            return RefusedError(message, 503, "busy", retry_after=5)
        if self._key is not None and path not in PATHS_WITHOUT_KEY:
            scheme, _, token = request.headers.get("authorization", "").partition(" ")
            token = token.strip() if scheme.lower() == "bearer" else ""
            if not hmac.compare_digest(token.encode(), self._key.encode()):
                return RefusedError("The API key is missing or wrong.", 401, "invalid_api_key")
        return None

    def _allows_origin(self, request: Request, host: tuple[str, str] | None) -> bool:
        """Returns whether a request is of no page, of a page of this service or of --origin.

        host: Name and port of the header `Host`.
        """
        headers = request.headers
        origin = headers.get("origin")
        if origin is None or origin.lower() in self._origins:
            return True
        if headers.get("sec-fetch-site") == "same-origin":  # pages cannot set this header
            return True
        if request.client is not None and is_in_networks(request.client.host, self._proxies):
            forwarded = re.search(r'\bhost="?([^",;\s]+)', headers.get("forwarded", ""), re.I)
            name = headers.get("x-forwarded-host") or (forwarded[1] if forwarded else "")
            host = split_host(name.partition(",")[0].strip()) if name else host
        return host is not None and split_host(origin.partition("://")[2]) == host

    def _make_too_large_error(self) -> RefusedError:
        return RefusedError(f"The body is too large; {self._max_bytes} bytes are allowed.", 413)


def _read_host(request: Request) -> tuple[str, str] | None:
    """Returns name and port of the header `Host`; None if it is malformed or not given once."""
    values = request.headers.getlist("host")
    return split_host(values[0]) if len(values) == 1 else None


async def _discard_body(request: Request, receive: Receive) -> None:
    """Reads a refused body, since clients see the answer only when they have sent the body."""
    headers = request.headers
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    if not has_body or "expect" in headers:  # which waits for an answer before the body
        return
    with suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_SECONDS):
            while (await receive()).get("more_body"):
                pass


def _make_error_response(request: Request, error: Exception) -> Response:
    """Returns an error response in OpenAI's format."""
    headers: dict[str, str] = {}
    should_retry = False
    if isinstance(error, RefusedError):
        status, code, param, message = (
            error.status,
            error.code,
            error.param,
            escape_controls(str(error)),
        )
        headers |= error.headers
        should_retry = error.retry_after is not None
        if error.retry_after is not None:
            headers["Retry-After"] = str(max(round(error.retry_after), 1))
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
    elif isinstance(error, InputError):
        status, code, message = 400, "invalid_request", str(error)
        match = re.fullmatch(r"`?(\w+)`?", error.subject)
        param = None if match is None else error.naming.names.get(match[1], match[1])
    elif isinstance(error, HTTPException):
        status, code, param, message = error.status_code, "http", None, error.detail
        headers.update(error.headers or {})
        if status == 405:
            headers["Allow"] = _list_allowed_methods(request)
    elif isinstance(error, MultiPartException):
        status, code, param, message = 400, "invalid_form", None, error.message
    else:
        status, code, param, message = 500, "internal_error", None, "Internal error."
    message = message.encode(errors="replace").decode()
    param = None if param is None else param.encode(errors="replace").decode()
    headers["x-should-retry"] = "true" if should_retry else "false"
    error_type = "invalid_request_error" if status < 500 else "server_error"
    body = {"error": {"message": message, "type": error_type, "param": param, "code": code}}
    return JSONResponse(body, status, headers)


def _list_allowed_methods(request: Request) -> str:
    """Returns the value of the `Allow` header: the methods of all routes of a path."""
    methods: set[str] = set()
    for route in request.app.routes:
        if route.matches(request.scope)[0] != Match.NONE:
            methods |= route.methods
    return ", ".join(sorted(methods))


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
        """Answers without a thread, as all may be busy."""
        if isinstance(error, ClientDisconnect):  # it is not logged as an error
            logger.debug("A client disconnected from %s.", request.scope["path"])
            return Response(status_code=499)
        return _make_error_response(request, error)

    errors = (RefusedError, InputError, HTTPException, MultiPartException, Exception)
    handlers: dict[Any, Any] = dict.fromkeys((*errors, ClientDisconnect), answer_error)
    routes = Routes(service, metrics, store, max_listeners).list_routes()
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    app.router.redirect_slashes = False
    hosts = (*_LOCAL_HOSTS, host, *names)
    guard = Guard(app, hosts, api_key, most_bytes, is_busy, origins, proxies, root_path)
    if origins:
        return CORSMiddleware(
            guard,
            allow_origins=origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=_EXPOSED_HEADERS,
        )
    return guard
