"""What steps measure with: the device and its ranks, times, references.

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

from benchmarks import common
from tools.device_check.steps import WRONG, Facts, Figure, Line, UnavailableError, absent
from wan.device import Device
from wan.distributed import mesh
from wan.distributed.mesh import Team
from wan.settings.errors import InputError, is_out_of_memory

HEAD = 128  # channels of a head in every published network
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 1e-2}
"""Most relative distance of a row from its float64 reference; rounding gives about a tenth."""
ROWS = 24  # of queries that are compared


@dataclass(frozen=True)
class Bench:
    """What a step is given.

    Attributes:
        device: This rank's.
        team: All ranks in one row, for a step that they carry out together.
        full: Whether --full was given.
        large: Sizes are those of a real video.
        folder: For files; removed after the check.
    """

    device: Device
    team: Team | None
    full: bool
    large: bool
    folder: Path

    @property
    def place(self) -> torch.device:
        """Where tensors are made."""
        return self.device.torch_device

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """What attention computes in here: bfloat16 on accelerators, both on a CPU."""
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
        """Median time of a run, after one that does not count."""
        run()
        return statistics.median(common.seconds(run, self.place) for _ in range(rounds))

    def peak(self, run: common.Run) -> int | None:
        """Most bytes that a run holds beyond what was there before; None where nobody counts."""
        on_host = not self.large
        found = common.peak_bytes(run, torch.device("cpu") if on_host else self.place)
        return found or None

    def rates(self, dtype: torch.dtype) -> tuple[float, float]:
        """Operations per second of a large matrix product, and its error; measured once."""
        return _matmul(self.place, self.large, dtype)


def facts(device: Device, world: int) -> Facts:
    """What decides which steps apply on a device."""
    large = torch.empty(1, device=device.torch_device).device.type != "cpu"
    return Facts(device.type, device.name(), large, _no_compiler(device), world)


def _no_compiler(device: Device) -> str | None:
    if not device.can.compile:
        return f"--compile does not work on {device.can.name}"
    compilers = (os.environ.get("CXX", "g++"), "clang++", "c++", "g++")
    if not any(shutil.which(name) for name in compilers):
        return "there is no C++ compiler (g++ or clang++)"
    return None


def prepare(device: Device, job: dict[str, Any]) -> Bench:
    """What a job's step is given. The ranks of a step that they carry out together join here."""
    team = None
    if job["together"]:
        here, limit = mesh.place(), timedelta(seconds=job["limit"])
        store = dist.TCPStore(here.address, here.port, wait_for_workers=False)
        own = dist.PrefixStore(f"step/{job['index']}", store)
        team = mesh.join(own, here, device, (1, 1, here.world), limit)
    large = torch.empty(1, device=device.torch_device).device.type != "cpu"
    return Bench(device, team, job["full"], large, Path(job["folder"]))


def sentence(failure: BaseException) -> str:
    """The kind of an error and the first line of what it says."""
    first = str(failure).strip().splitlines()
    return f"{type(failure).__name__}: {first[0][:300]}" if first else type(failure).__name__


def attempted(what: str, measure: Callable[[], Line]) -> Line:
    """A line of several alike: where one cannot be measured or fails, the others still are."""
    try:
        return measure()
    except (UnavailableError, InputError) as reason:
        return absent(what, str(reason))
    except Exception as failure:  # whatever a kernel raises is what the check is there to report
        if is_out_of_memory(failure):
            return absent(what, "out of memory")
        return Line(what, WRONG, (), sentence(failure))


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
    """Rows that are compared: the ends, both sides of a border between tiles, some between."""
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
        rows: Their places.
        heads: Their places.
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
    """The reference for q, k, v [1,S,N,D] on any device. NPUs have no float64: the host has.

    seen(head, row): bool [keys], which keys a row attends to; None: all.
    """
    rows, heads = sampled(q.shape[1]), some_heads(q.shape[2])
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


def some_heads(count: int) -> list[int]:
    """The first, the last and one between."""
    return sorted({0, count // 2, count - 1})


def milliseconds(seconds: float) -> Figure:
    return Figure("time", 1e3 * seconds, "ms")


def gigabytes(name: str, count: float | None) -> Figure:
    """Bytes, or that nobody counts them here."""
    return Figure(name, "not counted") if count is None else Figure(name, count / 1e9, "GB")


def ranks_text(sizes: Sequence[int]) -> str:
    """A topology's (cfg, ring, ulysses), in words."""
    named = zip(("cfg", "ring", "ulysses"), sizes, strict=True)
    return " x ".join(f"{name} {size}" for name, size in named if size > 1) or "one rank"
