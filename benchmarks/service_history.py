"""Measures requests of `python -m wan.serve` with many videos in its journal.

    python -m benchmarks.service_history --json docs/results/service_history.json

For each number of completed videos, the program fills a journal, opens a service without ranks in
its own process, queues some videos, and times /health, the poll of a queued and of a completed
video, and a page of the list, without sockets.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import CPU, results_file, write_json
from tests.serve.jobs import Jobs
from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type, run_program
from wan.settings.values import integer

_QUEUED = 100  # queued videos; earlier versions read the whole history for each


async def fill_journal(folder: Path, videos: int) -> None:
    """Writes completed videos to the journal of a folder."""
    jobs = Jobs(folder)
    journal = jobs.service.journal
    name = await jobs.create()
    jobs.complete(name)
    first = jobs.service.find_job(name)
    for number in range(1, videos):
        journal.restore_job(replace(first, id=f"video_{number:024x}", digest="", ended=number))
    await journal.save()
    journal.close()


async def measure_requests(folder: Path, rounds: int) -> dict[str, list[float]]:
    """Returns the milliseconds of each request, by kind."""
    began = time.perf_counter()
    jobs = Jobs(folder)
    milliseconds = {"open": [1e3 * (time.perf_counter() - began)]}
    completed = jobs.service.journal.list_completed(1)[0].id
    queued = [await jobs.create() for _ in range(_QUEUED)][-1]
    paths = {
        "health": "/health",
        "queued": f"/v1/videos/{queued}",
        "completed": f"/v1/videos/{completed}",
        "list": "/v1/videos?limit=20",
    }
    for kind, path in paths.items():
        times = milliseconds[kind] = []
        for _ in range(rounds):
            began = time.perf_counter()
            status, _, answer = await jobs.request(path)
            times.append(round(1e3 * (time.perf_counter() - began), 3))
            assert status in (200, 503), answer  # /health: no ranks
    jobs.service.journal.close()
    return milliseconds


def main(argv: Sequence[str] | None = None) -> None:
    count = make_argument_type(integer(1, 1_000_000))
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--videos", type=count, nargs="+", default=[100, 10_000, 100_000])
    parser.add_argument("--rounds", type=count, default=200)
    parser.add_argument("--json", type=results_file)
    options = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results: list[dict[str, Any]] = []
    for videos in options.videos:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(fill_journal(Path(folder), videos))
            milliseconds = asyncio.run(measure_requests(Path(folder), options.rounds))
        medians = {kind: statistics.median(times) for kind, times in milliseconds.items()}
        shown = ", ".join(
            f"{kind} {median:.2f} ms (worst {max(milliseconds[kind]):.1f})"
            for kind, median in medians.items()
        )
        print(f"{videos} videos: {shown}", flush=True)
        results.append({"videos": videos, "queued": _QUEUED, "milliseconds": milliseconds})
    write_json(options.json, CPU, results)


if __name__ == "__main__":
    sys.exit(run_program(main))
