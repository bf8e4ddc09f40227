"""What torch.npu offers: devices, memory, streams and events, all of them one CPU."""

from __future__ import annotations

import contextlib
import time
import types
from typing import Any

import torch

from torch_npu import chip

config = types.SimpleNamespace(allow_internal_format=True)
"""The real one is a module whose settings are assigned; its default depends on the release."""
compile_mode: dict[str, bool] = {}
_current = 0
MEMORY = 64 << 30


def is_available() -> bool:
    return chip.device_count() > 0


def device_count() -> int:
    return chip.device_count()


def set_device(device: Any) -> None:
    """RuntimeError for a device that is not there."""
    global _current
    index = _index(device)
    chip.require(0 <= index < device_count(), "set_device", f"there is no device {index}.")
    _current = index


def _index(device: Any) -> int:
    if device is None:
        return _current
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return _current if index is None else index


def current_device() -> int:
    return _current


def get_soc_version() -> int:
    return chip.soc()


def get_device_name(device: Any = None) -> str:
    return chip.DEVICE_NAMES[chip.name()]


def get_device_properties(device: Any = None) -> types.SimpleNamespace:
    return types.SimpleNamespace(name=get_device_name(), total_memory=MEMORY)


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return MEMORY, MEMORY


def synchronize(device: Any = None) -> None: ...


def empty_cache() -> None: ...


def reset_peak_memory_stats(device: Any = None) -> None: ...


def max_memory_allocated(device: Any = None) -> int:
    """Bytes; not measured here."""
    return 0


def memory_allocated(device: Any = None) -> int:
    return 0


def memory_reserved(device: Any = None) -> int:
    return 0


def max_memory_reserved(device: Any = None) -> int:
    return 0


def memory_stats(device: Any = None) -> dict[str, int]:
    return {}


def set_compile_mode(**modes: bool) -> None:
    compile_mode.update(modes)


def manual_seed(seed: int) -> None:
    torch.manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """torch.manual_seed calls it, and has seeded the one generator there is."""


def _is_in_bad_fork() -> bool:
    return False


def is_initialized() -> bool:
    return True


def is_bf16_supported() -> bool:
    return chip.name() != "Duo"


class Event:
    """Work on a CPU is done when it was given, so there is nothing to wait for."""

    def __init__(self, *args: Any, **named: Any) -> None:
        self._seconds = 0.0

    def record(self, stream: Any = None) -> None:
        self._seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return (end._seconds - self._seconds) * 1e3


class Stream:
    """One of several names for the only order in which a CPU works."""

    def __init__(self, device: Any = None, priority: int = 0, **named: Any) -> None:
        self.device_index = _index(device)

    @property
    def device(self) -> torch.device:
        return torch.device("npu", self.device_index)

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None: ...


_default = Stream(0)


def current_stream(device: Any = None) -> Stream:
    return _default


def default_stream(device: Any = None) -> Stream:
    return _default


def set_stream(stream: Stream) -> None: ...


def stream(stream: Stream | None) -> Any:
    return contextlib.nullcontext(stream)


def device(device: Any) -> Any:
    return contextlib.nullcontext(device)
