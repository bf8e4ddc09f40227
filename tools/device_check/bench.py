"""What every step uses: the device and its ranks, times, memory, references.

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
from wan.distributed import start
from wan.distributed.mesh import Team

HEAD = 128  # channels of a head in every published network
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 1e-2}
"""Most relative distance of a row from its float64 reference; rounding gives about a tenth."""
ROWS = 24  # of queries that are compared


@dataclass(frozen=True)
class Bench:
    """The argument of a step.

    Attributes:
        device: The device of this rank.
        team: All ranks as one sequence group, for a step that they carry out together.
        full: Whether --full was given.
        large: Whether sizes are those of a real video.
        folder: A folder for files; removed after the check.
    """

    device: Device
    team: Team | None
    full: bool
    large: bool
    folder: Path

    @property
    def place(self) -> torch.device:
        """The device as PyTorch names it."""
        return self.device.torch_device

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes that attention is checked in."""
        return (torch.bfloat16,) if self.device.type != "cpu" else (torch.float32, torch.bfloat16)

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Normal values on the device."""
        return torch.randn(shape, device=self.place, dtype=dtype)

    def qkv(
        self, queries: int, keys: int, heads: int, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [1,S,N,D], the softmax of which has peaks: a wrong key is seen."""
        torch.manual_seed(queries + heads)
        q = 2 * self.randn(1, queries, heads, HEAD, dtype=dtype)
        k, v = (self.randn(1, keys, heads, HEAD, dtype=dtype) for _ in range(2))
        return q, k, v

    def seconds(self, run: common.Run, rounds: int = 3) -> float:
        """Median time of a run, after one run that does not count."""
        run()
        return statistics.median(common.seconds(run, self.place) for _ in range(rounds))

    def time(self, run: common.Run, name: str = "time") -> Figure:
        """`seconds` as a figure."""
        return milliseconds(self.seconds(run), name)

    def peak(self, run: common.Run) -> int | None:
        """The most bytes that a run allocates at one time; None where they are not counted."""
        on_host = not self.large
        found = common.peak_bytes(run, torch.device("cpu") if on_host else self.place)
        return found or None

    def events(self, run: common.Run) -> list[Any]:
        """What PyTorch's profiler saw during a run, on CUDA or on the CPU."""
        on_gpu = self.device.type == "cuda"
        activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
        with profile(activities=[activity], acc_events=True) as trace:
            run()
            common.synchronize(self.place)
        kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
        events = trace.profiler.kineto_results.events()
        return [event for event in events if event.device_type() == kind]

    def rates(self, dtype: torch.dtype) -> tuple[float, float]:
        """Operations per second of a large matrix product, and its error; measured once."""
        return _matmul(self.place, self.large, dtype)


def facts(device: Device, world: int) -> Facts:
    """The properties of a device that decide which steps apply."""
    compilers, why = (os.environ.get("CXX", "g++"), "clang++", "c++", "g++"), None
    if not device.can.compile:
        why = f"--compile does not work on {device.can.name}"
    elif not any(shutil.which(name) for name in compilers):
        why = "there is no C++ compiler (g++ or clang++)"
    return Facts(device.type, device.name(), _large(device), why, world)


def _large(device: Device) -> bool:
    return torch.empty(1, device=device.torch_device).device.type != "cpu"


def prepare(device: Device, job: Job) -> Bench:
    """The argument of a job's step. The ranks that carry it out together form a group here."""
    team = None
    if job.together:
        here, limit = start.rank_env(), timedelta(seconds=job.step.limit)
        store = dist.TCPStore(here.address, here.port, wait_for_workers=False)
        own = dist.PrefixStore(f"step/{job.index}", store)
        team = start.join(own, here, device, (1, 1, here.world), limit)
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
    """Rows that are compared: both ends, both sides of a border between tiles, some in between."""
    special = {0, 1, 127, 128, size - 2, size - 1}
    spread = {i * size // most for i in range(most)}
    return sorted(row for row in special | spread if 0 <= row < size)


def distance(found: Tensor, exact: Tensor) -> float:
    """The largest relative distance of a row (the last axis) from its reference."""
    difference = (found.cpu().double() - exact).norm(dim=-1)
    return float((difference / exact.norm(dim=-1).clamp_min(1e-30)).max())


@dataclass(frozen=True)
class Exact:
    """float64 attention of sampled rows and heads, on the host.

    Attributes:
        rows: The indices of the rows.
        heads: The indices of the heads.
        out: [rows, heads, D].
        lse: Log-sum-exp of the logits, [rows, heads].
    """

    rows: list[int]
    heads: list[int]
    out: Tensor
    lse: Tensor

    def error(self, out_BSND: Tensor) -> float:
        """Relative distance of a result's worst sampled row."""
        if not bool(torch.isfinite(out_BSND).all()):
            return float("nan")
        return distance(out_BSND[0, self.rows][:, self.heads], self.out)

    def rms(self, out_BSND: Tensor) -> float:
        """Relative distance of all sampled rows together."""
        found = out_BSND[0, self.rows][:, self.heads]
        return distance(found.flatten()[None], self.out.flatten()[None])

    def lse_error(self, lse_BNS: Tensor) -> float:
        """Distance of the worst sampled log-sum-exp."""
        found = lse_BNS[0, self.heads][:, self.rows].transpose(0, 1)
        return float((found.cpu().double() - self.lse).abs().max())


def exact(
    q: Tensor, k: Tensor, v: Tensor, seen: Callable[[int, int], Tensor] | None = None
) -> Exact:
    """The reference for q, k, v [1,S,N,D] of any device, computed on the host.

    seen(head, row): bool [keys], the keys that a row attends to; None means all.
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
    """The sizes (cfg, ring, ulysses) of a topology as text."""
    named = zip(("cfg", "ring", "ulysses"), sizes, strict=True)
    return " x ".join(f"{name} {size}" for name, size in named if size > 1) or "one rank"
