"""The service below a path of a proxy."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urljoin
from urllib.request import Request, urlopen

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from tests.refusals import check_refusals
from tests.serve.jobs import Jobs
from wan.serve.root_path import read_root_path
from wan.settings.errors import InputError

ROOT = "/team/wan"


@asynccontextmanager
async def serve_below(root: str, jobs: Jobs, strips: bool) -> AsyncIterator[str]:
    """Serves an application by a proxy below a path; yields the address.

    strips: Whether the proxy removes the path from the requests that it forwards.
    """
    config = uvicorn.Config(jobs.app, port=0, lifespan="off", log_level="warning")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        method, path, rest = head.split(" ", 2)
        if not re.match(rf"{re.escape(root)}(/|$)", path):
            answer = b"HTTP/1.1 404 Not Found\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
            writer.write(answer)
        else:
            path = path.removeprefix(root) or "/" if strips else path
            service_reader, service_writer = await asyncio.open_connection("127.0.0.1", port)
            service_writer.write(f"{method} {path} {rest}".encode("latin-1"))
            while data := await service_reader.read(1 << 16):
                writer.write(data)
            service_writer.close()
        writer.close()

    proxy = await asyncio.start_server(forward, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
    finally:
        proxy.close()
        server.should_exit = True
        with suppress(asyncio.CancelledError):
            await serving


def fetch(url: str, **headers: str) -> tuple[int, bytes]:
    """Returns status and content of a GET request."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        with urlopen(Request(url, headers=names | {"Connection": "close"}), timeout=60) as answer:
            return answer.status, answer.read()
    except HTTPError as error:
        return error.code, error.read()


@pytest.mark.parametrize("strips", [True, False])
async def test_all_addresses_work_below_a_path(strips: bool, tmp_path: Path) -> None:
    jobs = Jobs(tmp_path / "jobs", root_path=ROOT, key="a secret of the API")
    name = await jobs.create(Authorization="Bearer a secret of the API")
    jobs.complete(name, video=b"0123456789")
    key = {"Authorization": "Bearer a secret of the API"}
    async with serve_below(ROOT, jobs, strips) as address:

        async def get(path: str, **headers: str) -> tuple[int, bytes]:
            return await asyncio.to_thread(fetch, urljoin(address, path), **headers)

        for page in (ROOT, f"{ROOT}/"):  # with the relative addresses of the document
            status, text = await get(page)
            base = re.search(r'<base href="([^"]*)">', text.decode())
            start = urljoin(page, base[1]) if base else page
            linked = re.findall(r'(?:src|href)="([\w.]+)"', text.decode())
            assert status == 200 and len(linked) >= 2
            for link in (*linked, "health"):
                assert (await get(urljoin(start, link)))[0] in (200, 503), link
        status, content = await get(f"{ROOT}/openapi.json", **key)
        (server,) = json.loads(content)["servers"]
        assert urljoin(f"{ROOT}/openapi.json", server["url"]) == ROOT
        status, content = await get(server["url"] + f"/v1/videos/{name}/", **key)
        (output,) = json.loads(content)["data"]
        assert (await get(output["url"], **key)) == (200, b"0123456789")
        assert (await get(output["url"], Range="bytes=2-4", **key)) == (206, b"234")
        status, content = await get(f"{ROOT}/v1/videos/{name}/events", **key)
        assert status == 200 and output["url"].encode() in content
        assert (await get(f"{ROOT}/v1/videos"))[0] == 401
        assert (await get("/v1/videos", **key))[0] == 404
        assert (await get(f"{ROOT}/teams", **key))[0] == 404


async def test_the_root_path_of_an_outer_application(tmp_path: Path) -> None:
    """By ASGI, `path` includes `root_path`."""
    jobs = Jobs(tmp_path / "jobs", key="a secret of the API")
    app = jobs.app

    async def mounted(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "root_path": "/wan"}, receive, send)

    jobs.app = mounted
    assert (await jobs.request("/wan/liveness"))[0] == 200
    assert (await jobs.request("/wan/page.css"))[0] == 200
    assert (await jobs.request("/wan/v1/videos"))[0] == 401


def test_root_paths() -> None:
    for text, expected in {"/wan": "/wan", "/a/b-1/": "/a/b-1", "/": "", "": ""}.items():
        assert read_root_path("--root_path", text) == expected
    messages = {}
    for text in (
        "wan",
        "//host.example",
        "/a/../b",
        '/"><script>',
        "http://a.b/c",
        "/v1",
        "/health",
    ):
        with pytest.raises(InputError) as refusal:
            read_root_path("--root_path", text)
        messages[text] = str(refusal.value)
    check_refusals("serve: root paths", messages)
