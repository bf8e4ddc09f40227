"""Compare `python -m wan.serve` with `--prompt_file`, and time its recovery from a lost rank.

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

from benchmarks.common import CPU, launch, results_file, write_json
from tests.dist import GENERATE, TORCHRUN
from tests.serve.serving import PROMPT, Served
from wan.cli.flags import Parser
from wan.cli.programs import make_argument_type, run_program
from wan.settings.values import integer

_VIDEO = {"prompt": PROMPT, "frame_num": 17, "sample_steps": 8}


def overhead(rounds: int, videos: int, work: Path) -> list[dict[str, float]]:
    """Returns the seconds of a video in the service and from a prompt file, for each round."""
    served, found = Served(work / "jobs"), []
    try:
        for number in range(rounds):
            ways = {
                "service": lambda: _by_service(served, videos),
                "prompt_file": lambda: _by_file(work, videos),
            }
            names = list(ways) if number % 2 else list(ways)[::-1]
            found.append({name: ways[name]() for name in names})
    finally:
        served.stop()
    return found


def _by_service(served: Served, videos: int) -> float:
    """Returns the seconds of a video in the service, without the first.

    A prompt file encodes all prompts before its first video.
    """
    made = [served.ask("/v1/videos", _VIDEO | {"seed": n})[2]["id"] for n in range(videos + 1)]
    served.ended(made[-1], 600)
    times = []
    for one in (made[0], made[-1]):
        record = served.folder / "jobs" / one / "video.json"
        times.append(record.stat().st_mtime)
    return (times[1] - times[0]) / videos


def _by_file(work: Path, videos: int) -> float:
    lines = work / "lines.jsonl"
    lines.write_text("".join(json.dumps(_VIDEO | {"seed": n}) + "\n" for n in range(videos + 1)))
    folder = work / "made"
    command = [sys.executable, GENERATE, "--prompt_file", str(lines), "--save_file", str(folder)]
    subprocess.run(command, env=os.environ | TORCHRUN, check=True, capture_output=True)
    records = sorted(path.stat().st_mtime for path in folder.glob("[0-9]*.json"))
    return (records[-1] - records[0]) / videos


def polls(rounds: int, work: Path) -> dict[str, Any]:
    """Returns seconds of a step with and without a polling client, and CPU time of a poll."""
    served = Served(work / "polled")
    found: dict[str, Any] = {"alone": [], "polled": []}
    cores = sorted(os.sched_getaffinity(0))
    try:
        os.sched_setaffinity(0, cores[:1])
        pin(served.front.pid, cores[0])
        for pid in served.ranks():
            pin(pid, cores[-1])
        spent, count = 0.0, 0
        for number in range(2 * rounds):
            kind = ("alone", "polled")[(number + number // 2) % 2]
            video = served.create(num_inference_steps=30, num_frames=17)
            before = _cpu(served.front.pid)
            over = threading.Event()
            if kind == "polled":
                while not over.is_set():
                    begun = time.monotonic()
                    if served.status(video) == "completed":
                        over.set()
                    count += 1
                    time.sleep(max(0.02 - (time.monotonic() - begun), 0))
                spent += _cpu(served.front.pid) - before
            else:
                while served.status(video) != "completed":
                    time.sleep(1)
            record = json.loads((served.folder / "jobs" / video / "video.json").read_text())
            found[kind].append(record["seconds"]["denoising"] / 30)
        found["cpu_ms_of_a_poll"] = 1000 * spent / max(count, 1)
    finally:
        os.sched_setaffinity(0, cores)
        served.stop()
    return found


def pin(pid: int, core: int) -> None:
    """Pins all threads of a process to one core."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), [core])


def _cpu(pid: int) -> float:
    """Returns a process's seconds of CPU time."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def agreement(calls: int = 2000) -> float:
    """Returns microseconds of the exchange of one byte on which two pinned ranks agree."""
    return statistics.median(one["us"] for one in launch(2, _agree, calls))


def _agree(calls: int) -> dict[str, float]:
    import torch.distributed as dist

    from wan import device as devices
    from wan.distributed.gloo_group import GlooGroup
    from wan.distributed.mesh import make_parallel_groups

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, [cores[dist.get_rank() % len(cores)]])
    control = GlooGroup(make_parallel_groups(devices.select_device("cpu"), (1, 1, 2)))
    times = []
    for _ in range(calls):
        begun = time.perf_counter()
        control.all_reduce_max(0)
        times.append(time.perf_counter() - begun)
    os.sched_setaffinity(0, cores)
    return {"us": 1e6 * statistics.median(times)}


def recovery(rounds: int, work: Path) -> list[float]:
    """Returns seconds from the kill of a rank to the next step of the job, for each round."""
    served, found = Served(work / "lost", 2), []
    try:
        for _ in range(rounds):
            video = served.create(num_inference_steps=30, num_frames=17)
            served.wait(partial(_stepped, served, video, 1))
            os.kill(served.ranks()[-1], signal.SIGKILL)
            begun = time.monotonic()
            served.wait(partial(_stepped, served, video, 2))
            found.append(time.monotonic() - begun)
            served.ask(f"/v1/videos/{video}", method="DELETE")
    finally:
        served.stop()
    return found


def _stepped(served: Served, video: str, attempt: int) -> bool:
    """Whether an attempt of a video has taken a step."""
    told = served.ask(f"/v1/videos/{video}")[2]
    return told["attempt"] == attempt and told["steps"][0] > 0


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
    parser.add_argument("--json", type=results_file)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        rounds = overhead(options.rounds, options.videos, work)
        over = [one["service"] - one["prompt_file"] for one in rounds]
        share = [one["service"] / one["prompt_file"] for one in rounds]
        print(
            f"a video: service - prompt file {1000 * statistics.median(over):.0f} ms "
            f"({1000 * min(over):.0f} to {1000 * max(over):.0f}), ratio "
            f"{statistics.median(share):.3f} ({min(share):.3f} to {max(share):.3f})",
            flush=True,
        )
        polled = polls(options.rounds, work)
        pairs = zip(polled["polled"], polled["alone"], strict=True)
        slower = [one / other for one, other in pairs]
        print(
            f"a step: polled / alone {statistics.median(slower):.3f} ({min(slower):.3f} to "
            f"{max(slower):.3f}), {polled['cpu_ms_of_a_poll']:.2f} CPU ms of a poll",
            flush=True,
        )
        agreed = agreement()
        print(f"the ranks' agreement: {agreed:.0f} us", flush=True)
        lost = recovery(options.rounds, work)
        print(f"killed rank to next step: {statistics.median(lost):.1f} s {lost}", flush=True)
        found = {"overhead": rounds, "polls": polled, "agreement_us": agreed, "recovery_s": lost}
        write_json(options.json, CPU, [found])


if __name__ == "__main__":
    sys.exit(run_program(main))
