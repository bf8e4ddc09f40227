"""What this machine gives a process: memory, CPU cores, the system's file cache.

Importing it imports no torch.
"""

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

_PIECE = 1 << 20  # bytes; of one request to read ahead, Linux serves a few hundred kB to some MB


@dataclass
class PeakMemory:
    """The highest memory of this process so far, in bytes.

    Attributes:
        resident: All of it, also pages of mapped files, as the system counts it.
        anonymous: What was allocated, of samples every 10 ms; None where Linux does not say it.
        mapped: Pages of files and memory shared with other processes, as above.
    """

    resident: int
    anonymous: int | None
    mapped: int | None

    def record(self) -> dict[str, int | None]:
        """Returns the values as a record has them."""
        return {"host": self.resident, "host_anonymous": self.anonymous, "host_mapped": self.mapped}

    def line(self) -> str:
        """Describes the values in one line."""
        found = f"host {self.resident / 2**30:.2f} GiB"
        if self.anonymous is None or self.mapped is None:
            return found
        parts = (
            f"{self.anonymous / 2**30:.2f} allocated, {self.mapped / 2**30:.2f} mapped from files"
        )
        return f"{found} ({parts})"


_SAMPLED = [0, 0]  # the highest anonymous and mapped bytes of all samples
_STATM = Path("/proc/self/statm")


def peak_memory() -> PeakMemory:
    """Returns the highest memory so far; both kinds apart while `memory_sampled` runs."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = peak if sys.platform == "darwin" else peak * 1024
    if not _STATM.exists():
        return PeakMemory(peak, None, None)
    _sample()
    return PeakMemory(max(peak, *_SAMPLED), *_SAMPLED)


def _sample() -> None:
    """Notes what is resident now; Linux keeps a highest value of both kinds together only."""
    resident, shared = (int(pages) * mmap.PAGESIZE for pages in _STATM.read_text().split()[1:3])
    _SAMPLED[:] = max(_SAMPLED[0], resident - shared), max(_SAMPLED[1], shared)


@contextmanager
def memory_sampled() -> Iterator[None]:
    """Follows, while the block runs, how much memory of each kind this process has."""
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
    """CPU cores of this process's share, at least one: those it may use, by its machine's ranks."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max((usable or 1) // ranks(), 1)


def ranks() -> int:
    """Processes of the run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def cpu() -> str:
    """The processor's model name, where Linux tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def hides(variable: str) -> bool:
    """Whether a vendor's variable, such as CUDA_VISIBLE_DEVICES, is set to no device."""
    return os.environ.get(variable, "0").strip() in ("", "-1")


def renumbered(variable: str, index: int) -> int | None:
    """The machine's number of this process's device `index`, which a vendor's variable renumbers.

    None where the variable does not hold numbers.
    """
    numbers = os.environ.get(variable)
    try:
        return index if numbers is None else int(numbers.split(",")[index])
    except (ValueError, IndexError):
        return None


def machine() -> str:
    """Equal for all processes on this machine, also in containers; on Linux no other has it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


@contextmanager
def on_own_cores() -> Iterator[None]:
    """PyTorch on the CPU uses this process's share of the cores.

    For what a rank computes on the CPU beside an accelerator; torchrun allows each rank one thread.
    Without a launcher PyTorch uses all cores, or what its user has said.
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
    """Starts a thread for work that nothing waits for and that the end of the process ends."""
    threading.Thread(target=work, daemon=True).start()


def read_ahead(files: Iterable[Path]) -> None:
    """Have the system read files into its cache; returns when it has been asked for all of them.

    No memory of the process is taken. Nothing is asked for where the files are larger than what is
    free: their end would push out their beginning.
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
    """As `read_ahead`, for a part of a mapped file; what is not asked for is read when it is used.

    Without an effect where the system has no madvise.
    """
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None:
        return
    first, last = address // mmap.PAGESIZE * mmap.PAGESIZE, address + size
    for start in range(first, last, _PIECE):
        length = min(_PIECE, last - start)
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_WILLNEED)


def trim_heap() -> None:
    """Gives memory that was freed back to the system, which glibc keeps for later allocations.

    Without an effect where the C library is another one.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


_V2 = ("memory.max", "memory.current", "file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache")


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes Linux has available, and no more than this process's control groups leave.

    root: where proc and sys are. None on other systems.
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
        for group in (folder, *folder.parents):  # in a container, only the top may be there
            if group.is_relative_to(top):
                found += _left(group, *(_V1 if controllers else _V2))
    return min(found, default=None)


def _left(group: Path, limit: str, usage: str, cached: str) -> list[int]:
    """What a control group leaves; its page cache makes room. Empty: no limit, or not there."""
    try:
        most, used = (int((group / name).read_text()) for name in (limit, usage))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such file, or "max"
        return []
    return [most - used + int(stat.get(cached, 0))]


def has_bfloat16() -> bool:
    """Whether this CPU says that it has instructions for bfloat16 products (AMX, AVX-512, Arm)."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return (
        re.search(r"^(flags|Features)\b.*\b(amx_bf16|avx512_bf16|bf16)\b", text, re.M) is not None
    )
