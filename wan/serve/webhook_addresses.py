"""The IP addresses of webhooks' receivers: how many deliveries each gets, and their order."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from wan.serve.deliveries import PostponedError
from wan.serve.webhook_hosts import unwrap_address

_MAX_PER_PORT = 4  # deliveries to a port of an address at the same time
_MAX_PER_ADDRESS = 8  # deliveries to all ports of an address
_MAX_FAILURES = 10_000  # addresses whose failures are stored


class ReceiverAddresses:
    """Limits deliveries by address, since one receiver may have many names."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, int]] = Counter()  # address and port (0: all ports)
        self._failures: dict[str, None] = {}  # addresses whose last delivery failed, oldest first

    @contextmanager
    def reserve(self, addresses: Sequence[str], port: int) -> Iterator[None]:
        """Counts a delivery until the block ends; each address of its host counts.

        Raises:
            PostponedError: An address has as many deliveries as it may have at the same time.
        """
        names = {_normalize_address(address) for address in addresses}
        limits = {(name, port): _MAX_PER_PORT for name in names}
        limits |= {(name, 0): _MAX_PER_ADDRESS for name in names}
        if any(self._counts[key] >= limit for key, limit in limits.items()):
            raise PostponedError
        self._counts.update(limits.keys())
        try:
            yield
        finally:
            self._counts.subtract(limits.keys())
            self._counts = +self._counts  # without zeros

    def sort(self, addresses: Sequence[str]) -> list[str]:
        """Returns addresses in the order in which they are tried.

        The order of the resolver is kept, but addresses that have failed are last: first those
        whose failure is the longest ago.
        """
        failed = [address for address in self._failures if address in addresses]
        return [address for address in addresses if address not in failed] + failed

    def record_result(self, address: str, *, has_failed: bool) -> None:
        """Stores whether the last delivery to an address has failed."""
        self._failures.pop(address, None)
        if has_failed:
            self._failures[address] = None
            if len(self._failures) > _MAX_FAILURES:
                del self._failures[next(iter(self._failures))]


def _normalize_address(text: str) -> str:
    """Returns an IP address in one form; those that lead to this machine are equal."""
    address = unwrap_address(ipaddress.ip_address(text.partition("%")[0]))
    return "localhost" if address.is_loopback or address.is_unspecified else str(address)
