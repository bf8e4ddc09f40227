"""Runs MLPerf's load generator on a pipeline in this process or on torchrun's ranks, or a service.

`python -m benchmarks.mlperf` starts this module.
"""

from __future__ import annotations

import argparse
import array
import base64
import json
import queue
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.mlperf import rules
from benchmarks.mlperf.rules import Workload
from wan.app import failures, launch, resolve
from wan.app.flag_parser import Parser, parse_flags
from wan.app.job import VideoJob
from wan.app.run import Run
from wan.settings.errors import get_exit_code
from wan.utils import log
from wan.utils.files import VIDEO_KIND, check_output, is_output, make_json_kind, write_output
from wan.utils.text_streams import set_up_text

try:
    import mlperf_loadgen as loadgen
except ModuleNotFoundError as error:
    from wan.app.programs import exit_without_package

    exit_without_package(error)

if TYPE_CHECKING:
    from wan.distributed.mesh import ParallelGroups

MakeVideo = Callable[[int, Path], None]
"""make(index, file) writes the video of a sample to a file."""
RESULT, _ENTRIES = "result.json", "vbench_full_info.json"
RESULT_KIND = make_json_kind("a result of benchmarks.mlperf", "kind", "scenario", "videos", "power")
ENTRIES_KIND = make_json_kind("a list of benchmarks.mlperf", "prompt_en", "dimension", "video_list")
POWER_KIND = make_json_kind("the energy of a video", "power")


def run_test(
    kind: str, scenario: str, workload: Workload, make: MakeVideo, folder: Path, at_once: int = 1
) -> None:
    """Runs one test of the load generator; writes its logs, videos and result into a folder.

    Args:
        kind: "performance", "accuracy", or "test04" for the performance of one sample.
        scenario: "SingleStream" or "Offline".
        at_once: Number of concurrent queries in Offline.
    """
    folder.mkdir(parents=True, exist_ok=True)
    queries: queue.Queue[Any] = queue.Queue()
    system = loadgen.ConstructSUT(lambda samples: queries.put([*samples]), lambda: None)
    count = len(workload.entries)
    library = loadgen.ConstructQSL(count, count, lambda _: None, lambda _: None)

    def drive() -> None:
        try:
            settings, logs = _make_settings(kind, scenario, workload), _make_log_settings(folder)
            loadgen.StartTestWithLogSettings(system, library, settings, logs)
        finally:
            queries.put(None)

    videos: list[tuple[int, Path]] = []

    def answer_query(sample: Any) -> None:
        name = workload.prompt(sample.index) if kind == "accuracy" else f"{sample.index:03}"
        number = 0 if kind == "accuracy" else len(videos)
        path = folder / "videos" / f"{name}-{number}.mp4"
        videos.append((sample.index, path))
        make(sample.index, path)
        content = array.array("B", path.name.encode())
        response = loadgen.QuerySampleResponse(sample.id, *content.buffer_info())
        loadgen.QuerySamplesComplete([response])

    (folder / "videos").mkdir(exist_ok=True)
    start = time.perf_counter()
    threading.Thread(target=drive, daemon=True).start()
    with ThreadPoolExecutor(at_once) as workers:
        while (samples := queries.get()) is not None:
            if at_once == 1:  # in the thread that has loaded the model
                for sample in samples:
                    answer_query(sample)
            else:
                list(workers.map(answer_query, samples))
    loadgen.DestroyQSL(library)
    loadgen.DestroySUT(system)
    if kind == "accuracy":
        _write_entries(workload, folder)
    result = _read_result(folder) | {"kind": kind, "scenario": scenario}
    result |= {"videos": len(videos), "seconds": round(time.perf_counter() - start, 3)}
    result |= {"power": [power for _, path in videos if (power := _read_power(path)) is not None]}
    with write_output(folder / RESULT, RESULT_KIND) as temporary:
        temporary.write_text(json.dumps(result, indent=1) + "\n")


def _make_settings(kind: str, scenario: str, workload: Workload) -> Any:
    settings = loadgen.TestSettings()
    settings.scenario = getattr(loadgen.TestScenario, scenario)
    is_accuracy = kind == "accuracy"
    mode = loadgen.TestMode
    settings.mode = mode.AccuracyOnly if is_accuracy else mode.PerformanceOnly
    offline = scenario == "Offline"
    settings.min_query_count = len(workload.entries) if offline else workload.queries
    settings.min_duration_ms = 0 if offline else 1000 * workload.seconds
    settings.offline_expected_qps = 1e-3
    settings.single_stream_expected_latency_ns = 10**10
    if kind == "test04":
        settings.performance_issue_same = True
        settings.performance_issue_same_index = rules.SAME_SAMPLE
    return settings


def _make_log_settings(folder: Path) -> Any:
    output = loadgen.LogOutputSettings()
    output.outdir, output.copy_summary_to_stdout = str(folder), False
    settings = loadgen.LogSettings()
    settings.log_output = output
    return settings


def _read_result(folder: Path) -> dict[str, Any]:
    """Reads the result and errors from the load generator's detailed log."""
    result: dict[str, Any] = {}
    for line in (folder / "mlperf_log_detail.txt").read_text().splitlines():
        entry = json.loads(line.partition(" ")[2])
        if entry["key"].startswith("result_"):
            result[entry["key"].removeprefix("result_")] = entry["value"]
        elif entry["metadata"].get("is_error"):
            result.setdefault("errors", []).append(entry["value"])
    return result


def _read_power(video: Path) -> dict[str, Any] | None:
    """Reads a video's energy from its record; None without a record or a meter."""
    record = video.with_suffix(".json")
    power = json.loads(record.read_text()).get("power") if record.exists() else None
    return power if power and "joules" in power else None


def _write_entries(workload: Workload, folder: Path) -> None:
    """Writes the list of videos from which VBench computes its dimensions."""
    entries = []
    for entry in workload.entries:
        scored = [name for name in entry["dimension"] if name in rules.DIMENSIONS]
        files = [str(folder / "videos" / f"{entry['prompt_en']}-0.mp4")]
        entries.append(entry | {"dimension": scored, "video_list": files})
    with write_output(folder / _ENTRIES, ENTRIES_KIND) as temporary:
        temporary.write_text(json.dumps(entries, indent=1) + "\n")


def make_http_client(url: str, workload: Workload) -> MakeVideo:
    """Returns a function that makes a video by a request to a service."""

    def make(index: int, file: Path) -> None:
        body = json.dumps(workload.make_request_body(index)).encode()
        head = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/videos/generations", body, head)
        with urllib.request.urlopen(request) as answer:
            video = json.load(answer)
        with write_output(file, VIDEO_KIND) as temporary:
            temporary.write_bytes(base64.b64decode(video["video_bytes"]))
        with urllib.request.urlopen(f"{url}/v1/videos/{video['video_id']}") as answer:
            power = json.load(answer).get("power")
        if power:
            with write_output(file.with_suffix(".json"), POWER_KIND) as temporary:
                temporary.write_text(json.dumps({"power": power}))

    return make


def make_cached(make: MakeVideo) -> MakeVideo:
    """Wraps `make` with a cache of videos, which TEST04 must detect."""
    videos: dict[int, bytes] = {}

    def make_once(index: int, file: Path) -> None:
        if index not in videos:
            make(index, file)
            videos[index] = file.read_bytes()
        with write_output(file, VIDEO_KIND) as temporary:
            temporary.write_bytes(videos[index])

    return make_once


def _run_tests(
    options: argparse.Namespace, workload: Workload, make: MakeVideo, at_once: int = 1
) -> None:
    """Runs the tests without a result."""
    make = make_cached(make) if options.cached else make
    for scenario in options.scenarios:
        for kind in options.tests:
            for name, output in ((RESULT, RESULT_KIND), (_ENTRIES, ENTRIES_KIND)):
                check_output(options.out / scenario / kind / name, output, "--out")
    for scenario in options.scenarios:
        for kind in options.tests:
            folder = options.out / scenario / kind
            if not is_output(folder / RESULT, RESULT_KIND):
                workers = at_once if scenario == "Offline" else 1
                run_test(kind, scenario, workload, make, folder, workers)


def _run_rank(
    options: argparse.Namespace, workload: Workload, run: Run, team: ParallelGroups | None
) -> int:
    """Runs the tests on rank 0; the other ranks join in each of its videos."""
    resolve.load_torch()
    from wan import device as devices
    from wan.distributed.gloo_group import GlooGroup
    from wan.pipeline import build

    log.set_level(run.output.log_level)
    device = devices.select_device(run.setup.execution.device) if team is None else team.device
    pipeline = build.build_pipeline(run.setup, device, team)
    control = GlooGroup(team)

    def make(index: int, file: Path) -> None:
        video_run = run.with_prompt(workload.prompt(index)).with_save_file(file)
        device.reset_peak_memory()
        VideoJob(video_run, pipeline, team).make()

    def lead(index: int, file: Path) -> None:
        make(*control.broadcast_from_rank0((index, file)))

    make(0, options.out / "warm-up.mp4")
    if team is None or team.is_main:
        _run_tests(options, workload, lead)
        control.broadcast_from_rank0(None)
    else:
        while (sample := control.broadcast_from_rank0(None)) is not None:
            make(*sample)
    if team is not None:
        team.close()
    return 0


def run_mode(argv: list[str]) -> int:
    """Runs the tests of one mode; returns the exit code."""
    separator = argv.index("--") if "--" in argv else len(argv)
    command = Parser()
    rules.add_options(command)
    command.add_argument("--url", help="URL of a service to test instead of a pipeline")
    options, flags = command.parse_args(argv[:separator]), argv[separator + 1 :]
    workload = rules.load_workload(options.small)
    if options.url:
        _run_tests(options, workload, make_http_client(options.url, workload), at_once=8)
        return 0
    arguments = [*workload.make_flags(), "--save_file", str(options.out / "video.mp4"), *flags]
    return launch.execute_run(
        partial(parse_flags, arguments),
        partial(_run_rank, options, workload),
        program="benchmarks.mlperf",
    )


if __name__ == "__main__":
    set_up_text()
    try:
        with failures.raise_on_sigterm():
            log.set_up_logging()
            sys.exit(run_mode(sys.argv[1:]))
    except BaseException as error:
        if (sentence := failures.describe_error(error)) is None:
            raise
        failures.print_error_once(sentence, "benchmarks.mlperf")
        sys.exit(get_exit_code(error))
