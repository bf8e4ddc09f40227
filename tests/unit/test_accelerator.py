"""An accelerator's memory, clock and streams: torch.cuda's functions are replaced by recorders.

torch.npu has the same functions. In the log, "copies" and "computing" are streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from wan.device import CopyStream, Device, use_side_stream
from wan.settings.devices import get_capabilities

CUDA = torch.device("cuda", 1)
DEVICE = Device(CUDA, get_capabilities("cuda"))


class RecordedStream:
    """A stream that logs what it is asked for."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def wait_event(self, event: RecordedEvent) -> None:
        self.log.append(f"{self.name} wait for {event.name}")

    def wait_stream(self, stream: RecordedStream) -> None:
        self.log.append(f"{self.name} wait for {stream.name}")

    def synchronize(self) -> None:
        self.log.append(f"host waits for {self.name}")


class RecordedEvent:
    """An event that logs the stream that it is recorded on."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def record(self, stream: RecordedStream) -> None:
        self.log.append(f"{self.name} on {stream.name}")


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
    def use_stream(stream: RecordedStream) -> Iterator[None]:
        lines.append(f"on {stream.name}:")
        try:
            yield
        finally:
            lines.append("end")

    computing = RecordedStream(lines, "computing")
    replacements = {
        "Stream": lambda device: RecordedStream(lines, "copies"),
        "Event": lambda: RecordedEvent(lines, "event"),
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
        "done on computing, copies wait for done, on copies:, copy of 1, copy of 2, end, "
        "copied on copies, computing wait for copied"
    )


@pytest.mark.parametrize("fails", [False, True])
def test_a_side_stream_begins_after_and_ends_before_the_host(log: list[str], fails: bool) -> None:
    with pytest.raises(ZeroDivisionError) if fails else nullcontext(), use_side_stream(CUDA):
        log.append("work")
        if fails:
            raise ZeroDivisionError
    assert ", ".join(log) == (
        "current device 1, copies wait for computing, on copies:, work, end, host waits for copies"
    )


def replace_functions(monkeypatch: pytest.MonkeyPatch, **results: Callable[..., Any]) -> None:
    for name, function in results.items():
        monkeypatch.setattr(torch.cuda, name, function)


def test_free_memory_includes_what_the_allocator_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_functions(
        monkeypatch,
        mem_get_info=lambda device: (5000, 80_000),
        memory_reserved=lambda device: 300,
        memory_allocated=lambda device: 120,
    )
    assert DEVICE.free_memory() == 5000 + 300 - 120


class TimedEvent:
    """An event at the time, in milliseconds, at which it was recorded."""

    def __init__(self, times: Sequence[float], enable_timing: bool) -> None:
        assert enable_timing
        self._times = iter(times)

    def record(self) -> None:
        self.time = next(self._times)

    def elapsed_time(self, end: TimedEvent) -> float:
        return end.time - self.time


def test_a_clock_of_events_has_the_hosts_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events say milliseconds since the first one, and the clock nanoseconds of the host."""
    times = iter((1000.0, 1002.5, 1004.0))
    replace_functions(
        monkeypatch,
        Event=lambda enable_timing: TimedEvent([next(times)], enable_timing),
        synchronize=lambda device: None,
    )
    monkeypatch.setattr("time.perf_counter_ns", lambda: 7_000_000_000)
    clock = DEVICE.make_clock()
    clock.start()
    first, second = clock.now(), clock.now()
    assert (first(), second()) == (7_002_500_000, 7_004_000_000)
