"""An accelerator's memory, clock and streams: torch.cuda's functions are replaced by recorders.

torch.npu has the same functions. In the log, "copies" and "computing" are streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from wan.device import CopyStream, Device, use_side_stream
from wan.settings.devices import get_capabilities

CUDA = torch.device("cuda", 1)
DEVICE = Device(CUDA, get_capabilities("cuda"))


@dataclass
class Recorded:
    """A stream or an event that logs its name, the method, and the name of the argument."""

    log: list[str]
    name: str

    def __getattr__(self, method: str) -> Callable[..., None]:
        return lambda *others: self.log.append(
            " ".join((self.name, method, *(other.name for other in others)))
        )


class CopyLog(TorchFunctionMode):
    """Logs copies and whether the host waits for them."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.copy_:
            waits = "" if kwargs.get("non_blocking") else ", host waits"
            self.log.append(f"copy of {int(args[1][0])}{waits}")
        return func(*args, **kwargs)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The log of torch.cuda, whose streams, events and current device are recorded."""
    lines: list[str] = []

    @contextmanager
    def use_stream(stream: Recorded) -> Iterator[None]:
        lines.append(f"on {stream.name}:")
        try:
            yield
        finally:
            lines.append("end")

    computing = Recorded(lines, "computing")
    replacements = {
        "Stream": lambda device: Recorded(lines, "copies"),
        "Event": lambda: Recorded(lines, "event"),
        "stream": use_stream,
        "current_stream": lambda *_: computing,
        "default_stream": lambda device: computing,
        "set_device": lambda device: lines.append(f"current device {device.index}"),
    }
    for name, replacement in replacements.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    return lines


def test_copies_are_ordered_with_computations_by_events(log: list[str]) -> None:
    stream, memory = CopyStream(CUDA), torch.zeros(6)
    done, copied = stream.make_event(), stream.make_event()
    done.name, copied.name = "done", "copied"
    stream.record_computed(done)
    with CopyLog(log):
        stream.copy(memory, [(slice(0, 2), torch.ones(2)), (slice(4, 6), torch.ones(2) * 2)], done)
    stream.record_copied(copied)
    stream.make_compute_wait(copied)
    assert memory.tolist() == [1, 1, 0, 0, 2, 2]
    assert ", ".join(log) == (
        "done record computing, copies wait_event done, on copies:, copy of 1, copy of 2, end, "
        "copied record copies, computing wait_event copied"
    )


@pytest.mark.parametrize("fails", [False, True])
def test_a_side_stream_begins_after_and_ends_before_the_host(log: list[str], fails: bool) -> None:
    with pytest.raises(ZeroDivisionError) if fails else nullcontext(), use_side_stream(CUDA):
        log.append("work")
        if fails:
            raise ZeroDivisionError
    assert ", ".join(log) == (
        "current device 1, copies wait_stream computing, on copies:, work, end, copies synchronize"
    )


def test_free_memory_includes_what_the_allocator_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5000, 80_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 120)
    assert DEVICE.free_memory() == 5000 + 300 - 120


class TimedEvent:
    """An event at the time, in milliseconds, at which it was recorded."""

    times = iter((1000.0, 1002.5, 1004.0))

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.time = next(self.times)

    def elapsed_time(self, end: TimedEvent) -> float:
        return end.time - self.time


def test_a_clock_of_events_has_the_hosts_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events say milliseconds since the first one, and the clock nanoseconds of the host."""
    monkeypatch.setattr(torch.cuda, "Event", TimedEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr("time.perf_counter_ns", lambda: 7_000_000_000)
    clock = DEVICE.make_clock()
    clock.start()
    first, second = clock.now(), clock.now()
    assert (first(), second()) == (7_002_500_000, 7_004_000_000)
