"""Runs a mixed load with random kills on `python -m wan.serve`, and checks everything it has left.

    python -m benchmarks.service_soak --minutes 30 --seed 1 --json results/service_soak.json
    python -m benchmarks.service_soak --minutes 10 --kill_every 0

Seeded clients (`benchmarks.service_clients`) create videos with and without LoRAs, previews and
webhooks, poll, list, delete and remix them, wait for them, listen to their events, download them
and send bad requests. About every `--kill_every` seconds a rank or the front end is killed, or the
service is stopped and started. The webhooks' receiver fails every third time. Completed videos
move to a folder as their store.

At the end the queue drains. Then the journal must have every job that a client was told of:
completed with a whole video in the store, failed, or deleted without files; equal requests have
equal frames; each end was delivered to its webhook, those of a job in order. The program exits
with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import hashlib
import itertools
import os
import random
import re
import signal
import sqlite3
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.common import add_json_option, write_json
from benchmarks.service_clients import Ledger, SeededClient
from benchmarks.service_process import REPO, LocalService
from benchmarks.webhook_receiver import Receiver
from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type, run_program
from wan.checkpoint.layout import inspect_checkpoint
from wan.media.video_reader import read_video
from wan.serve.jobs.folders import list_output_files
from wan.settings.values import integer, real
from wan.testing.measuring import CPU

_SECRET = "secret of the load"
_ANSWERS = (200, 200, 500, 200, 200, 0)  # of the receiver; 0: none
_SAMPLE_SECONDS = 5.0  # between two measurements of memory
_DRAIN_SECONDS = 600.0
_START_SECONDS = 600.0  # other programs may use all cores
_LOCAL_SECONDS = 15.0  # after which a stored video is no longer on the local disk


def write_loras(folder: Path) -> None:
    """Writes the LoRAs a and b of all linear layers of the blocks of the demo checkpoint."""
    experts = inspect_checkpoint(REPO / "examples" / "demo" / "t2v-A14B").experts
    (tensors, *_) = (files.tensors for files in experts.values())
    for seed, name in enumerate(("a", "b")):
        generator = torch.Generator().manual_seed(seed)
        factors: dict[str, torch.Tensor] = {}
        for parameter, info in tensors.items():
            layer, _, suffix = parameter.rpartition(".")
            if layer.startswith("blocks.") and suffix == "weight" and len(info.shape) == 2:
                rows, columns = info.shape
                down = torch.randn(4, columns, generator=generator) / columns**0.5
                up = torch.randn(rows, 4, generator=generator) / 10
                factors |= {f"{layer}.lora_down.weight": down, f"{layer}.lora_up.weight": up}
        save_file(factors, folder / f"{name}.safetensors")


def start_service(work: Path, ranks: int) -> LocalService:
    """Starts the service with two LoRAs, webhooks and a store, in a folder."""
    loras, secret = work / "loras", work / "secret"
    loras.mkdir()
    write_loras(loras)
    secret.write_text(_SECRET)
    options = ["--lora_folder", loras, "--webhook_secret_file", secret, "--store", work / "store"]
    options += ["--webhook_hosts", "localhost", "--webhook_hosts", "127.0.0.0/8"]
    return LocalService(work / "jobs", ranks, options)


def run_load(
    served: LocalService, hook: str, options: argparse.Namespace
) -> tuple[Ledger, dict[str, Any]]:
    """Runs the clients, and kills processes, until the limit of time or jobs is reached.

    Returns:
        What the clients know, and the memory over time and the numbers of kills.
    """
    chance, start = random.Random(options.seed), time.monotonic()
    ledger, finished = Ledger(), threading.Event()
    threads = [
        threading.Thread(target=client.run, args=(finished,), daemon=True)
        for client in (
            SeededClient(served, ledger, hook, f"{options.seed}-{number}", options.jobs)
            for number in range(options.clients)
        )
    ]
    kills: collections.Counter[str] = collections.Counter()
    memory: list[tuple[float, float, list[float]]] = []
    for thread in threads:
        thread.start()
    next_kill, shown = start + (options.kill_every or float("inf")), 0
    while len(ledger.wanted) < options.jobs and time.monotonic() - start < 60 * options.minutes:
        for sentence in ledger.wrong[shown:]:
            print(f"wrong: {sentence}", flush=True)
            shown += 1
        megabytes = _read_resident_megabytes(served)
        if len(megabytes) == 1 + options.ranks:
            memory.append((round(time.monotonic() - start, 1), megabytes[0], megabytes[1:]))
        if time.monotonic() > next_kill:
            target = chance.choice(("rank", "rank", "front", "stop"))
            _disturb_service(served, target, kills, chance)
            next_kill = time.monotonic() + options.kill_every * chance.uniform(0.5, 1.5)
        time.sleep(min(_SAMPLE_SECONDS, max(next_kill - time.monotonic(), 0.05)))
    finished.set()
    for thread in threads:
        thread.join(300)
        if thread.is_alive():
            ledger.wrong.append("a client has not ended")
    served.wait(lambda: _is_drained(served), _DRAIN_SECONDS)
    time.sleep(_LOCAL_SECONDS)
    if count := served.count_tracebacks():
        kills["tracebacks"] += count
    return ledger, {"kills": dict(kills), "memory": memory}


def _is_drained(served: LocalService) -> bool:
    """Whether no job, webhook or upload is left."""
    health = served.health()
    if health.get("status") != "ok" or health["queued"] or health["running"]:
        return False
    text = served.request("/metrics")[2].decode()
    waiting = re.findall(r"^wan_(?:webhooks|store)_waiting (\S+)$", text, re.MULTILINE)
    return [float(number) for number in waiting] == [0.0, 0.0]


def _disturb_service(
    served: LocalService, target: str, kills: collections.Counter[str], chance: random.Random
) -> None:
    kills[target] += 1
    if target == "rank":
        ranks = served.list_rank_pids()
        with contextlib.suppress(OSError, IndexError):
            os.kill(chance.choice(ranks), signal.SIGKILL)
        return
    kills["tracebacks"] += served.count_tracebacks()
    if target == "front":
        served.kill()
    elif served.stop():
        kills["stopped with an error"] += 1
    served.start(_START_SECONDS)


def _read_resident_megabytes(served: LocalService) -> list[float]:
    """Returns the resident megabytes of the front end and of each rank."""
    megabytes = []
    for pid in (served.front.pid, *served.list_rank_pids()):
        with contextlib.suppress(OSError):
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            megabytes.append(round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1))
    return megabytes


def summarize_memory(
    memory: Sequence[tuple[float, float, list[float]]],
) -> dict[str, list[float]]:
    """Returns the median megabytes of the front end and of a rank in each quarter of the time."""
    quarters: list[list[tuple[float, float]]] = [[], [], [], []]
    for seconds, front, ranks in memory:
        number = min(int(4 * seconds / memory[-1][0]), 3) if memory[-1][0] else 0
        quarters[number].append((front, statistics.mean(ranks)))
    return {
        name: [statistics.median(pair[i] for pair in quarter) for quarter in quarters if quarter]
        for i, name in enumerate(("front", "rank"))
    }


def check_journal(work: Path, ledger: Ledger) -> tuple[dict[str, int], list[str]]:
    """Returns the counts of the jobs' ends, and the errors found."""
    rows = sqlite3.connect(work / "jobs" / "journal.sqlite").execute(
        'SELECT id, state, attempt, frames, error, "key" FROM jobs'
    )
    ends: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    digests: dict[tuple[Any, ...], set[str]] = collections.defaultdict(set)
    journaled, unknown = set(), 0
    for name, state, attempt, frames, error, key in rows:
        journaled.add(name)
        ends[f"{state}, attempt {attempt}" if state != "deleted" else state] += 1
        local, stored = (
            _list_files(work / "jobs" / "jobs" / name),
            _list_files(work / "store" / name),
        )
        if name not in ledger.wanted:  # of a client that left
            unknown += state == "deleted"
            if state != "deleted" and key not in ledger.abandoned:
                wrong.append(f"{name} was never asked for")
        elif (state == "deleted") != (name in ledger.deleted):
            wrong.append(f"{name} is {state}; deleted by a client: {name in ledger.deleted}")
        if state == "completed":
            is_local = {"video.json"} <= local <= {"video.json", "video.preview.jpg"}
            if not is_local or stored != {*list_output_files(0)}:
                wrong.append(f"{name} has {local}, and {stored} in the store")
                continue
            count, digest = _hash_frames(work / "store" / name / "video.mp4")
            if count != frames:
                wrong.append(f"{name} has {count} frames, not {frames}")
            if name in ledger.wanted:
                digests[ledger.wanted[name].content].add(digest)
        elif state not in ("failed", "deleted"):
            wrong.append(f"{name} is {state}")
        elif local or stored:
            wrong.append(f"{name} is {state} and has {local}, and {stored} in the store")
        if state == "failed":
            ends[str(error)] += 1
    lost = len(ledger.wanted.keys() - journaled)
    wrong += [f"{lost} jobs are lost"] if lost else []
    if unknown > len(ledger.abandoned):
        wrong.append(f"{unknown} unknown jobs are deleted, {len(ledger.abandoned)} clients left")
    wrong += [
        f"{len(videos)} videos of {key}" for key, videos in digests.items() if len(videos) > 1
    ]
    if len({*itertools.chain(*digests.values())}) < len(digests):
        wrong.append("different requests have equal frames")
    return dict(ends) | {"lost": lost}, wrong


def _list_files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def _hash_frames(path: Path) -> tuple[int, str]:
    """Returns the number of frames of a video, and a digest of them."""
    frames = [frame.tobytes() for frame in read_video(path, "video").iter_frames()]
    return len(frames), hashlib.sha256(b"".join(frames)).hexdigest()


def check_webhooks(
    work: Path, ledger: Ledger, receiver: Receiver
) -> tuple[dict[str, int], list[str]]:
    """Returns the counts of the webhooks' events, and the errors found."""
    rows = sqlite3.connect(work / "jobs" / "journal.sqlite").execute("SELECT id, state FROM jobs")
    states = dict(rows)
    accepted: dict[str, list[str]] = collections.defaultdict(list)
    for kind, name in receiver.list_events(only_accepted=True):
        accepted[name].append(kind.removeprefix("video."))
    missing = [
        name
        for name, wanted in ledger.wanted.items()
        if wanted.has_webhook and (accepted[name] or [""])[-1] != states.get(name)
    ]
    disordered = [
        name
        for name, kinds in accepted.items()
        if kinds != sorted(kinds, key="deleted".__eq__) or len({*kinds} - {"deleted"}) > 1
    ]
    unasked = [
        name
        for name, kinds in accepted.items()
        if kinds and (name in ledger.wanted and not ledger.wanted[name].has_webhook)
    ]
    counts = {
        "requests": len(receiver.received),
        "accepted": len(receiver.accepted),
        "events": sum(len({*kinds}) for kinds in accepted.values()),
        "missing": len(missing),
        "out of order": len(disordered),
    }
    wrong = [f"{name}: {states.get(name)}, events {accepted[name]}" for name in missing]
    wrong += [f"{name}: the order is {accepted[name]}" for name in disordered]
    return counts, wrong + [f"{name} has a webhook that nobody asked for" for name in unasked]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the load, and prints the ends of the jobs, the memory and the errors."""
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    add, count = parser.add_argument, make_argument_type(integer(1, 64))
    add("--minutes", type=make_argument_type(real(0, 1e5, exclude_min=True)), default=30)
    add(
        "--jobs",
        type=make_argument_type(integer(1, 10_000_000)),
        default=10**6,
        help="maximum number of jobs",
    )
    add("--seed", type=make_argument_type(integer(0, 4_294_967_295)), default=1)
    add("--ranks", type=count, default=2)
    add("--clients", type=count, default=6)
    add(
        "--kill_every",
        type=make_argument_type(real(0, 1e6)),
        default=45,
        help="mean seconds between kills; 0: none (45)",
    )
    add_json_option(parser)
    options = parser.parse_args(argv)
    receiver = Receiver()
    receiver.statuses = itertools.cycle(_ANSWERS)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        served = start_service(work, options.ranks)
        try:
            ledger, figures = run_load(served, receiver.url, options)
        finally:
            served.stop()
        ends, wrong = check_journal(work, ledger)
        hooks, wrong_hooks = check_webhooks(work, ledger, receiver)
    wrong += ledger.wrong + wrong_hooks
    kills = figures["kills"]
    wrong += [f"{kills[k]} {k}" for k in ("tracebacks", "stopped with an error") if kills.get(k)]
    polls = sorted(ledger.poll_ms)
    poll_ms = {
        f"{100 * part:g}%": round(polls[int(part * (len(polls) - 1))], 1)
        for part in (0.5, 0.99, 1.0)
        if polls
    }
    summary = {
        "jobs": len(ledger.wanted),
        "ends": ends,
        "kills": kills,
        "requests": dict(sorted(ledger.counts.items())),
        "webhooks": hooks,
        "poll_ms": poll_ms,
        "megabytes": summarize_memory(figures["memory"]),
    }
    for name, value in summary.items():
        print(f"{name}: {value}")
    print(f"wrong: {wrong or 'nothing'}")
    write_json(options.json, CPU, [summary | {"wrong": wrong, "memory": figures["memory"]}])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(run_program(main))
