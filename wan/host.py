"""Memory, CPU cores and file cache of this machine. Importing this module imports no torch."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import resource
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_PIECE = 1 << 20  # per request: Linux reads only some 100 kB to a few MB of a request ahead


@dataclass
class PeakMemory:
    """Peak memory of this process so far, in bytes.

    Attributes:
        resident: Resident set size, pages of memory-mapped files included.
        anonymous: Allocated memory, sampled every 10 ms; None on other systems than Linux.
        mapped: Memory-mapped file pages and shared memory, sampled every 10 ms.
    """

    resident: int
    anonymous: int | None
    mapped: int | None

    def record(self) -> dict[str, int | None]:
        """Returns the values under the keys of a record."""
        return {"host": self.resident, "host_anonymous": self.anonymous, "host_mapped": self.mapped}

    def line(self) -> str:
        """Formats the values in GiB, in one line."""
        found = f"host {self.resident / 2**30:.2f} GiB"
        if self.anonymous is None or self.mapped is None:
            return found
        parts = (
            f"{self.anonymous / 2**30:.2f} allocated, {self.mapped / 2**30:.2f} mapped from files"
        )
        return f"{found} ({parts})"


_SAMPLED = [0, 0]  # highest anonymous and mapped bytes of all samples
_STATM = Path("/proc/self/statm")


def peak_memory() -> PeakMemory:
    """Returns the peak memory so far; its parts are sampled in blocks of `sample_peak_memory`."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = peak if sys.platform == "darwin" else peak * 1024
    if not _STATM.exists():
        return PeakMemory(peak, None, None)
    _sample()
    return PeakMemory(max(peak, *_SAMPLED), *_SAMPLED)


def _sample() -> None:
    """Updates the peaks of both kinds of memory; Linux itself only has the peak of their sum."""
    resident, shared = (int(pages) * mmap.PAGESIZE for pages in _STATM.read_text().split()[1:3])
    _SAMPLED[:] = max(_SAMPLED[0], resident - shared), max(_SAMPLED[1], shared)


@contextmanager
def memory_sampled() -> Iterator[None]:
    """Samples the anonymous and mapped memory of this process while the block runs."""
    over = threading.Event()

    def follow() -> None:
        while not over.wait(0.01):
            _sample()

    thread = threading.Thread(target=follow, daemon=True)
    if _STATM.exists():
        thread.start()
    try:
        yield
    finally:
        over.set()
        if thread.ident is not None:
            thread.join()


def cores() -> int:
    """Returns the usable CPU cores divided by the ranks on this machine, at least 1."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max((usable or 1) // ranks(), 1)


def ranks() -> int:
    """Returns the number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def cpu() -> str:
    """Returns the CPU's model name in /proc/cpuinfo, or else the platform's."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def hides(variable: str) -> bool:
    """Returns whether a variable such as CUDA_VISIBLE_DEVICES hides all devices."""
    return os.environ.get(variable, "0").strip() in ("", "-1")


def renumbered(variable: str, index: int) -> int | None:
    """Returns the machine-wide index of this process's device `index`.

    Args:
        variable: Variable that selects and renumbers devices, such as CUDA_VISIBLE_DEVICES.

    Returns:
        The index; None if the variable does not hold numbers.
    """
    numbers = os.environ.get(variable)
    try:
        return index if numbers is None else int(numbers.split(",")[index])
    except (ValueError, IndexError):
        return None


def machine() -> str:
    """Returns an ID of this machine: the boot ID, which containers share, or else the host name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


@contextmanager
def on_own_cores() -> Iterator[None]:
    """Sets PyTorch's CPU threads to this rank's share of the cores while the block runs.

    torchrun limits each rank to one thread, too few for the parts that run on the CPU. Without a
    launcher the number of threads stays as it is.
    """
    import torch

    before = torch.get_num_threads()
    if "LOCAL_WORLD_SIZE" in os.environ:
        torch.set_num_threads(max(before, cores()))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def in_background(work: Callable[[], object]) -> None:
    """Runs a function in a daemon thread."""
    threading.Thread(target=work, daemon=True).start()


def read_ahead(files: Iterable[Path]) -> None:
    """Starts reading files into the system's page cache; returns before they are read.

    Files larger in total than the available memory are not read ahead, since their end would evict
    their beginning.
    """
    paths = list(files)
    sizes = [path.stat().st_size for path in paths]
    if not hasattr(os, "posix_fadvise") or sum(sizes) > (available_memory() or 0):  # macOS
        return
    for path, size in zip(paths, sizes, strict=True):
        with path.open("rb") as file:
            for first in range(0, size, _PIECE):
                os.posix_fadvise(file.fileno(), first, _PIECE, os.POSIX_FADV_WILLNEED)


_MADV_WILLNEED = 3  # on Linux and macOS


def read_ahead_mapped(address: int, size: int) -> None:
    """Starts reading a part of a memory-mapped file into the page cache.

    No effect on systems without madvise.
    """
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None:
        return
    first, last = address // mmap.PAGESIZE * mmap.PAGESIZE, address + size
    for start in range(first, last, _PIECE):
        length = min(_PIECE, last - start)
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_WILLNEED)


def trim_heap() -> None:
    """Returns freed heap memory to the system; no effect with other C libraries than glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


_V2 = ("memory.max", "memory.current", "file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache")


def available_memory(root: Path = Path("/")) -> int | None:
    """Returns the available memory in bytes, within the limits of this process's control groups.

    Args:
        root: Parent of proc and sys.

    Returns:
        The bytes; None on other systems than Linux.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    for _, controllers, path in (line.split(":", 2) for line in groups):
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / ("sys/fs/cgroup/memory" if controllers else "sys/fs/cgroup")
        folder = top / path.strip("/")
        for group in (folder, *folder.parents):  # a container may have the top only
            if group.is_relative_to(top):
                found += _left(group, *(_V1 if controllers else _V2))
    return min(found, default=None)


def _left(group: Path, limit: str, usage: str, cached: str) -> list[int]:
    """Returns [limit - usage + reclaimable page cache] of a control group; [] without a limit."""
    try:
        most, used = (int((group / name).read_text()) for name in (limit, usage))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such file, or "max"
        return []
    return [most - used + int(stat.get(cached, 0))]


def has_bfloat16() -> bool:
    """Returns whether this CPU has bfloat16 matrix or dot-product instructions (Linux)."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return (
        re.search(r"^(flags|Features)\b.*\b(amx_bf16|avx512_bf16|bf16)\b", text, re.M) is not None
    )
