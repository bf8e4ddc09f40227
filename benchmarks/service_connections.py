"""Measures `python -m wan.serve` under 2 000 clients that are silent or slow.

    python -m benchmarks.service_connections --json results/service_connections.json

The service runs with 1 024 file descriptors. A process keeps four kinds of connections open: silent
ones, half of a request's headers, a body sent byte by byte, and a response that is never read. It
reopens each connection that the service closes, except for the last kind, which cannot detect it.
Meanwhile another client requests /health on separate connections, and videos are made. Front end
and clients share one core, the rank has the other. The program prints the seconds of /health and
of a step, with and without the clients, and the size of the log.
"""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import os
import resource
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.common import CPU, results_file, write_json
from benchmarks.service import pin_process
from tests.serve.serving import ServiceProcess
from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type, run_program
from wan.settings.values import integer, real

_DESCRIPTORS = 1024
_TIMEOUT = 10.0  # seconds after which /health counts as failed
_GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
_POST = b"POST /v1/videos HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\n"
_PAGES = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n" * 200
_KINDS = (*([b""] * 10), *([_GET] * 5), *([_POST] * 4), _PAGES)


def hold_connections(port: int, count: int, opened: Any) -> None:
    """Keeps `count` connections open until the process is killed; counts them in `opened`."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2 * count + 100, hard), hard))
    asyncio.run(_hold_all(port, count, opened))


async def _hold_all(port: int, count: int, opened: Any) -> None:
    async def hold_one(number: int) -> None:
        loop, sent = asyncio.get_running_loop(), _KINDS[number % len(_KINDS)]
        while True:
            with suppress(OSError), socket.socket() as client:
                client.setblocking(False)
                await loop.sock_connect(client, ("127.0.0.1", port))
                opened.value += 1
                await loop.sock_sendall(client, sent)
                while True:  # continue bodies and headers byte by byte; the others wait
                    await asyncio.sleep(1)
                    if sent in (_GET, _POST):
                        await loop.sock_sendall(client, b"x")
                    elif not sent and not await loop.sock_recv(client, 1):
                        break
            await asyncio.sleep(1)

    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(hold_one(number))
            await asyncio.sleep(0.001)


def poll_health(served: ServiceProcess, until: float) -> list[float | None]:
    """Requests /health until a time; returns the seconds of each response, None for failures."""
    answer_seconds: list[float | None] = []
    while time.monotonic() < until:
        start = time.monotonic()
        try:
            with socket.create_connection(("127.0.0.1", served.port), timeout=_TIMEOUT) as client:
                client.sendall(_GET + b"connection: close\r\n\r\n")
                answer = b""
                while part := client.recv(1 << 16):
                    answer += part
            answer_seconds.append(time.monotonic() - start if b" 200 OK" in answer[:20] else None)
        except OSError:
            answer_seconds.append(None)
        time.sleep(max(0.2 - (time.monotonic() - start), 0))
    return answer_seconds


def measure_service(served: ServiceProcess, seconds: float) -> dict[str, Any]:
    """Makes videos and polls /health for some seconds; returns their step and response times."""
    end, steps, answers = time.monotonic() + seconds, list[float](), list[float | None]()
    while time.monotonic() < end:
        video = served.create(num_inference_steps=30, num_frames=17)
        while served.status(video) != "completed":
            answers += poll_health(served, min(end, time.monotonic() + 1))
            time.sleep(0.05)
        record = json.loads((served.folder / "jobs" / video / "video.json").read_text())
        steps.append(record["seconds"]["denoising"] / 30)
    return {"step": steps, "health": answers}


def measure_connections(connections: int, seconds: float, work: Path) -> dict[str, Any]:
    """Measures the service before, during and after the connections; returns times and log."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_DESCRIPTORS, hard))
    served = ServiceProcess(work / "jobs")
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    cores, log = sorted(os.sched_getaffinity(0)), work / "jobs.log"
    opened = multiprocessing.Value("L", 0)
    holding = multiprocessing.Process(
        target=hold_connections, args=(served.port, connections, opened)
    )
    try:
        os.sched_setaffinity(0, cores[:1])
        pin_process(served.front.pid, cores[0])
        for pid in served.list_rank_pids():
            pin_process(pid, cores[-1])
        served.wait_for_video(served.create())
        first = measure_service(served, seconds / 2)
        size = log.stat().st_size
        holding.start()
        time.sleep(5)
        meanwhile = measure_service(served, seconds)
        holding.kill()
        holding.join()
        log_bytes = log.read_bytes()[size:]
        last = measure_service(served, seconds / 2)
    finally:
        if holding.is_alive():
            holding.kill()
        os.sched_setaffinity(0, cores)
        served.stop()
    alone = {name: first[name] + last[name] for name in first}
    logged = {
        "bytes": len(log_bytes),
        "lines": log_bytes.count(b"\n"),
        "text": log_bytes.decode(errors="replace"),
    }
    return {"alone": alone, "meanwhile": meanwhile, "log": logged, "opened": opened.value}


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--connections", type=make_argument_type(integer(1, 100_000)), default=2000)
    parser.add_argument("--seconds", type=make_argument_type(real(1, 1e6)), default=60.0)
    parser.add_argument("--json", type=results_file)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        results = measure_connections(options.connections, options.seconds, Path(folder))
    for name in ("alone", "meanwhile"):
        answered = [seconds for seconds in results[name]["health"] if seconds is not None]
        failed = len(results[name]["health"]) - len(answered)
        answered = answered or [math.nan]
        print(
            f"{name}: /health {1e3 * statistics.median(answered):.1f} ms, worst "
            f"{1e3 * max(answered):.1f} ms, {failed} of {len(answered) + failed} failed; a step "
            f"{1e3 * statistics.median(results[name]['step']):.1f} ms"
        )
    alone, meanwhile = (statistics.median(results[name]["step"]) for name in ("alone", "meanwhile"))
    print(f"a step: meanwhile / alone {meanwhile / alone:.3f}")
    log = results["log"]
    print(f"{results['opened']} connections; log {log['bytes']} bytes, {log['lines']} lines")
    sizes = {"connections": options.connections, "seconds": options.seconds}
    write_json(options.json, CPU, [sizes | {"descriptors": _DESCRIPTORS} | results])


if __name__ == "__main__":
    sys.exit(run_program(main))
