"""Hosts, origins and proxies of requests, CORS, and paths with a slash at the end."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Any

import pytest

from tests.refusals import check_refusals
from tests.serve.jobs import PROMPT, Jobs
from wan.serve.jobs.folders import NAME_LENGTH
from wan.serve.requests import addresses
from wan.settings.errors import InputError

KEY = "0123456789abcdef"
BODY = {"prompt": PROMPT}


async def test_equal_hosts_in_other_forms(tmp_path: Path) -> None:
    """An IPv6 address, as of a pod, and names of up to 63 characters."""
    label = "w" * NAME_LENGTH
    jobs = Jobs(tmp_path / "jobs", names=["fd00::7", "[FD00:0:0::8]", f"{label}.wan", "10.0.0.7"])
    served = ["[fd00::7]:8000", "[fd00::7]", "[FD00:0::7]:80", "[fd00::8]:8000", "[::1]:8000"]
    served += [f"{label}.wan:8000", f"{label.upper()}.WAN", f"{label}.wan.", "localhost."]
    served += ["10.0.0.7:1", "[::ffff:10.0.0.7]", "127.0.0.1"]
    foreign = ["[fd00::9]:8000", "fd00", "[fd00::7", "evil.example", "", "::", "[]", "localhost:x"]
    foreign += ["fd00::7", "[127.0.0.1]", "[localhost]", "localhost..", ".", "localhost:\u0661"]
    statuses = {
        host: (await jobs.request("/liveness", host=host))[0] for host in (*served, *foreign)
    }
    assert statuses == dict.fromkeys(served, 200) | dict.fromkeys(foreign, 421)


OPEN_PATHS = ("/", "/health", "/liveness", "/page.css", "/page.js", "/form.js")


@pytest.mark.parametrize("root_path", ["", "/wan"])
async def test_only_the_routed_path_decides(root_path: str, tmp_path: Path) -> None:
    """Neither a host nor another spelling of a path reaches a route without the key."""
    jobs = Jobs(tmp_path / "jobs", key=KEY, names=["fe80::1%eth0"])
    jobs.start_idle_ranks()
    ends = ["/health?", "/health#", "?", "#", "/", "%", "%/health?", "%/page.css#", "%eth0", "%2f"]
    ends += ["@evil", "\\health", ";", ",localhost", " ", "\t", "\x1f", "\xa0", "\n"]
    hosts = [f"{name}{end}" for name in ("127.0.0.1", "localhost", "[::1]") for end in ends]
    hosts += ["[fe80::1%eth0]", "[fe80::1%25eth0]", "user@localhost", "http://localhost", "*"]
    scope = {"root_path": root_path}
    for host in hosts:
        for path, body in (("/v1/videos", BODY), ("/health", None)):
            status = (await jobs.request(root_path + path, body, host=host, scope=scope))[0]
            assert status == 421, (host, path)
    twice = {"headers": [(b"host", b"localhost"), (b"host", b"localhost%/health?")]}
    for headers in (twice, {"headers": twice["headers"][::-1]}, {"headers": []}):
        assert (await jobs.request(f"{root_path}/health", scope=scope | headers))[0] == 421
    for target in ("http://localhost/health", "@localhost/health", "*", ""):
        assert (await jobs.request(target, scope={"root_path": ""}))[0] == 421, target
    videos = [f"{root_path}{path}" for path in ("/v1/videos", "/v1/videos/", "//v1/videos")]
    videos += [f"{root_path}/health/../v1/videos", f"{root_path}/health{root_path}/v1/videos"]
    videos += [f"{root_path}{path}" for path in ("//health", "/health/x", "/health?/", "/health#")]
    videos += [f"{root_path}{path}" for path in ("/v1/videos?/health", "/Health", "/page.css/x")]
    for path in videos:
        status, _, answer = await jobs.request(path.partition("?")[0], scope=scope | {"path": path})
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key"), path
    assert jobs.service.journal.list_in_state("queued") == []
    for path in (f"{root_path}{path}{end}" for path in OPEN_PATHS for end in ("", "/", "//")):
        for host in ("localhost", "[fe80::1]:8000"):
            assert (await jobs.request(path, host=host, scope=scope))[0] == 200, path


async def test_pages_behind_a_proxy(tmp_path: Path) -> None:
    """The proxy replaces the host; the page is that of http://video.example."""
    proxies = [ipaddress.ip_network("10.0.0.0/8"), ipaddress.ip_network("fd00::1")]
    jobs = Jobs(tmp_path / "jobs", names=["any"], origins=["https://app.example"], proxies=proxies)
    page, other = "http://video.example", "http://evil.example"
    forwarded = {"X_Forwarded_Host": "video.example"}
    cases: dict[str, tuple[str | None, dict[str, str], int]] = {
        "no page": (None, {}, 200),
        "unknown proxy": ("192.0.2.1", {"origin": page} | forwarded, 403),
        "no proxy": (None, {"origin": page} | forwarded, 403),
        "proxy": ("10.1.2.3", {"origin": page} | forwarded, 200),
        "IPv6 proxy": ("fd00::1", {"origin": page} | forwarded, 200),
        "list": ("10.1.2.3", {"origin": page, "X_Forwarded_Host": "video.example, inner"}, 200),
        "RFC 7239": ("10.1.2.3", {"origin": page, "Forwarded": 'for=a;host="video.example"'}, 200),
        "port": ("10.1.2.3", {"origin": f"{page}:81", "X_Forwarded_Host": "video.example:81"}, 200),
        "other port": ("10.1.2.3", {"origin": f"{page}:81"} | forwarded, 403),
        "other site": ("10.1.2.3", {"origin": other} | forwarded, 403),
        "null": ("10.1.2.3", {"origin": "null"} | forwarded, 403),
        "nothing": ("10.1.2.3", {"origin": "null", "X_Forwarded_Host": ","}, 403),
        "both malformed": ("10.1.2.3", {"origin": "http://a?", "X_Forwarded_Host": "b%"}, 403),
        "zone": ("fd00::1%eth0", {"origin": page} | forwarded, 200),
        "end of the host": ("10.1.2.3", {"origin": page, "X_Forwarded_Host": f"{page}?"}, 403),
        "own page": (None, {"origin": "http://any"}, 200),
        "same origin": (None, {"origin": page, "Sec_Fetch_Site": "same-origin"}, 200),
        "same site": (None, {"origin": page, "Sec_Fetch_Site": "same-site"}, 403),
        "cross site": (None, {"origin": other, "Sec_Fetch_Site": "cross-site"}, 403),
        "--origin": (None, {"origin": "https://app.example"}, 200),
        "--origin, other scheme": (None, {"origin": "http://app.example"}, 403),
    }
    statuses = {
        kind: (await jobs.request("/v1/videos", BODY, client=client, host="any", **headers))[0]
        for kind, (client, headers, _) in cases.items()
    }
    assert statuses == {kind: status for kind, (_, _, status) in cases.items()}


async def test_pages_of_other_sites(tmp_path: Path) -> None:
    """A page of --origin may send requests with a key and read every response."""
    jobs = Jobs(tmp_path / "jobs", key=KEY, origins=["https://app.example"])
    origin: dict[str, Any] = {"origin": "https://app.example"}
    asked = {"Access_Control_Request_Headers": "authorization,content-type,idempotency-key"}
    for method in ("POST", "DELETE"):
        status, headers, _ = await jobs.request(
            "/v1/videos", method="OPTIONS", **origin, **asked, Access_Control_Request_Method=method
        )
        assert status == 200 and headers["access-control-allow-origin"] == origin["origin"]
        assert method in headers["access-control-allow-methods"]
        assert "authorization" in headers["access-control-allow-headers"]
    for auth, expected in ((f"Bearer {KEY}", 200), ("Bearer wrong", 401)):
        status, headers, _ = await jobs.request("/v1/models", **origin, authorization=auth)
        assert (status, headers["access-control-allow-origin"]) == (expected, origin["origin"])
        assert "origin" in headers["vary"].lower()
        assert "x-should-retry" in headers["access-control-expose-headers"]
    other: dict[str, Any] = {
        "origin": "https://evil.example",
        "Access_Control_Request_Method": "POST",
    }
    _, headers, _ = await jobs.request("/v1/videos", method="OPTIONS", **other)
    assert "access-control-allow-origin" not in headers
    auth = f"Bearer {KEY}"
    status, headers, _ = await jobs.request("/v1/videos", BODY, authorization=auth, **other)
    assert status == 403 and "access-control-allow-origin" not in headers


async def test_keys_sizes_and_a_busy_service(tmp_path: Path) -> None:
    """Wrong keys, large bodies, and all requests when busy are refused."""
    busy: list[bool] = []
    jobs = Jobs(tmp_path / "jobs", key=KEY, most_bytes=50, is_busy=lambda: bool(busy))
    auth_headers: dict[str, Any] = {"authorization": f"Bearer {KEY}"}
    cases: dict[str, tuple[dict[str, Any], int]] = {
        "": ({}, 200),
        "no key": ({"authorization": ""}, 401),
        "long": ({"content_length": "51"}, 413),
        "short": ({"content_length": "50"}, 200),
        "no length": ({"content_length": "-1"}, 413),
    }
    statuses = {
        n: (await jobs.request("/v1/videos", **auth_headers | h))[0] for n, (h, _) in cases.items()
    }
    assert statuses == {name: status for name, (_, status) in cases.items()}
    for parts, status in (((51,), 413), ((30, 20), 400), ((30, 21), 413)):  # without a length
        body = tuple(b"x" * size for size in parts)
        assert (await jobs.request("/v1/videos", body, **auth_headers))[0] == status, parts
    assert (await jobs.request("/liveness"))[0] == 200 and (await jobs.request("/"))[0] == 200
    busy.append(True)
    status, headers, answer = await jobs.request("/v1/videos", **auth_headers)
    assert (status, headers["retry-after"], answer["error"]["code"]) == (503, "5", "busy")
    assert (await jobs.request("/health"))[2]["queued"] == 0


async def test_a_refused_body_is_read(tmp_path: Path) -> None:
    """Clients that still send see a closed connection instead of the answer."""
    jobs = Jobs(tmp_path / "jobs", most_bytes=100)
    cases: list[tuple[dict[str, Any], int, int]] = [
        # headers, status, parts of the body that are not read
        ({"transfer_encoding": "chunked"}, 413, 0),
        ({"content_length": "600"}, 413, 0),
        ({"content_length": "60", "host": "evil.example"}, 421, 0),
        ({"content_length": "600", "expect": "100-continue"}, 413, 10),
    ]
    for headers, status, num_unread in cases:
        assert (await jobs.request("/v1/videos", (b"x" * 60,) * 10, **headers))[0] == status
        assert jobs.num_unread_parts == num_unread, headers


async def test_a_slash_at_the_end_of_a_path(jobs: Jobs) -> None:
    """It is no other path: a redirect behind a proxy would lead to another host."""
    status, _, video = await jobs.request("/v1/videos/", BODY)
    assert status == 200
    for path in ("/v1/videos/", f"/v1/videos/{video['id']}/", "/health/", "/v1/models/", "//"):
        assert (await jobs.request(path))[0] in (200, 503), path
    status, headers, _ = await jobs.request("/v1/videos/", method="PUT")
    assert (status, headers["allow"]) == (405, "GET, HEAD, POST")


READERS: dict[str, tuple[Any, dict[str, str], list[str]]] = {
    "--origin": (
        addresses.read_origin,
        {
            "https://Video.example/": "https://video.example",
            "http://a:80": "http://a",
            "https://[FD00:0::1]:8443": "https://[fd00::1]:8443",
        },
        ["*", "video.example", "https://a/b", "ftp://a", "https://", "https://u@a", "https://a b"],
    ),
    "--trusted_proxy": (
        addresses.read_network,
        {"10.0.0.1": "10.0.0.1/32", "10.1.2.3/8": "10.0.0.0/8", "fd00::1": "fd00::1/128"},
        ["proxy", "10.0.0.0/33", "", "*"],
    ),
    "--served_model_name": (
        addresses.read_model_name,
        {"Wan-AI/Wan2.2-T2V-A14B-Diffusers": "Wan-AI/Wan2.2-T2V-A14B-Diffusers"},
        ["", "a b", "ä", "b\n", "x" * 201],
    ),
}


@pytest.mark.parametrize("option", READERS)
def test_options_of_addresses_and_names(option: str) -> None:
    reader, taken, refused = READERS[option]
    assert {text: str(reader(option, text)) for text in taken} == taken
    messages = {}
    for text in refused:
        with pytest.raises(InputError) as caught:
            reader(option, text)
        messages[text.strip()[:20] or "empty"] = str(caught.value)
    check_refusals(f"serve: {option}", messages)
