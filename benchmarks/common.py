"""Helpers of the benchmark programs: processes for ranks, ratios, environment, results files."""

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from wan.app.programs import make_argument_type, make_output_path_type
from wan.checkpoint.formats.headers import read_json
from wan.settings.errors import InputError
from wan.settings.values import format_value, integer
from wan.testing.measuring import Times
from wan.utils import system
from wan.utils.files import make_json_kind, write_output

_SPIN = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""
RESULTS = make_json_kind("the results of a benchmark", "environment", "results")


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Adds --json, the file for `write_json`."""
    parser.add_argument(
        "--json",
        type=make_output_path_type(RESULTS),
        help="file for the results of every round; docs/results keeps only summaries",
    )


@contextmanager
def keep_cores_busy(processes: int) -> Iterator[None]:
    """Starts processes that keep one core each busy, and kills them at the end."""
    started = [subprocess.Popen([sys.executable, "-c", _SPIN]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def take_slowest_rank(times_by_rank: list[Times]) -> Times:
    """Returns every variant's seconds in every round: the maximum over the ranks."""
    return {
        name: [max(s) for s in zip(*(t[name] for t in times_by_rank), strict=True)]
        for name in times_by_rank[0]
    }


def compute_spread(values: Sequence[float]) -> dict[str, float]:
    """Returns median and extremes."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def compute_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, float]:
    """Returns median and extremes of the per-round ratios, and the ratio of the two minima."""
    summary = compute_spread([a / b for a, b in zip(numerators, denominators, strict=True)])
    return summary | {"fastest": min(numerators) / min(denominators)}


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Returns the command, versions and hardware that the results depend on."""
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
    """Parses a token grid "F,H,W" from the command line."""
    read = make_argument_type(integer(1, 10_000))
    sizes = tuple(read(size) for size in text.split(","))
    if len(sizes) != 3:
        raise argparse.ArgumentTypeError(f"{format_value(text)} is not F,H,W")
    return sizes


def read_earlier_runs(
    path: Path | None, is_run: Callable[[dict[str, Any]], bool]
) -> list[dict[str, Any]]:
    """Reads the runs of earlier calls, with any settings, from a JSON file.

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
    """Writes the results and the environment to a JSON file, if there is a path."""
    if path is not None:
        record = {"environment": describe_environment(device), "results": results}
        with write_output(path, RESULTS) as temporary:
            temporary.write_text(json.dumps(record, indent=2) + "\n")


def run_on_ranks(
    ranks: int, work: Callable[..., dict[str, Any]], *args: Any, timeout: float | None = None
) -> list[dict[str, Any]]:
    """Calls work(*args) in new processes of one gloo group; returns the results by rank.

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
