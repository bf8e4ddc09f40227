"""Run a mixed load with random cancels and kills on `python -m wan.serve`, and check its journal.

    python -m benchmarks.service_soak --minutes 30 --seed 1 --json results/service_soak.json
    python -m benchmarks.service_soak --jobs 200 --kill_every 0

Requests differ in frames, steps and seed; some are sent twice, some are deleted. About every
`--kill_every` seconds a rank or the front end is killed, or the service is stopped and started. At
the end the queue drains, and the journal must list every request: a job is completed with a full
video, or failed, or deleted without files, and equal requests have equal frames. The program exits
with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import hashlib
import os
import random
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import CPU, results_file, write_json
from tests.serve.serving import ServiceProcess
from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type, run_program
from wan.media.video_reader import read_video
from wan.settings.values import integer, real


def run_load(served: ServiceProcess, options: argparse.Namespace) -> dict[str, Any]:
    """Sends requests, cancels and kills until the limit of time or jobs is reached."""
    chance, start = random.Random(options.seed), time.monotonic()
    requests: dict[str, tuple[int, int, int]] = {}
    actions: collections.Counter[str] = collections.Counter()
    memory: list[int] = []
    next_kill = start + (options.kill_every or float("inf"))
    while len(requests) < options.jobs and time.monotonic() - start < 60 * options.minutes:
        with contextlib.suppress(OSError, AssertionError):
            if served.health().get("queued", 9) < 4:
                key = (chance.choice((5, 9, 17)), chance.choice((2, 4)), chance.randrange(3))
                fields = {"num_frames": key[0], "num_inference_steps": key[1], "seed": key[2]}
                name = f"{len(requests)}-{chance.randrange(10**9)}"
                for _ in range(2 if chance.random() < 0.1 else 1):
                    status, _, job = served.request(
                        "/v1/videos", {"prompt": "a red star"} | fields, Idempotency_Key=name
                    )
                    actions[f"POST {status}"] += 1
                    if status == 200:
                        requests[job["id"]] = key
                if requests and chance.random() < 0.15:
                    status, *_ = served.request(f"/v1/videos/{[*requests][-1]}", method="DELETE")
                    actions[f"DELETE {status}"] += 1
            if len(requests) % 20 == 5:
                memory.append(_read_resident_bytes(served))
        if time.monotonic() > next_kill:
            next_kill = time.monotonic() + options.kill_every * chance.uniform(0.5, 1.5)
            _disturb_service(
                served, chance.choice(("rank", "rank", "front", "stop")), actions, chance
            )
        time.sleep(0.05)
    served.wait(lambda: not (_has_open_jobs(served.health())), 300)
    memory.append(_read_resident_bytes(served))
    return {"did": dict(actions), "asked": requests, "resident_bytes": memory}


def _has_open_jobs(health: dict[str, Any]) -> bool:
    return health.get("status") != "ok" or health["queued"] > 0 or health["running"] > 0


def _disturb_service(
    served: ServiceProcess, target: str, actions: collections.Counter[str], chance: random.Random
) -> None:
    actions[f"killed: {target}"] += 1
    if target == "rank":
        ranks = served.list_rank_pids()
        with contextlib.suppress(OSError, IndexError):
            os.kill(chance.choice(ranks), signal.SIGKILL)
        return
    if target == "front":
        served.kill()
    elif served.stop():
        actions["stopped with an error"] += 1
    served.start()


def _read_resident_bytes(served: ServiceProcess) -> int:
    """Returns the resident bytes of the front end and all ranks."""
    total = 0
    for pid in (served.front.pid, *served.list_rank_pids()):
        with contextlib.suppress(OSError):
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            total += pages * os.sysconf("SC_PAGE_SIZE")
    return total


def check_journal(
    folder: Path, requests: dict[str, tuple[int, int, int]]
) -> tuple[dict[str, int], list[str]]:
    """Returns the counts of the jobs' final states, and the errors found."""
    rows = sqlite3.connect(folder / "journal.sqlite").execute(
        "SELECT id, state, attempt, frames, error FROM jobs"
    )
    ends: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    digests: dict[tuple[int, int, int], set[str]] = collections.defaultdict(set)
    journaled = set()
    for name, state, attempt, frames, error in rows:
        journaled.add(name)
        ends[f"{state}, attempt {attempt}"] += 1
        job_folder = folder / "jobs" / name
        files = {path.name for path in job_folder.iterdir()} if job_folder.exists() else set()
        if state == "completed":
            if files != {"video.mp4", "video.json"}:
                wrong.append(f"{name} has {files}")
                continue
            frame_bytes = [
                frame.tobytes()
                for frame in read_video(job_folder / "video.mp4", "video").iter_frames()
            ]
            if len(frame_bytes) != frames:
                wrong.append(f"{name} has {len(frame_bytes)} frames, not {frames}")
            digests[requests[name]].add(hashlib.sha256(b"".join(frame_bytes)).hexdigest())
        elif state == "failed":
            ends[str(error)] += 1
            if files:
                wrong.append(f"{name} has failed and has {files}")
        elif state == "deleted":
            if files:
                wrong.append(f"{name} is deleted and has {files}")
        else:
            wrong.append(f"{name} is {state}")
    wrong += [f"{name} is not in the journal" for name in requests.keys() - journaled]
    wrong += [
        f"{len(videos)} videos of {key}" for key, videos in digests.items() if len(videos) > 1
    ]
    return dict(ends), wrong


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the load, and prints the states of the jobs and the errors."""
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--minutes", type=make_argument_type(real(0, 1e5, exclude_min=True)), default=30
    )
    parser.add_argument(
        "--jobs",
        type=make_argument_type(integer(1, 10_000_000)),
        default=10**6,
        help="maximum number of requests",
    )
    parser.add_argument("--seed", type=make_argument_type(integer(0, 4_294_967_295)), default=1)
    parser.add_argument("--ranks", type=make_argument_type(integer(1, 64)), default=2)
    parser.add_argument(
        "--kill_every",
        type=make_argument_type(real(0, 1e6)),
        default=45,
        help="mean seconds between kills; 0: none (45)",
    )
    parser.add_argument("--json", type=results_file)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        served = ServiceProcess(Path(folder) / "jobs", options.ranks)
        try:
            figures = run_load(served, options)
        finally:
            served.stop()
        requests = figures.pop("asked")
        ends, wrong = check_journal(served.folder, requests)
    memory = [n for n in figures["resident_bytes"] if n]
    print(f"{len(requests)} jobs; {figures['did']}")
    print(f"ends: {ends}")
    print(f"resident MB: {[round(n / 1e6) for n in memory]}")
    print(f"wrong: {wrong or 'nothing'}")
    write_json(options.json, CPU, [figures | {"jobs": len(requests), "ends": ends, "wrong": wrong}])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(run_program(main))
