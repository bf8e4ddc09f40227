"""Sends the end of each job to the webhook of its request, signed, until it is received."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import random
import re
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import SplitResult, urlsplit

import wan
from wan.serve.events.video_object import make_end_object
from wan.serve.jobs.job import ServiceJob
from wan.serve.queue.deliveries import DeliveryKind, PostponedError
from wan.serve.queue.service import Service
from wan.serve.requests.webhook_hosts import WebhookHosts, normalize_address
from wan.utils.log import RareMessages, logger
from wan.utils.threads import DaemonThreads

GIVE_UP_SECONDS = 3 * 86400.0
"""Seconds after the end of a job in which its event is sent again."""
SEND_SECONDS = 15.0
"""Seconds from the start of a delivery to the status of its answer."""
_DRAIN_SECONDS = 1.0  # seconds to read the rest of an answer, which has no meaning
_MAX_ANSWER = 1 << 16  # bytes of an answer that are read
_LONGEST_PAUSE = 3600.0  # seconds between two attempts
_CONNECT_SECONDS = 2.0  # seconds for a connection to an address, if the host has others
_MAX_SENDING = 16  # deliveries at the same time
_MAX_PER_HOST = 4  # deliveries to one host, and to one port of an address
_MAX_PER_ADDRESS = 8
_PORTS = {"http": 80, "https": 443}
_DELIVERY_ERRORS = (OSError, ValueError, EOFError, asyncio.LimitOverrunError)

_log = logger.getChild("webhooks")
_log.addFilter(RareMessages())


class Webhooks:
    """Delivers the events of ended jobs: each at least once, those of a job in order.

    Open deliveries are in the journal.
    """

    def __init__(
        self,
        service: Service,
        secret: bytes,
        hosts: WebhookHosts,
        on_attempt: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Adds the deliveries to those that the service carries out.

        Args:
            secret: Key of the signatures, from `read_signing_key`.
            hosts: Checked for each delivery.
            on_attempt: Called with "delivered", "repeated" or "given_up", for metrics.
        """
        self._service, self._secret, self._hosts = service, secret, hosts
        self._on_attempt = on_attempt
        self._tls, self._resolver = ssl.create_default_context(), _Resolver()
        # Deliveries in progress by address and port (0: all ports).
        self._addresses: Counter[tuple[str, int]] = Counter()
        service.deliveries.kinds["webhook"] = DeliveryKind(
            self._deliver, _MAX_SENDING, _MAX_PER_HOST, _LONGEST_PAUSE
        )

    async def _deliver(self, job: ServiceJob) -> bool:
        """Sends the event of a job once; returns whether it was delivered or given up."""
        url, journal = job.webhook_url or "", self._service.journal
        host, why = urlsplit(url).netloc, await self._send(job, url)
        if why is None:
            self._on_attempt("delivered")
        elif why == "status 410" or journal.is_older(job.id, GIVE_UP_SECONDS):
            logger.error("The event of %s was not delivered to %s (%s).", job.id, host, why)
            self._on_attempt("given_up")
        else:
            _log.warning("The event of %s is sent to %s again (%s).", job.id, host, why)
            self._on_attempt("repeated")
            return False
        journal.update_ended(job.id, webhook_sent=job.state)
        return True

    async def _send(self, job: ServiceJob, url: str) -> str | None:
        """Sends the event of a job; returns why it was not delivered, None if it was."""
        event_id, body = make_event(self._service, job)
        headers = sign_event(self._secret, event_id, int(time.time()), body)
        try:
            async with asyncio.timeout(SEND_SECONDS):
                status = await self._post(urlsplit(url), headers, body)
        except TimeoutError:
            return f"no answer in {SEND_SECONDS:.0f} s"
        except _DELIVERY_ERRORS as error:
            return getattr(error, "strerror", None) or str(error) or type(error).__name__
        return None if 200 <= status < 300 else f"status {status}"

    async def _post(self, url: SplitResult, headers: dict[str, str], body: bytes) -> int:
        """Sends a request; returns the status. No redirect is followed, no proxy is used.

        All addresses of the host are checked; then they are tried in a random order until one
        answers.
        """
        addresses, port = await self._resolver.resolve(url.hostname or ""), _get_port(url)
        if not addresses or not all(map(self._hosts.allows_address, addresses)):
            raise PermissionError("its address is not public, and not in --webhook_hosts")
        with self._reserve(addresses, port):
            *first_addresses, last_address = random.sample(addresses, len(addresses))
            for address in first_addresses:
                with suppress(*_DELIVERY_ERRORS):
                    return await self._post_to(address, _CONNECT_SECONDS, url, headers, body)
            return await self._post_to(last_address, None, url, headers, body)

    @contextmanager
    def _reserve(self, addresses: Sequence[str], port: int) -> Iterator[None]:
        """Counts a delivery to each address of a host until the block ends.

        Raises:
            PostponedError: An address, which may have many names, has as many as it may have.
        """
        names = {normalize_address(address) for address in addresses}
        limits = {(name, port): _MAX_PER_HOST for name in names}
        limits |= {(name, 0): _MAX_PER_ADDRESS for name in names}
        if any(self._addresses[key] >= limit for key, limit in limits.items()):
            raise PostponedError
        self._addresses.update(limits.keys())
        try:
            yield
        finally:
            self._addresses.subtract(limits.keys())
            self._addresses = +self._addresses  # without zeros

    async def _post_to(
        self,
        address: str,
        seconds: float | None,
        url: SplitResult,
        headers: dict[str, str],
        body: bytes,
    ) -> int:
        """Sends a request to one address; returns the status.

        seconds: Time limit of the connection; None: only that of the delivery.
        """
        is_tls = url.scheme == "https"
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(
                address,
                _get_port(url),
                limit=_MAX_ANSWER,
                ssl=self._tls if is_tls else None,
                server_hostname=(url.hostname or "").removesuffix(".") if is_tls else None,
            )
        return await _exchange(reader, writer, url, headers, body)


def _get_port(url: SplitResult) -> int:
    return url.port or _PORTS[url.scheme]


class _Resolver:
    """Looks up host names: each in one thread at a time, since a lookup may hang for minutes.

    All deliveries that wait for the same name share the lookup, and leave it when they give up.
    """

    def __init__(self) -> None:
        """Starts no thread."""
        self._threads = DaemonThreads(_MAX_SENDING, SEND_SECONDS)
        self._lookups: dict[str, asyncio.Task[list[Any]]] = {}

    async def resolve(self, host: str) -> list[str]:
        """Returns the IP addresses of a host.

        Raises:
            OSError, UnicodeError: The name is unknown, or no thread is free.
        """
        lookup = self._lookups.get(host)
        if lookup is None:
            work = self._threads.call(socket.getaddrinfo, host, None, type=socket.SOCK_STREAM)
            lookup = self._lookups[host] = asyncio.create_task(work)
            lookup.add_done_callback(lambda ended: self._end_lookup(host, ended))
        entries = await asyncio.shield(lookup)
        return [*dict.fromkeys(str(entry[4][0]) for entry in entries)]

    def _end_lookup(self, host: str, lookup: asyncio.Task[list[Any]]) -> None:
        del self._lookups[host]
        if not lookup.cancelled():
            lookup.exception()  # asyncio would log one that no delivery has waited for


async def _exchange(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    url: SplitResult,
    headers: dict[str, str],
    body: bytes,
) -> int:
    """Sends a request on a connection, which it closes; returns the status of the answer."""
    try:
        target = (url.path or "/") + (f"?{url.query}" if url.query else "")
        lines = [f"POST {target} HTTP/1.1", f"Host: {url.netloc}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        writer.write("\r\n".join([*lines, "\r\n"]).encode("ascii") + body)
        await writer.drain()
        status = 100
        while 100 <= status < 200:
            match = re.match(rb"HTTP/1\.\d (\d{3})\b", await reader.readuntil(b"\r\n\r\n"))
            if match is None:
                raise ValueError("the answer is not HTTP")
            status = int(match[1])
        with suppress(OSError, EOFError):  # so that the server can end its answer
            async with asyncio.timeout(_DRAIN_SECONDS):
                await reader.readexactly(_MAX_ANSWER)
        return status
    finally:
        writer.transport.abort()


def make_event(service: Service, job: ServiceJob) -> tuple[str, bytes]:
    """Returns the id of the event of an ended job, equal at each attempt, and its body."""
    event_id = f"evt_{job.id}_{job.state}"
    event = {
        "id": event_id,
        "object": "event",
        "created_at": int(job.ended or 0.0),
        "type": f"video.{job.state}",
        "data": make_end_object(service, job),
    }
    return event_id, json.dumps(event, ensure_ascii=False).encode()


def sign_event(secret: bytes, event_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """Returns the headers of an event, with its signature by the scheme Standard Webhooks."""
    content = f"{event_id}.{timestamp}.".encode() + body
    digest = hmac.digest(secret, content, hashlib.sha256)
    return {
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
        "User-Agent": f"wan/{wan.__version__}",
        "webhook-id": event_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
    }


def read_signing_key(text: str) -> bytes:
    """Returns the key of a secret: text, or `whsec_` and base64.

    Raises:
        ValueError: The base64 is invalid.
    """
    prefix, _, encoded = text.partition("whsec_")
    if prefix or not encoded:
        return text.encode()
    return base64.b64decode(encoded, validate=True)
