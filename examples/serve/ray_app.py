"""Runs several `python -m wan.serve` services as one Ray Serve application.

    pip install "ray[serve]" -r requirements-serve.txt
    serve run examples.serve.ray_app:build replicas=2    # the demo, on this machine
    serve run examples.serve.ray_app:build replicas=4 ranks=8 devices=GPU journal=/shared/videos \
        api_key=key.txt \
        flags="--ckpt_dir /shared/Wan2.2-T2V-A14B --ulysses_size 8 --comm_type 1"

A replica is one group of ranks with one service: all its devices are on one machine (STRICT_PACK),
and its journal is a folder that every machine can access. Ray restarts an ended replica with the
same name and journal, so that its jobs continue. New jobs go to the replica whose queue will be
empty first; requests about a job go to the replica named in the job's id.

Requests need the key in the file `api_key`, as with `python -m wan.serve --api_key`. By default the
file is JOURNAL/key, which is written at the first start. A list of all videos names the replicas
that do not answer in `missing`.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

try:
    import aiohttp
    import ray
    from ray import serve
    from ray.util import get_node_ip_address
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from yarl import URL
except ModuleNotFoundError as error:
    from wan.app.programs import exit_without_package

    exit_without_package(error)


_OF_JOB = re.compile(r"/v1/videos/video_(r\d+)_")
_OF_CONNECTION = {"connection", "keep-alive", "transfer-encoding"}  # headers not forwarded
_OF_FRONT = _OF_CONNECTION | {"host", "x-forwarded-host"}
_QUICK = aiohttp.ClientTimeout(5)  # seconds in which a replica must answer a list or /health


class Addresses:
    """URLs of the replicas' services: {"r0": "http://..."}."""

    def __init__(self) -> None:
        self._urls: dict[str, str] = {}

    def put(self, name: str, url: str) -> None:
        self._urls[name] = url

    def all(self) -> dict[str, str]:
        return self._urls


def _end_with_parent() -> None:
    """Makes the kernel send SIGTERM to this process when the replica's process ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _find_unused_name(root: Path, count: int, first: int) -> str:
    """Returns a name whose journal no service has locked.

    If two replicas take the same name, one of them fails and is restarted.
    """
    for number in range(count):
        name = f"r{(first + number) % count}"
        (root / name).mkdir(parents=True, exist_ok=True)
        with (root / name / "lock").open("w") as lock, suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return name
    raise RuntimeError(f"All {count} journals in {root} belong to running services.")


class Replica:
    """One group of ranks and its service."""

    def __init__(self, settings: dict[str, Any], key: str, addresses: Any) -> None:
        root, count = Path(settings["journal"]).absolute(), int(settings["replicas"])
        self._name = _find_unused_name(root, count, serve.get_replica_context().rank.rank)
        host = get_node_ip_address()
        with socket.create_server((host, 0)) as free:
            port = free.getsockname()[1]
        folder = root / self._name
        secret = folder / "key"
        secret.touch(mode=0o600)
        secret.write_text(key)
        command = [sys.executable, "-m", "wan.serve", "--host", host, "--port", str(port)]
        command += ["--name", self._name, "--journal", str(folder), "--api_key", str(secret)]
        # The fronts may be on any node. No page can set the header of proxies.
        command += ["--trusted_proxy", "0.0.0.0/0", "--trusted_proxy", "::/0"]
        command += ["--ranks", str(settings["ranks"]), "--", *shlex.split(settings["flags"])]
        self._service = subprocess.Popen(command, preexec_fn=_end_with_parent)
        self._url = f"http://{host}:{port}"
        self._has_answered = False
        ray.get(addresses.put.remote(self._name, self._url))

    async def check_health(self) -> None:
        """Raises if the service has ended: Ray then replaces this replica.

        The service itself restarts lost ranks.
        """
        answers = await _is_answering(f"{self._url}/liveness")
        if self._service.poll() is not None or (self._has_answered and not answers):
            raise RuntimeError(f"The service of {self._name} has ended.")
        self._has_answered = self._has_answered or answers

    def __del__(self) -> None:
        self._service.terminate()
        self._service.wait(30)


async def _is_answering(url: str) -> bool:
    try:
        async with aiohttp.ClientSession() as client, client.get(url) as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


class Front:
    """Forwards requests to replicas, with the client's key, which the services check.

    It is stateless, so several may run.
    """

    def __init__(self, count: int, addresses: Any, replicas: Any) -> None:
        """Opens the client session.

        Args:
            count: Number of replicas.
            replicas: Handle of the replicas; Ray starts them before this and ends them with it.
        """
        self._names = sorted(f"r{number}" for number in range(count))
        self._addresses, self._replicas = addresses, replicas
        self._client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None))

    async def __call__(self, request: Request) -> Response:
        # `request.url` is built from the header Host, which may change its path.
        path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        if not path.startswith("/"):  # it would change the host to which the request is forwarded
            return _make_error_response(
                "The request target must be a path.", 400, "invalid_request"
            )
        path = path.rstrip("/") or "/"
        urls = await self._addresses.all.remote()
        try:
            if request.method == "GET" and path == "/v1/videos":
                return await self._list_jobs(urls, request)
            return await self._forward_request(urls, request, path)
        except aiohttp.ClientConnectionError:
            return _make_unavailable_response("a replica is being restarted")

    async def _list_jobs(self, urls: dict[str, str], request: Request) -> Response:
        """Lists the jobs of all replicas in the order of their names, one page from the cursor.

        Replicas that do not answer, such as those that are being restarted, are named in the page.
        """
        query = dict(request.query_params)
        cursor = _OF_JOB.match(f"/v1/videos/{query.get('after', '')}")
        jobs, missing, limit = list[dict[str, Any]](), list[str](), query.get("limit", "20")
        names = [name for name in self._names if cursor is None or name >= cursor[1]]
        for name in names:
            remaining = limit if not jobs else str(int(limit) - len(jobs))
            answer = await self._read_page(urls.get(name), query | {"limit": remaining}, request)
            query.pop("after", None)  # a cursor of this replica only
            if answer is None:
                missing.append(name)
            elif isinstance(answer, Response):
                return answer
            else:
                jobs += answer["data"]
                if len(jobs) >= int(limit):
                    return _make_page(jobs, answer["has_more"] or name != names[-1], missing)
        if missing == names:
            return _make_unavailable_response("no replica is reachable")
        return _make_page(jobs, False, missing)

    async def _read_page(
        self, url: str | None, query: dict[str, str], request: Request
    ) -> dict[str, Any] | Response | None:
        """Returns a replica's page of its jobs, its refusal, or None if it does not answer."""
        if url is None:
            return None
        headers = {"Authorization": request.headers.get("authorization", "")}
        try:
            async with self._client.get(
                f"{url}/v1/videos", params=query, headers=headers, timeout=_QUICK
            ) as answer:
                if answer.status == 200:
                    return dict(await answer.json())
                if answer.status >= 500:
                    return None
                return Response(await answer.read(), answer.status, _copy_headers(answer))
        except (aiohttp.ClientError, TimeoutError):
            return None

    async def _forward_request(self, urls: dict[str, str], request: Request, path: str) -> Response:
        of_job = _OF_JOB.match(path)
        name = of_job[1] if of_job else await self._find_soonest_replica(urls)
        if name not in urls:
            return _make_unavailable_response("no replica is reachable")
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _OF_FRONT}
        headers["X-Forwarded-Host"] = request.headers.get("host", "")
        query = request.scope["query_string"].decode("latin-1")
        url = URL(f"{urls[name]}{quote(path)}?{query}", encoded=True)
        has_body = {"content-length", "transfer-encoding"} & {*request.headers}
        body = request.stream() if has_body else None  # refused bodies are not held in memory
        answer = await self._client.request(request.method, url, data=body, headers=headers)
        content = answer.content.iter_chunked(1 << 16)
        return StreamingResponse(content, answer.status, _copy_headers(answer))

    async def _find_soonest_replica(self, urls: dict[str, str]) -> str:
        """Returns the healthy replica whose queue will be empty first; "" without replicas."""
        backlogs = dict(
            zip(urls, await asyncio.gather(*map(self._read_backlog, urls.values())), strict=True)
        )
        return min(backlogs, key=lambda name: backlogs[name], default="")

    async def _read_backlog(self, url: str) -> tuple[bool, float, int]:
        try:
            async with self._client.get(f"{url}/health", timeout=_QUICK) as answer:
                health = await answer.json()
                busy = health["queued"] + health["running"]  # the measure until a job was timed
                return answer.status != 200, health["seconds_ahead"], busy
        except (aiohttp.ClientError, TimeoutError):
            return True, float("inf"), 0


def _copy_headers(answer: aiohttp.ClientResponse) -> dict[str, str]:
    return {k: v for k, v in answer.headers.items() if k.lower() not in _OF_CONNECTION}


def _make_unavailable_response(why: str) -> Response:
    answer = _make_error_response(f"Try later: {why}.", 503, "replica_away")
    answer.headers["Retry-After"] = "5"
    return answer


def _make_error_response(message: str, status: int, code: str) -> Response:
    error_type = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": error_type, "code": code}}, status)


def _make_page(jobs: list[dict[str, Any]], more: bool, missing: list[str]) -> Response:
    first, last = (jobs[index]["id"] if jobs else None for index in (0, -1))
    ends = {"has_more": more, "first_id": first, "last_id": last, "missing": missing}
    return JSONResponse({"object": "list", "data": jobs, **ends})


def _read_key(settings: dict[str, str]) -> str:
    """Returns the API key of the file `api_key`, or of JOURNAL/key, which is written if missing."""
    path = Path(settings["api_key"] or f"{settings['journal']}/key").absolute()
    if not settings["api_key"]:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            os.write(file, secrets.token_hex(16).encode())
            os.close(file)
    key = path.read_text().strip()
    if len(key) < 16:
        raise ValueError(f"{path} holds a key of {len(key)} characters; give at least 16.")
    print(f"Requests need the API key in {path}.")
    return key


def build(arguments: dict[str, str]) -> Any:
    """Makes the application; arguments: replicas, ranks, devices, journal, api_key and flags.

    devices is "GPU", "NPU" or "" (none).
    """
    settings = {"replicas": "1", "ranks": "1", "devices": "", "journal": "videos", "flags": ""}
    settings |= {"api_key": "", **arguments}
    bundle = {"CPU": 1.0}
    if settings["devices"]:
        bundle |= {settings["devices"]: float(settings["ranks"])}
    kinds = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
    actor = {"num_cpus": 1, "num_gpus": bundle.get("GPU", 0), "resources": kinds}
    registry: Any = ray.remote(num_cpus=0)(Addresses)
    addresses = registry.options(
        name="wan-addresses", lifetime="detached", get_if_exists=True
    ).remote()
    key = _read_key(settings)
    replicas: Any = serve.deployment(
        Replica,
        num_replicas=int(settings["replicas"]),
        ray_actor_options=actor,
        placement_group_bundles=[bundle],
        placement_group_strategy="STRICT_PACK",
        health_check_period_s=2,
        health_check_timeout_s=10,
    )
    passing: Any = serve.deployment(
        Front, ray_actor_options={"num_cpus": 0}, max_ongoing_requests=1000
    )
    replica_handle = replicas.bind(settings, key, addresses)
    return passing.bind(int(settings["replicas"]), addresses, replica_handle)
