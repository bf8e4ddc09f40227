"""Ranks of a benchmark: processes of one thread each in one gloo group, timed together."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from benchmarks import common

CPU = torch.device("cpu")
Times = dict[str, list[float]]


def launch(
    ranks: int, work: Callable[..., dict[str, Any]], *args: Any, timeout: float | None = None
) -> list[dict[str, Any]]:
    """work(*args) in as many new processes, one thread each, in one gloo group; results by rank.

    The first error of a rank is raised here and ends the others. timeout: seconds for each result,
    multiprocessing.TimeoutError after them.
    """
    quiet = patch.dict(os.environ, KINETO_LOG_LEVEL="99")  # the profiler of `common.peak_bytes`
    with quiet, tempfile.TemporaryDirectory() as folder, get_context("spawn").Pool(ranks) as pool:
        tasks = [(work, args, rank, ranks, f"file://{folder}/store") for rank in range(ranks)]
        results = pool.imap_unordered(_on_rank, tasks)
        found = dict(results.next(timeout) for _ in range(ranks))
    return [found[rank] for rank in range(ranks)]


def _on_rank(task: tuple[Callable[..., Any], tuple[Any, ...], int, int, str]) -> tuple[int, Any]:
    work, args, rank, ranks, store = task
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store, rank=rank, world_size=ranks)
    with torch.no_grad():
        result = work(*args)
    dist.barrier()
    dist.destroy_process_group()
    return rank, result


def interleave(variants: Mapping[str, common.Run], rounds: int) -> Times:
    """As `common.interleave`, after one round that does not count; ranks begin together."""
    times: Times = {name: [] for name in variants}
    for number in range(-1, rounds):
        for name in list(variants)[:: -1 if number % 2 else 1]:
            dist.barrier()
            taken = common.seconds(variants[name], CPU)
            if number >= 0:
                times[name].append(taken)
    return times


def slowest(found: list[Times]) -> Times:
    """Every variant's seconds in every round, on the rank that took longest."""
    return {
        name: [max(s) for s in zip(*(t[name] for t in found), strict=True)] for name in found[0]
    }
