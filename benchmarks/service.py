"""Compares `python -m wan.serve` with `--prompt_file`, and times its recovery from a lost rank.

    python -m benchmarks.service --rounds 3 --json results/service.json

The program runs the demo checkpoint in separate processes and prints four results:

- seconds of a video in the service over those of the same video in a `--prompt_file` run, both in
  each round, in alternating order;
- seconds of a step while a client polls 50 times a second over those without a client, with the
  front end and the client pinned to one core and the rank to the other, and CPU milliseconds of a
  poll;
- microseconds of the byte on which two pinned ranks agree before a step;
- seconds from the kill of one of two ranks to the first step of the restarted job.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import add_json_option, run_on_ranks, write_json
from benchmarks.service_process import PROMPT, REPO, LocalService
from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type, run_program
from wan.settings.values import integer
from wan.testing.measuring import CPU

_VIDEO = {"prompt": PROMPT, "frame_num": 17, "sample_steps": 8}


def measure_overhead(rounds: int, videos: int, work: Path) -> list[dict[str, float]]:
    """Returns the seconds of a video in the service and from a prompt file, for each round."""
    served, seconds_by_round = LocalService(work / "jobs"), []
    try:
        for number in range(rounds):
            ways = {
                "service": lambda: _time_service(served, videos),
                "prompt_file": lambda: _time_prompt_file(work, videos),
            }
            names = list(ways) if number % 2 else list(ways)[::-1]
            seconds_by_round.append({name: ways[name]() for name in names})
    finally:
        served.stop()
    return seconds_by_round


def _time_service(served: LocalService, videos: int) -> float:
    """Returns the seconds of a video in the service, without the first.

    A prompt file encodes all prompts before its first video.
    """
    job_ids = [
        served.request("/v1/videos", _VIDEO | {"seed": n})[2]["id"] for n in range(videos + 1)
    ]
    served.wait_for_video(job_ids[-1], 600)
    times = []
    for job_id in (job_ids[0], job_ids[-1]):
        record = served.folder / "jobs" / job_id / "video.json"
        times.append(record.stat().st_mtime)
    return (times[1] - times[0]) / videos


def _time_prompt_file(work: Path, videos: int) -> float:
    lines = work / "lines.jsonl"
    lines.write_text("".join(json.dumps(_VIDEO | {"seed": n}) + "\n" for n in range(videos + 1)))
    folder = work / "made"
    command = [sys.executable, "generate.py", "--prompt_file", str(lines)]
    command += ["--save_file", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, cwd=REPO, check=True, capture_output=True)
    records = sorted(path.stat().st_mtime for path in folder.glob("[0-9]*.json"))
    return (records[-1] - records[0]) / videos


def measure_polls(rounds: int, work: Path) -> dict[str, Any]:
    """Returns seconds of a step with and without a polling client, and CPU time of a poll."""
    served = LocalService(work / "polled")
    figures: dict[str, Any] = {"alone": [], "polled": []}
    cores = sorted(os.sched_getaffinity(0))
    try:
        os.sched_setaffinity(0, cores[:1])
        pin_process(served.front.pid, cores[0])
        for pid in served.list_rank_pids():
            pin_process(pid, cores[-1])
        spent, count = 0.0, 0
        for number in range(2 * rounds):
            kind = ("alone", "polled")[(number + number // 2) % 2]
            video = served.create(num_inference_steps=30, num_frames=17)
            cpu_before = _read_cpu_seconds(served.front.pid)
            finished = threading.Event()
            if kind == "polled":
                while not finished.is_set():
                    start = time.monotonic()
                    if served.status(video) == "completed":
                        finished.set()
                    count += 1
                    time.sleep(max(0.02 - (time.monotonic() - start), 0))
                spent += _read_cpu_seconds(served.front.pid) - cpu_before
            else:
                while served.status(video) != "completed":
                    time.sleep(1)
            record = json.loads((served.folder / "jobs" / video / "video.json").read_text())
            figures[kind].append(record["seconds"]["denoising"] / 30)
        figures["cpu_ms_of_a_poll"] = 1000 * spent / max(count, 1)
    finally:
        os.sched_setaffinity(0, cores)
        served.stop()
    return figures


def pin_process(pid: int, core: int) -> None:
    """Pins all threads of a process to one core."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), [core])


def _read_cpu_seconds(pid: int) -> float:
    """Returns a process's seconds of CPU time."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_agreement(calls: int = 2000) -> float:
    """Returns microseconds of the exchange of one byte on which two pinned ranks agree."""
    return statistics.median(result["us"] for result in run_on_ranks(2, _time_agreement, calls))


def _time_agreement(calls: int) -> dict[str, float]:
    import torch.distributed as dist

    from wan import device as devices
    from wan.distributed.gloo_group import GlooGroup
    from wan.distributed.mesh import make_parallel_groups

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, [cores[dist.get_rank() % len(cores)]])
    control = GlooGroup(make_parallel_groups(devices.select_device("cpu"), (1, 1, 2)))
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        control.all_reduce_max(0)
        times.append(time.perf_counter() - start)
    os.sched_setaffinity(0, cores)
    return {"us": 1e6 * statistics.median(times)}


def measure_recovery(rounds: int, work: Path) -> list[float]:
    """Returns seconds from the kill of a rank to the next step of the job, for each round."""
    served, recovery_seconds = LocalService(work / "lost", 2), []
    try:
        for _ in range(rounds):
            video = served.create(num_inference_steps=30, num_frames=17)
            served.wait(partial(_has_stepped, served, video, 1))
            os.kill(served.list_rank_pids()[-1], signal.SIGKILL)
            start = time.monotonic()
            served.wait(partial(_has_stepped, served, video, 2))
            recovery_seconds.append(time.monotonic() - start)
            served.request(f"/v1/videos/{video}", method="DELETE")
    finally:
        served.stop()
    return recovery_seconds


def _has_stepped(served: LocalService, video: str, attempt: int) -> bool:
    """Whether an attempt of a video has taken a step."""
    job = served.request(f"/v1/videos/{video}")[2]
    return job["attempt"] == attempt and job["steps"][0] > 0


def main(argv: Sequence[str] | None = None) -> None:
    """Runs all four measurements."""
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=make_argument_type(integer(1, 10_000)), default=3)
    parser.add_argument(
        "--videos",
        type=make_argument_type(integer(1, 10_000)),
        default=6,
        help="videos of a round (6)",
    )
    add_json_option(parser)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        rounds = measure_overhead(options.rounds, options.videos, work)
        differences = [measured["service"] - measured["prompt_file"] for measured in rounds]
        share = [measured["service"] / measured["prompt_file"] for measured in rounds]
        print(
            f"a video: service - prompt file {1000 * statistics.median(differences):.0f} ms "
            f"({1000 * min(differences):.0f} to {1000 * max(differences):.0f}), ratio "
            f"{statistics.median(share):.3f} ({min(share):.3f} to {max(share):.3f})",
            flush=True,
        )
        polled = measure_polls(options.rounds, work)
        pairs = zip(polled["polled"], polled["alone"], strict=True)
        slower = [measured / other for measured, other in pairs]
        print(
            f"a step: polled / alone {statistics.median(slower):.3f} ({min(slower):.3f} to "
            f"{max(slower):.3f}), {polled['cpu_ms_of_a_poll']:.2f} CPU ms of a poll",
            flush=True,
        )
        agreed = measure_agreement()
        print(f"the ranks' agreement: {agreed:.0f} us", flush=True)
        lost = measure_recovery(options.rounds, work)
        print(f"killed rank to next step: {statistics.median(lost):.1f} s {lost}", flush=True)
        results = {"overhead": rounds, "polls": polled, "agreement_us": agreed, "recovery_s": lost}
        write_json(options.json, CPU, [results])


if __name__ == "__main__":
    sys.exit(run_program(main))
