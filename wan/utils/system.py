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

# Per request: Linux reads only some 100 kB to a few MB of a request ahead.
_READ_AHEAD_BYTES = 1 << 20


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

    def to_record(self) -> dict[str, int | None]:
        """Returns the values under the keys of a record."""
        return {"host": self.resident, "host_anonymous": self.anonymous, "host_mapped": self.mapped}

    def summary(self) -> str:
        """Formats the values in GiB, in one line."""
        text = f"host {self.resident / 2**30:.2f} GiB"
        if self.anonymous is None or self.mapped is None:
            return text
        parts = (
            f"{self.anonymous / 2**30:.2f} allocated, {self.mapped / 2**30:.2f} mapped from files"
        )
        return f"{text} ({parts})"


_PEAK_BYTES = [0, 0]  # highest anonymous and mapped bytes of all samples
_STATM = Path("/proc/self/statm")


def read_peak_memory() -> PeakMemory:
    """Returns the peak memory so far; its parts are sampled in blocks of `sample_peak_memory`."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = peak if sys.platform == "darwin" else peak * 1024
    if not _STATM.exists():
        return PeakMemory(peak, None, None)
    _update_peak_bytes()
    return PeakMemory(max(peak, *_PEAK_BYTES), *_PEAK_BYTES)


def _update_peak_bytes() -> None:
    """Updates the peaks of both kinds of memory; Linux itself only has the peak of their sum."""
    resident, shared = (int(pages) * mmap.PAGESIZE for pages in _STATM.read_text().split()[1:3])
    _PEAK_BYTES[:] = max(_PEAK_BYTES[0], resident - shared), max(_PEAK_BYTES[1], shared)


@contextmanager
def sample_peak_memory() -> Iterator[None]:
    """Samples the anonymous and mapped memory of this process while the block runs."""
    stop_event = threading.Event()

    def sample_until_stopped() -> None:
        while not stop_event.wait(0.01):
            _update_peak_bytes()

    thread = threading.Thread(target=sample_until_stopped, daemon=True)
    if _STATM.exists():
        thread.start()
    try:
        yield
    finally:
        stop_event.set()
        if thread.ident is not None:
            thread.join()


def count_cores() -> int:
    """Returns the usable CPU cores divided by the ranks on this machine, at least 1."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max((usable or 1) // count_local_ranks(), 1)


def count_local_ranks() -> int:
    """Returns the number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def read_cpu_name() -> str:
    """Returns the CPU's model name in /proc/cpuinfo, or else the platform's."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def hides_all_devices(variable: str) -> bool:
    """Returns whether a variable such as CUDA_VISIBLE_DEVICES hides all devices."""
    return os.environ.get(variable, "0").strip() in ("", "-1")


def find_machine_index(variable: str, index: int) -> int | None:
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


def read_machine_id() -> str:
    """Returns an ID of this machine: the boot ID, which containers share, or else the host name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


@contextmanager
def limit_cpu_threads() -> Iterator[None]:
    """Sets PyTorch's CPU threads to this rank's share of the cores while the block runs.

    torchrun limits each rank to one thread, too few for the parts that run on the CPU. Without a
    launcher the number of threads stays as it is.
    """
    import torch

    previous = torch.get_num_threads()
    if "LOCAL_WORLD_SIZE" in os.environ:
        torch.set_num_threads(max(previous, count_cores()))
    try:
        yield
    finally:
        torch.set_num_threads(previous)


def start_background_thread(work: Callable[[], object]) -> None:
    """Runs a function in a daemon thread."""
    threading.Thread(target=work, daemon=True).start()


def prefetch_files(files: Iterable[Path]) -> None:
    """Starts reading files into the system's page cache; returns before they are read.

    Files larger in total than the available memory are not read ahead, since their end would evict
    their beginning.
    """
    paths = list(files)
    sizes = [path.stat().st_size for path in paths]
    if not hasattr(os, "posix_fadvise") or sum(sizes) > (read_available_memory() or 0):  # macOS
        return
    for path, size in zip(paths, sizes, strict=True):
        with path.open("rb") as file:
            for offset in range(0, size, _READ_AHEAD_BYTES):
                os.posix_fadvise(file.fileno(), offset, _READ_AHEAD_BYTES, os.POSIX_FADV_WILLNEED)


_MADV_WILLNEED = 3  # on Linux and macOS


def prefetch_mapped_bytes(address: int, size: int) -> None:
    """Starts reading a part of a memory-mapped file into the page cache.

    No effect on systems without madvise.
    """
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None:
        return
    page_start, end = address // mmap.PAGESIZE * mmap.PAGESIZE, address + size
    for offset in range(page_start, end, _READ_AHEAD_BYTES):
        length = min(_READ_AHEAD_BYTES, end - offset)
        madvise(ctypes.c_void_p(offset), ctypes.c_size_t(length), _MADV_WILLNEED)


def trim_heap() -> None:
    """Returns freed heap memory to the system; no effect with other C libraries than glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


_CGROUP_V2_FILES = ("memory.max", "memory.current", "file")
_CGROUP_V1_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache")


def read_available_memory(root: Path = Path("/")) -> int | None:
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
    limits = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    for _, controllers, path in (line.split(":", 2) for line in groups):
        if controllers and "memory" not in controllers.split(","):
            continue
        hierarchy = root / ("sys/fs/cgroup/memory" if controllers else "sys/fs/cgroup")
        folder = hierarchy / path.strip("/")
        for group in (folder, *folder.parents):  # a container may have the top only
            if group.is_relative_to(hierarchy):
                limits += _read_group_headroom(
                    group, *(_CGROUP_V1_FILES if controllers else _CGROUP_V2_FILES)
                )
    return min(limits, default=None)


def _read_group_headroom(group: Path, limit: str, usage: str, cached: str) -> list[int]:
    """Returns [limit - usage + reclaimable page cache] of a control group; [] without a limit."""
    try:
        limit_bytes, used_bytes = (int((group / name).read_text()) for name in (limit, usage))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such file, or "max"
        return []
    return [limit_bytes - used_bytes + int(stat.get(cached, 0))]


def read_cpu_features() -> str:
    """Returns the names of this CPU's instruction sets in /proc/cpuinfo; "" without that file."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    features = re.search(r"^(?:flags|Features)\b(.*)", text, re.M)
    return features[1] if features else ""
