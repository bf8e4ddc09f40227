"""Helpers of the benchmark programs: interleaved timing, peak memory, matrix products of a forward,
processes for ranks, environment, results files.

A machine's speed drifts (clocks, other processes, page cache), so variants are never timed one
after the other: every round runs each variant once, and ratios are taken inside a round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import DeviceType
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

from wan.app.programs import make_argument_type, make_output_path_type
from wan.checkpoint.headers import read_json
from wan.settings.errors import InputError
from wan.settings.values import format_value, integer
from wan.utils import system
from wan.utils.files import make_json_kind, write_output

_SPIN = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""
CPU = torch.device("cpu")
RESULTS = make_json_kind("the results of a benchmark", "environment", "results")
results_file = make_output_path_type(RESULTS)
"""The `type` of `--json`."""
Run = Callable[[], Any]
Times = dict[str, list[float]]
Call = tuple[Callable[..., Tensor], tuple[Any, ...]]


@contextmanager
def keep_cores_busy(processes: int) -> Iterator[None]:
    """Start processes that keep one core each busy, and kill them at the end."""
    started = [subprocess.Popen([sys.executable, "-c", _SPIN]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def synchronize(device: torch.device) -> None:
    """Wait for the device's queued work; returns at once on a CPU."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def measure_seconds(run: Run, device: torch.device) -> float:
    """Return the wall time of one run, including its work on the device."""
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def time_interleaved(variants: Mapping[str, Run], rounds: int, device: torch.device = CPU) -> Times:
    """Return the seconds of every variant in every round, after one round of warm-up.

    Odd rounds run in reverse order. A barrier precedes each run if there is a process group.
    """
    times: Times = {name: [] for name in variants}
    for number in range(-1, rounds):
        for name in list(variants)[:: -1 if number % 2 else 1]:
            if dist.is_initialized():
                dist.barrier()
            elapsed = measure_seconds(variants[name], device)
            if number >= 0:
                times[name].append(elapsed)
    return times


def take_slowest_rank(times_by_rank: list[Times]) -> Times:
    """Return every variant's seconds in every round: the maximum over the ranks."""
    return {
        name: [max(s) for s in zip(*(t[name] for t in times_by_rank), strict=True)]
        for name in times_by_rank[0]
    }


def compute_spread(values: Sequence[float]) -> dict[str, float]:
    """Return median and extremes."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def compute_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, float]:
    """Return median and extremes of the per-round ratios, and the ratio of the two minima."""
    summary = compute_spread([a / b for a, b in zip(numerators, denominators, strict=True)])
    return summary | {"fastest": min(numerators) / min(denominators)}


def measure_peak_bytes(run: Run, device: torch.device) -> int:
    """Return a run's peak of allocated bytes, minus the bytes allocated before it."""
    if device.type == "cpu":
        return _measure_cpu_peak_bytes(run)
    module = torch.get_device_module(device)
    synchronize(device)
    bytes_before = module.memory_allocated(device)
    module.reset_peak_memory_stats(device)
    run()
    synchronize(device)
    return int(module.max_memory_allocated(device) - bytes_before)


def _measure_cpu_peak_bytes(run: Run) -> int:
    """Return the highest running sum of the CPU allocator's events during a run."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as trace:
        run()
    events = trace.profiler.kineto_results.events()
    changes = [
        (event.start_ns(), event.nbytes())
        for event in events
        if event.name() == "[memory]" and event.device_type() == DeviceType.CPU
    ]
    held = peak = 0
    for _, change in sorted(changes, key=lambda item: item[0]):
        held += change
        peak = max(peak, held)
    return peak


class RecordProducts(TorchFunctionMode):
    """Records calls of `F.linear` and `F.scaled_dot_product_attention` with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.linear: list[Call] = []
        self.attention: list[Call] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear:
            self.linear.append((func, args))
        elif func is F.scaled_dot_product_attention:
            self.attention.append((func, args))
        return func(*args, **(kwargs or {}))

    def count_flops(self) -> int:
        """Return the floating-point operations of the recorded calls; a multiply-add counts two."""
        return sum(2 * x.numel() * len(weight) for _, (x, weight, *_) in self.linear) + sum(
            4 * q.numel() * k.shape[-2] for _, (q, k, _) in self.attention
        )


def replay_calls(calls: Sequence[Call]) -> None:
    """Repeat recorded calls; each result is freed before the next call."""
    for func, args in calls:
        func(*args)


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Return the command, versions and hardware that the results depend on."""
    return {
        "command": shlex.join(sys.orig_argv),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "cpu": system.read_cpu_name(),
        "device": str(device)
        if device.type == "cpu"
        else torch.get_device_module(device).get_device_name(device),
    }


def parse_token_grid(text: str) -> tuple[int, ...]:
    """Parse a token grid "F,H,W" from the command line."""
    read = make_argument_type(integer(1, 10_000))
    sizes = tuple(read(size) for size in text.split(","))
    if len(sizes) != 3:
        raise argparse.ArgumentTypeError(f"{format_value(text)} is not F,H,W")
    return sizes


def read_earlier_runs(
    path: Path | None, is_run: Callable[[dict[str, Any]], bool]
) -> list[dict[str, Any]]:
    """Read the runs of earlier calls, with any settings, from a JSON file.

    Raises:
        InputError: The file holds results of another benchmark.
    """
    if path is None or not path.is_file() or not path.stat().st_size:
        return []
    runs: list[dict[str, Any]] = read_json(path)["results"]
    for run in runs if isinstance(runs, list) else [None]:
        if not isinstance(run, dict) or not is_run(run):
            raise InputError("--json", path, "holds results of another benchmark", "name another")
    return runs


def write_json(path: Path | None, device: torch.device, results: Sequence[Any]) -> None:
    """Write the results and the environment to a JSON file, if there is a path."""
    if path is not None:
        record = {"environment": describe_environment(device), "results": results}
        with write_output(path, RESULTS) as temporary:
            temporary.write_text(json.dumps(record, indent=2) + "\n")


def run_on_ranks(
    ranks: int, work: Callable[..., dict[str, Any]], *args: Any, timeout: float | None = None
) -> list[dict[str, Any]]:
    """Call work(*args) in new processes of one gloo group; return the results by rank.

    Each process has one thread. The first error of a rank is raised here and ends the others.

    Args:
        timeout: Seconds to wait for each result.

    Raises:
        multiprocessing.TimeoutError: A result is late.
    """
    quiet = patch.dict(os.environ, KINETO_LOG_LEVEL="99")  # the profiler of `peak_bytes`
    with quiet, tempfile.TemporaryDirectory() as folder, get_context("spawn").Pool(ranks) as pool:
        tasks = [(work, args, rank, ranks, f"file://{folder}/store") for rank in range(ranks)]
        results = pool.imap_unordered(_run_on_rank, tasks)
        results_by_rank = dict(results.next(timeout) for _ in range(ranks))
    return [results_by_rank[rank] for rank in range(ranks)]


def _run_on_rank(
    task: tuple[Callable[..., Any], tuple[Any, ...], int, int, str],
) -> tuple[int, Any]:
    work, args, rank, ranks, store = task
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store, rank=rank, world_size=ranks)
    with torch.no_grad():
        result = work(*args)
    dist.barrier()
    dist.destroy_process_group()
    return rank, result
