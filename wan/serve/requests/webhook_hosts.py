"""Addresses of webhooks: which a request may give, and to which IP addresses events are sent."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from wan.serve.requests.addresses import Network, normalize_host, read_network, split_host
from wan.settings.errors import InputError
from wan.settings.values import Reader, format_value

_LENGTH = 2000  # characters of an address at most
_UNICAST = ipaddress.ip_network("2000::/3")  # all public IPv6 addresses; IANA assigns no others
_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # the last four bytes are an IPv4 address


@dataclass(frozen=True)
class WebhookHosts:
    """The hosts to which events may be sent.

    Attributes:
        names: Allowed host names in lower case; "*": every name and every public address.
        networks: Allowed IP addresses that are not public, and public ones where "*" is missing.
    """

    names: frozenset[str] = frozenset()
    networks: tuple[Network, ...] = ()

    def check_url(self, url: str | None) -> None:
        """Refuses the URL of a request, if it has one, if its host is not allowed."""
        if url is None:
            return
        if not self.names and not self.networks:
            why, remedy = "is not allowed by this service", "start it with --webhook_hosts"
            raise InputError("webhook_url", why=why, remedy=remedy)
        name = normalize_host(urlsplit(url).hostname or "")
        try:
            is_allowed = self.allows_address(name) and (
                "*" in self.names or self._is_listed(ipaddress.ip_address(name))
            )
        except ValueError:
            is_allowed = bool({"*", name} & self.names)
        if not is_allowed:
            why, remedy = "is of a host that this service does not allow", "see --webhook_hosts"
            raise InputError("webhook_url", why=why, remedy=remedy)

    def allows_address(self, text: str) -> bool:
        """Returns whether events may be sent to an IP address to which a name was resolved.

        Args:
            text: An IP address.

        Raises:
            ValueError: It is no IP address.
        """
        address = unwrap_address(ipaddress.ip_address(text.partition("%")[0]))
        is_assigned = address.version == 4 or address in _UNICAST
        is_public = is_assigned and address.is_global and not address.is_multicast
        return is_public or self._is_listed(address)

    def _is_listed(self, address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
        return any(address in network for network in self.networks)


NO_HOSTS = WebhookHosts()


def unwrap_address(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Returns the IPv4 address that an IPv6 address contains, or the address itself."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address


def normalize_address(text: str) -> str:
    """Returns an IP address in one form; those that lead to this machine are equal."""
    address = unwrap_address(ipaddress.ip_address(text.partition("%")[0]))
    return "localhost" if address.is_loopback or address.is_unspecified else str(address)


@partial(Reader, metavar="HOST")
def read_webhook_host(name: str, raw: Any) -> str | Network:
    """Reads a host name, `*`, an IP address or a network."""
    text = str(raw).lower().removesuffix(".")
    if re.search(r"[:/]", text) or re.fullmatch(r"[\d.]+", text, re.ASCII):
        network: Network = read_network(name, text)
        return network
    if text != "*" and not re.fullmatch(r"\w[\w.-]{0,252}", text, re.ASCII):
        why, remedy = "is no host name", "give one such as hooks.example, * or 10.0.0.0/8"
        raise InputError(name, format_value(raw), why, remedy)
    return text


def read_url(value: Any) -> str:
    """Reads the field `webhook_url`; its value is in no message, as it may have a secret."""
    remedy = "give one such as https://hooks.example/video"
    if not isinstance(value, str) or not re.fullmatch(rf"[!-~]{{1,{_LENGTH}}}", value):
        why = f"must be an address of at most {_LENGTH} ASCII characters"
        raise InputError("webhook_url", why=why, remedy=remedy)
    try:
        parts = urlsplit(value)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if is_address and "@" in parts.netloc:
        why = "has a user name or a password"
        raise InputError("webhook_url", why=why, remedy="check the signature of the events")
    if not is_address or split_host(parts.netloc) is None:
        raise InputError("webhook_url", why="must be an http or https address", remedy=remedy)
    return parts._replace(fragment="").geturl()
