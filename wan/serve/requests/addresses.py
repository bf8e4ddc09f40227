"""Host names, origins and networks of the service's options and of requests, and sockets."""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
from functools import partial
from typing import Any

from wan.settings.errors import InputError
from wan.settings.values import Reader, format_value

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_DEFAULT_PORTS = {"http": "80", "https": "443"}
_HOST = re.compile(r"(\[[\da-f:.]+\]|[\w.-]+)(?::\d{0,5})?", re.ASCII | re.IGNORECASE)


def split_host(text: str) -> tuple[str, str] | None:
    """Returns the name and the port ("" if absent) of `HOST` or `HOST:PORT`, or None.

    Equal hosts have equal names (`normalize_host`). Anything else is None, such as a zone of an
    IPv6 address, or a character that would end the host in an address.
    """
    match = _HOST.fullmatch(text)
    if match is None:
        return None
    name, port = normalize_host(match[1]), text[match.end(1) + 1 :]
    is_malformed = not name or name.startswith("[") or (text[0] == "[" and ":" not in match[1])
    return None if is_malformed else (name, port)


def normalize_host(name: str) -> str:
    """Returns a host name in lower case, and an IP address in one form, without its zone."""
    name = name.lower().removesuffix(".")
    try:
        address = ipaddress.ip_address(name.removeprefix("[").removesuffix("]").partition("%")[0])
    except ValueError:
        return name
    return str(getattr(address, "ipv4_mapped", None) or address)


def is_local(host: str) -> bool:
    """Returns whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_in_networks(address: str, networks: tuple[Network, ...]) -> bool:
    """Returns whether an IP address is in one of the networks."""
    try:
        parsed = ipaddress.ip_address(normalize_host(address))
    except ValueError:
        return False
    return any(parsed in network for network in networks)


@partial(Reader, metavar="ORIGIN")
def read_origin(name: str, raw: Any) -> str:
    """Reads `SCHEME://HOST[:PORT]` as browsers write it in the header `Origin`."""
    match = re.fullmatch(r"(https?)://([^\s/?#@]+)/?", str(raw).lower(), re.ASCII)
    parts = None if match is None else split_host(match[2])
    if match is None or parts is None:
        why = "is not the address of a site"
        raise InputError(name, format_value(raw), why, "give one such as https://video.example")
    host, port = parts
    address = f"[{host}]" if ":" in host else host
    is_default = port in ("", _DEFAULT_PORTS[match[1]])
    return f"{match[1]}://{address}" + ("" if is_default else f":{port}")


@partial(Reader, metavar="ADDRESS")
def read_network(name: str, raw: Any) -> Network:
    """Reads an IP address or a network such as 10.0.0.0/8."""
    try:
        return ipaddress.ip_network(str(raw), strict=False)
    except ValueError as error:
        why = "is no IP address or network"
        raise InputError(name, format_value(raw), why, "give one such as 10.0.0.0/8") from error


@partial(Reader, metavar="NAME")
def read_model_name(name: str, raw: Any) -> str:
    """Reads a name of the model, which is also sent in a header."""
    if not re.fullmatch(r"[!-~]{1,200}", str(raw)):
        why = "must be of 1 to 200 printable ASCII characters without spaces"
        raise InputError(name, format_value(raw), why)
    return str(raw)


def open_sockets(host: str, port: int, setting: str = "`host`") -> list[socket.socket]:
    """Opens a listening socket on each address of a host.

    Args:
        host: A name or an address.
        port: 0 for a free port.
        setting: Name of the host's setting in refusals.

    Raises:
        InputError: The host is unknown or another machine, or the port is in use or not allowed.
    """
    try:
        addresses = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE if host else 0
        )
    except (OSError, UnicodeError, ValueError) as error:
        why = f"is not a known host ({getattr(error, 'strerror', None) or error})"
        raise InputError(setting, host, why, "give a name or an address of this machine") from None
    sockets: list[socket.socket] = []
    last_error: OSError | None = None
    is_partial = True  # further addresses are opened without those that the machine lacks
    for family, _, _, _, address in dict.fromkeys(addresses):
        try:
            sockets.append(socket.create_server(address, family=family))
        except OSError as error:
            last_error = error
            is_partial = error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
            if not is_partial:
                break
    if last_error is None or (sockets and is_partial):
        return sockets
    for listener in sockets:
        listener.close()
    raise _make_bind_error(last_error, host, port, setting) from None


def _make_bind_error(error: OSError, host: str, port: int, setting: str) -> InputError:
    """Returns the refusal for an address that cannot be bound."""
    if error.errno == errno.EADDRINUSE:
        return InputError(f"port {port} of {host}", None, "is in use", "give another port")
    if error.errno in (errno.EACCES, errno.EPERM):
        remedy = "give a port of 1024 or more"
        return InputError(f"port {port} of {host}", None, "is not allowed for this user", remedy)
    why = f"cannot be bound ({os.strerror(error.errno or 0)})"
    return InputError(setting, host, why, "give an address of this machine")
