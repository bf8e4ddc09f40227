"""Host names, origins, networks and paths of the service's options and of requests."""

from __future__ import annotations

import ipaddress
import re
from functools import partial
from typing import Any

from wan.serve.http.operations import OPERATIONS
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


@partial(Reader, metavar="PATH")
def read_root_path(name: str, raw: object) -> str:
    """Reads a path such as `/wan`; returns it without a slash at its end."""
    text = str(raw).rstrip("/")
    if text and re.fullmatch(r"(/(?!\.{1,2}(/|$))[\w.~-]+)+", text, re.ASCII) is None:
        why = "must be a path of letters, digits, -, _, . and ~, such as /wan"
        raise InputError(name, format_value(raw), why, "give the path that the proxy serves")
    first_names = {operation.path.split("/")[1] for operation in OPERATIONS} - {""}
    if text and text.split("/")[1] in first_names:
        why = "begins as a path of the service itself"
        raise InputError(name, format_value(raw), why, "serve it below another path, such as /wan")
    return text
