"""Runs several `python -m wan.serve` services as one Ray Serve application.

    pip install "ray[serve]" -r requirements-serve.txt
    serve run examples.serve.ray_app:build replicas=2    # the demo, on this machine
    serve run examples.serve.ray_app:build replicas=4 ranks=8 devices=GPU journal=/shared/videos \
        flags="--ckpt_dir /shared/Wan2.2-T2V-A14B --ulysses_size 8 --comm_type 1"

A replica is one group of ranks with one service: all its devices are on one machine (STRICT_PACK),
and its journal is a folder that every machine can access. Ray restarts an ended replica with the
same name and journal, so that its jobs continue. New jobs go to the replica whose queue will be
empty first; requests about a job go to the replica named in the job's id.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
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

try:
    import aiohttp
    import ray
    from ray import serve
    from ray.util import get_node_ip_address
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
except ModuleNotFoundError as error:
    from wan.app.programs import exit_without_package

    exit_without_package(error)


_OF_JOB = re.compile(r"/v1/videos/video_(r\d+)_")
_OF_CONNECTION = {"connection", "keep-alive", "transfer-encoding"}  # headers not forwarded
_OF_FRONT = _OF_CONNECTION | {"host", "content-length", "authorization", "x-forwarded-host"}


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
        # Only the fronts, on any node, have the key.
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
    """Forwards requests to replicas. It is stateless, so several may run."""

    def __init__(self, key: str, addresses: Any, replicas: Any) -> None:
        """Opens the client session.

        Args:
            replicas: Handle of the replicas; Ray starts them before this and ends them with it.
        """
        self._addresses, self._replicas = addresses, replicas
        self._client = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}"}, timeout=aiohttp.ClientTimeout(None)
        )

    async def __call__(self, request: Request) -> Response:
        urls = await self._addresses.all.remote()
        try:
            if request.method == "GET" and request.url.path == "/v1/videos":
                return await self._list_jobs(urls, dict(request.query_params))
            return await self._forward_request(urls, request)
        except aiohttp.ClientConnectionError:
            return _make_unavailable_response("a replica is being restarted")

    async def _list_jobs(self, urls: dict[str, str], query: dict[str, str]) -> Response:
        """Lists the jobs of all replicas in the order of their names, one page from the cursor."""
        cursor = _OF_JOB.match(f"/v1/videos/{query.get('after', '')}")
        jobs, limit = list[dict[str, Any]](), query.get("limit", "20")
        names = sorted(name for name in urls if cursor is None or name >= cursor[1])
        for name in names:
            remaining = limit if not jobs else str(int(limit) - len(jobs))
            url = f"{urls[name]}/v1/videos"
            async with self._client.get(url, params=query | {"limit": remaining}) as answer:
                if answer.status != 200:
                    return Response(await answer.read(), answer.status, _copy_headers(answer))
                page = await answer.json()
            jobs += page["data"]
            query.pop("after", None)  # a cursor of this replica only
            if len(jobs) >= int(limit):
                return _make_page(jobs, page["has_more"] or name != names[-1])
        return _make_page(jobs, False)

    async def _forward_request(self, urls: dict[str, str], request: Request) -> Response:
        of_job = _OF_JOB.match(request.url.path)
        name = of_job[1] if of_job else await self._find_soonest_replica(urls)
        if name not in urls:
            return _make_unavailable_response("no replica is reachable")
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _OF_FRONT}
        headers["X-Forwarded-Host"] = request.headers.get("host", "")
        url, body = f"{urls[name]}{request.url.path}", await request.body()
        answer = await self._client.request(
            request.method, url, params=request.query_params, data=body, headers=headers
        )
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
            async with self._client.get(f"{url}/health") as answer:
                health = await answer.json()
                busy = health["queued"] + health["running"]  # the measure until a job was timed
                return answer.status != 200, health["seconds_ahead"], busy
        except aiohttp.ClientError:
            return True, float("inf"), 0


def _copy_headers(answer: aiohttp.ClientResponse) -> dict[str, str]:
    return {k: v for k, v in answer.headers.items() if k.lower() not in _OF_CONNECTION}


def _make_unavailable_response(why: str) -> Response:
    error = {"message": f"Try later: {why}.", "type": "server_error", "code": "replica_away"}
    return JSONResponse({"error": error}, 503, {"Retry-After": "5"})


def _make_page(jobs: list[dict[str, Any]], more: bool) -> Response:
    first, last = (jobs[index]["id"] if jobs else None for index in (0, -1))
    ends = {"has_more": more, "first_id": first, "last_id": last}
    return JSONResponse({"object": "list", "data": jobs, **ends})


def build(arguments: dict[str, str]) -> Any:
    """Makes the application from replicas, ranks (per replica), devices, journal and flags.

    devices is "GPU", "NPU" or "" (none).
    """
    settings = {"replicas": "1", "ranks": "1", "devices": "", "journal": "videos", "flags": ""}
    settings |= arguments
    bundle = {"CPU": 1.0}
    if settings["devices"]:
        bundle |= {settings["devices"]: float(settings["ranks"])}
    kinds = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
    actor = {"num_cpus": 1, "num_gpus": bundle.get("GPU", 0), "resources": kinds}
    registry: Any = ray.remote(num_cpus=0)(Addresses)
    addresses = registry.options(
        name="wan-addresses", lifetime="detached", get_if_exists=True
    ).remote()
    key = secrets.token_hex(16)
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
    return passing.bind(key, addresses, replicas.bind(settings, key, addresses))
