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

import torch
import torch.distributed as dist
from torch import Tensor

from tools.device_check.steps import DeviceProperties, Figure, Job, make_time
from wan.device import Device
from wan.distributed import rank_env, rendezvous
from wan.distributed.mesh import ParallelGroups
from wan.testing import measuring

HEAD = 128  # channels of a head in every published network
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 1e-2}
"""Largest relative distance of a row from its float64 reference; rounding gives about a tenth."""
ROWS = 24  # compared query rows


def compute_rms_distance(values: Tensor, exact: Tensor) -> float:
    """Computes the relative rms of the difference; NaN if a value is not finite."""
    return compute_row_distance(values.flatten()[None], exact.cpu().double().flatten()[None])


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
    def torch_device(self) -> torch.device:
        """PyTorch's device."""
        return self.device.torch_device

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes of the attention checks."""
        return (torch.bfloat16,) if self.device.type != "cpu" else (torch.float32, torch.bfloat16)

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Draws normal values on the device."""
        return torch.randn(shape, device=self.torch_device, dtype=dtype)

    def make_qkv(
        self, queries: int, keys: int, heads: int, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Makes q, k, v [1,S,N,D] with a peaked softmax, so that a wrong key changes the result."""
        torch.manual_seed(queries + heads)
        q = 2 * self.randn(1, queries, heads, HEAD, dtype=dtype)
        k, v = (self.randn(1, keys, heads, HEAD, dtype=dtype) for _ in range(2))
        return q, k, v

    def measure_seconds(self, run: measuring.Work, rounds: int = 3) -> float:
        """Returns the median seconds of a run, after one warm-up run."""
        run()
        return statistics.median(
            measuring.measure_seconds(run, self.torch_device) for _ in range(rounds)
        )

    def measure_time(self, run: measuring.Work, name: str = "time") -> Figure:
        """Returns `measure_seconds` as a figure."""
        return make_time(self.measure_seconds(run), name)

    def measure_peak(self, run: measuring.Work) -> int | None:
        """Returns a run's peak of allocated bytes; None if the device does not count them."""
        on_host = not self.large
        peak = measuring.measure_peak_bytes(
            run, torch.device("cpu") if on_host else self.torch_device
        )
        return peak or None

    def measure_matmul(self, dtype: torch.dtype) -> tuple[float, float]:
        """Returns operations per second and error of a large matrix product; measured once."""
        return _measure_matmul(self.torch_device, self.large, dtype)


def describe_device(device: Device, world: int) -> DeviceProperties:
    """Returns the properties of a device that decide which steps apply."""
    compilers, why = (os.environ.get("CXX", "g++"), "clang++", "c++", "g++"), None
    if not device.capabilities.compile:
        why = f"--compile does not work on {device.capabilities.name}"
    elif not any(shutil.which(name) for name in compilers):
        why = "there is no C++ compiler (g++ or clang++)"
    return DeviceProperties(device.type, device.name(), _is_large(device), why, world)


def _is_large(device: Device) -> bool:
    return torch.empty(1, device=device.torch_device).device.type != "cpu"


def make_bench(device: Device, job: Job) -> Bench:
    """Makes the argument of a job's step; the ranks of a collective step form a group."""
    team = None
    if job.is_collective:
        here, limit = rank_env.read_rank_env(), timedelta(seconds=job.step.limit)
        store = dist.TCPStore(here.address, here.port, wait_for_workers=False)
        step_store = dist.PrefixStore(f"step/{job.index}", store)
        team = rendezvous.join_ranks(step_store, here, device, (1, 1, here.world_size), limit)
    return Bench(device, team, job.full, _is_large(device), job.folder)


@cache
def _measure_matmul(device: torch.device, large: bool, dtype: torch.dtype) -> tuple[float, float]:
    side, count = (8192, 10) if large else (1024, 3)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))

    def run() -> None:
        for _ in range(count):
            torch.mm(a, b)

    run()
    seconds = min(measuring.measure_seconds(run, device) for _ in range(3))
    rows = sample_rows(side)
    exact = a[rows].cpu().double() @ b.cpu().double()
    return 2 * count * side**3 / seconds, compute_row_distance(torch.mm(a, b)[rows], exact)


def sample_rows(size: int, most: int = ROWS) -> list[int]:
    """Lists the compared rows: both ends, both sides of a tile border, and some in between."""
    special = {0, 1, 127, 128, size - 2, size - 1}
    spread = {i * size // most for i in range(most)}
    return sorted(row for row in special | spread if 0 <= row < size)


def compute_row_distance(values: Tensor, exact: Tensor) -> float:
    """Computes the largest relative distance of a row (last axis) from its reference."""
    difference = (values.cpu().double() - exact).norm(dim=-1)
    return float((difference / exact.norm(dim=-1).clamp_min(1e-30)).max())


class ExactAttention:
    """float64 attention of sampled rows and heads, on the host.

    Args:
        q, k, v: [1,S,N,D] on any device.
        get_attended_keys: (head, row) -> bool [keys], the keys that a row attends to; None: all.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        get_attended_keys: Callable[[int, int], Tensor] | None = None,
    ) -> None:
        self._rows = sample_rows(q.shape[1])
        self._heads = sorted({0, q.shape[2] // 2, q.shape[2] - 1})
        q_NrD, k_NSD, v_NSD = (
            x[0, :, self._heads].transpose(0, 1).cpu().double() for x in (q[:, self._rows], k, v)
        )
        logits = q_NrD @ k_NSD.mT * q.shape[3] ** -0.5
        if get_attended_keys is not None:
            masks = [[get_attended_keys(h, row) for row in self._rows] for h in self._heads]
            mask = torch.stack([torch.stack(rows) for rows in masks])
            logits = logits.masked_fill(~mask, -torch.inf)
        self._out_NrD, self._lse_Nr = logits.softmax(-1) @ v_NSD, logits.logsumexp(-1)

    def _sample(self, out_BSND: Tensor) -> Tensor:
        return out_BSND[0, self._rows][:, self._heads].transpose(0, 1)

    def measure_error(self, out_BSND: Tensor) -> float:
        """Returns the largest relative distance of a result's sampled rows; NaN if not finite."""
        if not bool(torch.isfinite(out_BSND).all()):
            return float("nan")
        return compute_row_distance(self._sample(out_BSND), self._out_NrD)

    def measure_rms(self, out_BSND: Tensor) -> float:
        """Returns the relative rms distance over all sampled rows."""
        return compute_rms_distance(self._sample(out_BSND), self._out_NrD)

    def measure_lse_error(self, lse_BNS: Tensor) -> float:
        """Returns the largest distance of the sampled log-sum-exps."""
        sampled = lse_BNS[0, self._heads][:, self._rows]
        return float((sampled.cpu().double() - self._lse_Nr).abs().max())


def format_ranks(sizes: Sequence[int]) -> str:
    """Formats the sizes (cfg, ring, ulysses) of a topology."""
    named = zip(("cfg", "ring", "ulysses"), sizes, strict=True)
    return " x ".join(f"{name} {size}" for name, size in named if size > 1) or "one rank"
