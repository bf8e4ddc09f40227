"""The argument of the steps: the device and its ranks, times, memory, references.

Legend: B batch, S tokens, N heads, D head size.
"""

from __future__ import annotations

import os
import shutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks import common
from tools.device_check.process import Job
from tools.device_check.steps import Facts, Figure, milliseconds
from wan.device import Device
from wan.distributed import rendezvous
from wan.distributed.mesh import ParallelGroups

HEAD = 128  # channels of a head in every published network
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 1e-2}
"""Largest relative distance of a row from its float64 reference; rounding gives about a tenth."""
ROWS = 24  # compared query rows


@dataclass(frozen=True)
class Bench:
    """The argument of a step.

    Attributes:
        team: All ranks as one sequence parallel group, for a collective step; else None.
        full: Value of --full.
        large: Sizes are those of a real video.
        folder: Folder for files; removed after the check.
    """

    device: Device
    team: ParallelGroups | None
    full: bool
    large: bool
    folder: Path

    @property
    def place(self) -> torch.device:
        """PyTorch's device."""
        return self.device.torch_device

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes of the attention checks."""
        return (torch.bfloat16,) if self.device.type != "cpu" else (torch.float32, torch.bfloat16)

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Draw normal values on the device."""
        return torch.randn(shape, device=self.place, dtype=dtype)

    def qkv(
        self, queries: int, keys: int, heads: int, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Make q, k, v [1,S,N,D] with a peaked softmax, so that a wrong key changes the result."""
        torch.manual_seed(queries + heads)
        q = 2 * self.randn(1, queries, heads, HEAD, dtype=dtype)
        k, v = (self.randn(1, keys, heads, HEAD, dtype=dtype) for _ in range(2))
        return q, k, v

    def seconds(self, run: common.Run, rounds: int = 3) -> float:
        """Return the median seconds of a run, after one warm-up run."""
        run()
        return statistics.median(common.seconds(run, self.place) for _ in range(rounds))

    def time(self, run: common.Run, name: str = "time") -> Figure:
        """Return `measure_seconds` as a figure."""
        return milliseconds(self.seconds(run), name)

    def peak(self, run: common.Run) -> int | None:
        """Return a run's peak of allocated bytes; None if the device does not count them."""
        on_host = not self.large
        found = common.peak_bytes(run, torch.device("cpu") if on_host else self.place)
        return found or None

    def events(self, run: common.Run) -> list[Any]:
        """Return the events of PyTorch's profiler during a run, on CUDA or on the CPU."""
        on_gpu = self.device.type == "cuda"
        activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
        with profile(activities=[activity], acc_events=True) as trace:
            run()
            common.synchronize(self.place)
        kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
        events = trace.profiler.kineto_results.events()
        return [event for event in events if event.device_type() == kind]

    def rates(self, dtype: torch.dtype) -> tuple[float, float]:
        """Return operations per second and error of a large matrix product; measured once."""
        return _matmul(self.place, self.large, dtype)


def facts(device: Device, world: int) -> Facts:
    """Return the properties of a device that decide which steps apply."""
    compilers, why = (os.environ.get("CXX", "g++"), "clang++", "c++", "g++"), None
    if not device.capabilities.compile:
        why = f"--compile does not work on {device.capabilities.name}"
    elif not any(shutil.which(name) for name in compilers):
        why = "there is no C++ compiler (g++ or clang++)"
    return Facts(device.type, device.name(), _large(device), why, world)


def _large(device: Device) -> bool:
    return torch.empty(1, device=device.torch_device).device.type != "cpu"


def prepare(device: Device, job: Job) -> Bench:
    """Make the argument of a job's step; the ranks of a collective step form a group."""
    team = None
    if job.together:
        here, limit = rendezvous.read_rank_env(), timedelta(seconds=job.step.limit)
        store = dist.TCPStore(here.address, here.port, wait_for_workers=False)
        own = dist.PrefixStore(f"step/{job.index}", store)
        team = rendezvous.join_ranks(own, here, device, (1, 1, here.world_size), limit)
    return Bench(device, team, job.full, _large(device), job.folder)


@cache
def _matmul(place: torch.device, large: bool, dtype: torch.dtype) -> tuple[float, float]:
    side, count = (8192, 10) if large else (1024, 3)
    a, b = (torch.randn(side, side, device=place).to(dtype) for _ in range(2))

    def run() -> None:
        for _ in range(count):
            torch.mm(a, b)

    run()
    taken = min(common.seconds(run, place) for _ in range(3))
    rows = sampled(side)
    exact = a[rows].cpu().double() @ b.cpu().double()
    return 2 * count * side**3 / taken, distance(torch.mm(a, b)[rows], exact)


def sampled(size: int, most: int = ROWS) -> list[int]:
    """List the compared rows: both ends, both sides of a tile border, and some in between."""
    special = {0, 1, 127, 128, size - 2, size - 1}
    spread = {i * size // most for i in range(most)}
    return sorted(row for row in special | spread if 0 <= row < size)


def distance(found: Tensor, exact: Tensor) -> float:
    """Compute the largest relative distance of a row (last axis) from its reference."""
    difference = (found.cpu().double() - exact).norm(dim=-1)
    return float((difference / exact.norm(dim=-1).clamp_min(1e-30)).max())


@dataclass(frozen=True)
class Exact:
    """float64 attention of sampled rows and heads, on the host.

    Attributes:
        rows: Indices of the sampled rows.
        heads: Indices of the sampled heads.
        out: [rows, heads, D].
        lse: Log-sum-exp of the logits, [rows, heads].
    """

    rows: list[int]
    heads: list[int]
    out: Tensor
    lse: Tensor

    def error(self, out_BSND: Tensor) -> float:
        """Return the largest relative distance of a result's sampled rows; NaN if not finite."""
        if not bool(torch.isfinite(out_BSND).all()):
            return float("nan")
        return distance(out_BSND[0, self.rows][:, self.heads], self.out)

    def rms(self, out_BSND: Tensor) -> float:
        """Return the relative rms distance over all sampled rows."""
        found = out_BSND[0, self.rows][:, self.heads]
        return distance(found.flatten()[None], self.out.flatten()[None])

    def lse_error(self, lse_BNS: Tensor) -> float:
        """Return the largest distance of the sampled log-sum-exps."""
        found = lse_BNS[0, self.heads][:, self.rows].transpose(0, 1)
        return float((found.cpu().double() - self.lse).abs().max())


def exact(
    q: Tensor, k: Tensor, v: Tensor, seen: Callable[[int, int], Tensor] | None = None
) -> Exact:
    """Compute the reference for q, k, v [1,S,N,D] of any device on the host.

    Args:
        seen: (head, row) -> bool [keys], the keys that a row attends to; None: all keys.
    """
    rows, heads = sampled(q.shape[1]), sorted({0, q.shape[2] // 2, q.shape[2] - 1})
    outs, sums = [], []
    for head in heads:
        q_rD, k_SD, v_SD = (
            x.cpu().double() for x in (q[0, rows, head], k[0, :, head], v[0, :, head])
        )
        logits = q_rD @ k_SD.T * q.shape[3] ** -0.5
        if seen is not None:
            kept = torch.stack([seen(head, row) for row in rows])
            logits = logits.masked_fill(~kept, -torch.inf)
        outs.append(logits.softmax(-1) @ v_SD)
        sums.append(logits.logsumexp(-1))
    return Exact(rows, heads, torch.stack(outs, 1), torch.stack(sums, 1))


def ranks_text(sizes: Sequence[int]) -> str:
    """Format the sizes (cfg, ring, ulysses) of a topology."""
    named = zip(("cfg", "ring", "ulysses"), sizes, strict=True)
    return " x ".join(f"{name} {size}" for name, size in named if size > 1) or "one rank"
