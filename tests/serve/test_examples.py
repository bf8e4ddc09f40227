"""The files of examples/serve: their flags, and the front of several replicas."""

from __future__ import annotations

import importlib
import json
import re
import stat
import sys
from collections.abc import Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock
from urllib.parse import urlencode

import pytest
from starlette.requests import Request

from tests.dist import REPO
from tests.serve.jobs import PROMPT, Jobs
from wan.serve import __main__ as command

FOLDER = REPO / "examples" / "serve"


def test_their_flags_are_those_of_the_service(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.run_service(["--help"])
    service_flags = set(re.findall(r"--\w+", capsys.readouterr().out))
    for name in ("kubernetes.yaml", "leader_worker_set.yaml", "ray_app.py", "Dockerfile.cuda"):
        text = (FOLDER / name).read_text().replace("--shm-size", "").replace("--gpus", "")
        service_part = re.split(r"(?m)^\s+- --$|-- --ckpt_dir|\"--\",", text)[0]
        command_part = service_part.split("pip install")[-1]
        example_flags = set(re.findall(r"(?<![\w-])--[a-z]\w+", command_part))
        assert example_flags and example_flags <= service_flags, name


class Session:
    """Stands for the HTTP client of the front: http://r0 is a service, and nothing else answers."""

    service: Jobs
    urls: list[str]

    def __init__(self, timeout: object) -> None: ...

    async def request(
        self, method: str, url: str, *, headers: Mapping[str, str], data: Any = None
    ) -> Any:
        self.urls.append(url)
        host, slash, path = url.removeprefix("http://").partition("/")
        if host != "r0":
            raise ConnectionError
        body = None if data is None else b"".join([part async for part in data])
        headers = {name: value for name, value in headers.items() if name.lower() != "host"}
        status, answer_headers, content = await self.service.request(
            slash + path, body, method, **headers
        )
        content = json.dumps(content).encode() if not isinstance(content, bytes) else content

        async def iterate(size: int) -> Any:
            for start in range(0, len(content), size):
                yield content[start : start + size]

        del answer_headers["content-length"]
        return SimpleNamespace(
            status=status,
            headers=answer_headers,
            content=SimpleNamespace(iter_chunked=iterate),
            read=AsyncMock(return_value=content),
            json=AsyncMock(side_effect=lambda: json.loads(content)),
        )

    @asynccontextmanager
    async def get(
        self, url: str, params: Mapping[str, str] = {}, headers: Mapping[str, str] = {}, **_: Any
    ) -> Any:
        yield await self.request("GET", f"{url}?{urlencode(params)}", headers=headers)


@pytest.fixture
def ray_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example with stand-ins for Ray and aiohttp, which the tests do not need."""
    Session.service, Session.urls = Jobs(tmp_path / "jobs", key="0123456789abcdef"), []
    modules: dict[str, dict[str, Any]] = {
        "ray": {"serve": SimpleNamespace()},
        "ray.util": {"get_node_ip_address": None},
        "yarl": {"URL": lambda url, encoded: url},
        "aiohttp": {
            "ClientError": ConnectionError,
            "ClientConnectionError": ConnectionError,
            "ClientResponse": object,
            "ClientTimeout": lambda _: None,
            "ClientSession": Session,
        },
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "examples.serve.ray_app", raising=False)
    return importlib.import_module("examples.serve.ray_app")


async def test_the_front_of_several_replicas(ray_app: Any) -> None:
    """It passes the client's key on, and a list names the replica that does not answer."""

    async def list_urls() -> dict[str, str]:
        return {"r0": "http://r0", "r1": "http://r1"}

    remote = SimpleNamespace(all=SimpleNamespace(remote=list_urls))
    front = ray_app.Front(3, remote, None)

    async def request(path: str, body: Any = None, key: str = "", host: str = "front") -> Any:
        target, _, query = path.partition("?")
        content = b"" if body is None else json.dumps(body).encode()
        headers = {"host": host, "content-type": "application/json"}
        headers |= {"authorization": f"Bearer {key}"} if key else {}
        headers |= {} if body is None else {"content-length": str(len(content))}
        scope = {
            "type": "http",
            "method": "GET" if body is None else "POST",
            "path": target,
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }

        async def receive() -> Any:
            return {"type": "http.request", "body": content}

        answer = await front(Request(scope, receive))
        if hasattr(answer, "body_iterator"):
            return answer.status_code, b"".join([part async for part in answer.body_iterator])
        return answer.status_code, json.loads(answer.body)

    key, body = "0123456789abcdef", {"prompt": PROMPT}
    for wrong in ("", "wrong"):
        assert (await request("/v1/videos", key=wrong))[0] == 401
        assert (await request("/v1/videos", body, wrong))[0] == 401
    assert (await request("/v1/videos", host="x/health?"))[0] == 401
    assert Session.service.service.journal.list_in_state("queued") == []
    status, content = await request("/v1/videos", body, key)
    video = json.loads(content)
    assert (status, video["status"]) == (200, "queued")
    for path in ("/v1/videos", "/v1/videos/?order=asc"):
        status, page = await request(path, key=key)
        assert (status, page["missing"]) == (200, ["r1", "r2"])
        assert [item["id"] for item in page["data"]] == [video["id"]]
    Session.urls.clear()
    assert (await request("@r0/health", key=key))[0] == 400
    assert Session.urls == []


def test_the_key_of_several_replicas(ray_app: Any, tmp_path: Path) -> None:
    """It is made once, and only this user can read it; a short one is refused."""
    settings = {"journal": str(tmp_path / "videos"), "api_key": ""}
    key = ray_app._read_key(settings)
    assert len(key) >= 32 and ray_app._read_key(settings) == key
    assert stat.S_IMODE((tmp_path / "videos" / "key").stat().st_mode) == 0o600
    (tmp_path / "short").write_text("short")
    with pytest.raises(ValueError, match="at least 16"):
        ray_app._read_key(settings | {"api_key": str(tmp_path / "short")})
