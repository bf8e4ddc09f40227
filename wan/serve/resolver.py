"""Resolves the host names of webhooks in a bounded number of threads."""

from __future__ import annotations

import asyncio
import socket

from wan.serve.threads import DaemonThreads

_MAX_THREADS = 16
_WAIT_SECONDS = 15.0  # seconds that a lookup waits for a thread


class Resolver:
    """Looks up host names: each in one thread at a time, since a lookup may hang for minutes.

    All deliveries that wait for the same name share the lookup, and leave it when they give up.
    """

    def __init__(self) -> None:
        """Starts no thread."""
        self._threads = DaemonThreads(_MAX_THREADS, _WAIT_SECONDS)
        self._lookups: dict[str, asyncio.Task[list[str]]] = {}

    async def resolve(self, host: str) -> list[str]:
        """Returns the IP addresses of a host, in the order in which they should be tried.

        Raises:
            OSError, UnicodeError: The name is unknown, or no thread is free.
        """
        lookup = self._lookups.get(host)
        if lookup is None:
            lookup = self._lookups[host] = asyncio.create_task(
                self._threads.call(_list_addresses, host)
            )
            lookup.add_done_callback(lambda ended: self._end_lookup(host, ended))
        return await asyncio.shield(lookup)

    def _end_lookup(self, host: str, lookup: asyncio.Task[list[str]]) -> None:
        del self._lookups[host]
        if not lookup.cancelled():
            lookup.exception()  # asyncio would log one that no delivery has waited for


def _list_addresses(host: str) -> list[str]:
    entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [*dict.fromkeys(str(entry[4][0]) for entry in entries)]
