"""The service below a path of a proxy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from tests.refusals import check_refusals
from tests.serve.jobs import Jobs
from wan.serve.http.operations import read_root_path
from wan.settings.errors import InputError

ROOT = "/team/wan"
KEY: dict[str, Any] = {"Authorization": "Bearer a secret of the API"}


@pytest.mark.parametrize("strips", [True, False])
async def test_all_addresses_work_below_a_path(strips: bool, tmp_path: Path) -> None:
    """strips: Whether the proxy removes the path from the requests that it forwards."""
    jobs = Jobs(tmp_path / "jobs", root_path=ROOT, key="a secret of the API")
    name = await jobs.create(**KEY)
    jobs.complete(name, video=b"0123456789")

    async def get(path: str, **headers: str) -> tuple[int, Any]:
        if not re.match(rf"{re.escape(ROOT)}(/|$)", path):
            return 404, b""
        path = path.removeprefix(ROOT) or "/" if strips else path
        status, _, content = await jobs.request(path, **headers)
        return status, content

    for page in (ROOT, f"{ROOT}/"):  # with the relative addresses of the document
        status, text = await get(page)
        base = re.search(r'<base href="([^"]*)">', text.decode())
        start = urljoin(page, base[1]) if base else page
        linked = re.findall(r'(?:src|href)="([\w.]+)"', text.decode())
        assert status == 200 and len(linked) >= 2
        for link in (*linked, "health"):
            assert (await get(urljoin(start, link)))[0] in (200, 503), link
    (server,) = (await get(f"{ROOT}/openapi.json", **KEY))[1]["servers"]
    assert urljoin(f"{ROOT}/openapi.json", server["url"]) == ROOT
    (output,) = (await get(server["url"] + f"/v1/videos/{name}/", **KEY))[1]["data"]
    assert await get(output["url"], **KEY) == (200, b"0123456789")
    status, content = await get(f"{ROOT}/v1/videos/{name}/events", **KEY)
    assert status == 200 and output["url"].encode() in content
    assert (await get(f"{ROOT}/v1/videos/{name}/archive", **KEY))[0] == 200
    assert (await get(f"{ROOT}/v1/videos"))[0] == 401
    assert (await get(f"{ROOT}/teams", **KEY))[0] == 404


async def test_the_root_path_of_an_outer_application(tmp_path: Path) -> None:
    """By ASGI, `path` includes `root_path`."""
    jobs = Jobs(tmp_path / "jobs", key="a secret of the API")
    name = await jobs.create(**KEY)
    jobs.complete(name)
    jobs.app = Starlette(routes=[Mount("/wan", jobs.app)])
    for path, expected in (("liveness", 200), ("page.css", 200), ("v1/videos", 401)):
        assert (await jobs.request(f"/wan/{path}"))[0] == expected, path
        assert (await jobs.request(f"/{path}"))[0] == 404
    for path in ("", f"v1/videos/{name}/content", f"v1/videos/{name}/archive"):
        assert (await jobs.request(f"/wan/{path}", **KEY))[0] == 200, path


def test_root_paths() -> None:
    for text, expected in {"/wan": "/wan", "/a/b-1/": "/a/b-1", "/": "", "": ""}.items():
        assert read_root_path("--root_path", text) == expected
    messages = {}
    texts = ("wan", "//host.example", "/a/../b", '/"><script>', "http://a.b/c", "/v1", "/health")
    for text in texts:
        with pytest.raises(InputError) as refusal:
            read_root_path("--root_path", text)
        messages[text] = str(refusal.value)
    check_refusals("serve: root paths", messages)
