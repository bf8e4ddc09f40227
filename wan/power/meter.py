"""The power meter: a source that is read from a thread, off the critical path.

Imports no torch: sources read the vendors' libraries and tools, beside PyTorch.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from types import TracebackType
from typing import Protocol

from wan import host
from wan.power.measured import Measured, Sample, Series

PERIOD = 0.05  # seconds between two readings, where the source allows it


class MeterError(Exception):
    """Says why there is no meter, or why it cannot be read now."""


class PowerSource(Protocol):
    """Where the readings of one device come from.

    Attributes:
        name: The interface.
        device: What is metered, as the vendor's tools name it.
        power_is: What `Sample.watts` is, such as a mean of a second.
        period: Fewest seconds between two readings.
        limit_w: The power that the device is held to.
        rated_mhz: Its highest clock.
        smoothing: The state of power smoothing, where the device has it.
        cpu_elsewhere: Seconds of CPU time that readings have taken in other processes.
    """

    name: str
    device: str = ""
    power_is: str = ""
    period: float = 0.0
    limit_w: float | None = None
    rated_mhz: float | None = None
    smoothing: dict[str, float] | None = None
    cpu_elsewhere: float = 0.0

    def read(self) -> Sample:
        """MeterError where a reading fails."""
        ...

    def close(self) -> None:
        """What was opened is given back; most sources open nothing."""
        return


class Absent(PowerSource):
    """Of a device without a meter."""

    name = "none"

    def __init__(self, why: str) -> None:
        self.why = why

    def read(self) -> Sample:
        raise MeterError(self.why)


class _Totals:
    """Sums over time of the samples so far; values run in straight lines between samples."""

    def __init__(self) -> None:
        self.samples = 0
        self.seconds = 0.0
        self.peak_w: float | None = None
        self.min_mhz: float | None = None
        self.joules: float | None = None
        self.reasons: dict[str, float] = {}  # seconds
        self._first: Sample | None = None
        self._last: Sample | None = None
        self._areas = {"watts": [0.0, 0.0], "mhz": [0.0, 0.0], "throttled": [0.0, 0.0]}

    def add(self, sample: Sample) -> Sample:
        """The sample, with its power where only the energy counter tells it."""
        last, self._last = self._last, sample
        self._first = self._first or sample
        self.samples += 1
        if last is not None and sample.time > last.time:
            if sample.joules is not None and self._first.joules is not None:
                self.joules = sample.joules - self._first.joules
            if sample.watts is None and sample.joules is not None and last.joules is not None:
                watts = (sample.joules - last.joules) / (sample.time - last.time)
                sample = self._last = replace(sample, watts=watts)
            half = (sample.time - last.time) / 2
            self._weigh(last, half)
            self._weigh(sample, half)
            self.seconds = sample.time - self._first.time
        if sample.watts is not None:
            self.peak_w = max(sample.watts, self.peak_w or 0.0)
        if sample.mhz is not None:
            self.min_mhz = sample.mhz if self.min_mhz is None else min(sample.mhz, self.min_mhz)
        return sample

    def mean(self, name: str) -> float | None:
        """Over the time in which it was told; where that is a single sample, its value."""
        area, seconds = self._areas[name]
        if seconds:
            return area / seconds
        told = _values(self._last)[name] if self._last is not None else None
        return None if told is None else float(told)

    def _weigh(self, sample: Sample, seconds: float) -> None:
        for name, value in _values(sample).items():
            if value is not None:
                self._areas[name][0] += value * seconds
                self._areas[name][1] += seconds
        for reason in sample.reasons or ():
            self.reasons[reason] = self.reasons.get(reason, 0.0) + seconds


def _values(sample: Sample) -> dict[str, float | None]:
    throttled = None if sample.reasons is None else float(bool(sample.reasons))
    return {"watts": sample.watts, "mhz": sample.mhz, "throttled": throttled}


class Meter:
    """Reads a source every `period` seconds, or as often as it allows, from start to stop.

    A reading that fails is counted and the next one tried: the run that is metered goes on,
    whatever the meter meets.
    """

    def __init__(self, source: PowerSource, period: float = PERIOD) -> None:
        self.source, self.period = source, max(period, source.period)
        self.series = Series()
        self._totals = _Totals()
        self._failed, self._why = 0, "no reading was made"
        self._cpu_seconds = 0.0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if isinstance(self.source, Absent):
            self._why = self.source.why
            return
        self._thread = threading.Thread(target=self._run, name="power meter", daemon=True)
        self._thread.start()

    def stop(self) -> Measured:
        """Take the last reading, and say what was found; called again, it says the same."""
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._thread = None
            self.source.close()
        return self._measured()

    def __enter__(self) -> Meter:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.stop()
        self._ended.set()  # a run that fails does not wait for a last reading

    def _run(self) -> None:
        due = time.monotonic()
        while not self._ended.is_set():
            self._read()
            late = time.monotonic() - due  # a slow reading leaves the next ones out
            due += self.period * (late // self.period + 1)
            self._ended.wait(due - time.monotonic())
        self._read()

    def _read(self) -> None:
        try:
            self.series.add(self._totals.add(self.source.read()))
        except MeterError as reason:
            self._failed, self._why = self._failed + 1, str(reason)
        self._cpu_seconds = time.thread_time() + self.source.cpu_elsewhere

    def _measured(self) -> Measured:
        source, totals = self.source, self._totals
        if not totals.samples:
            return Measured(machine=host.machine(), why=self._why, failed=self._failed)
        mean_w, joules, by = totals.mean("watts"), totals.joules, "energy counter"
        if joules is not None:
            mean_w = joules / totals.seconds
        elif mean_w is not None and totals.seconds:
            joules, by = mean_w * totals.seconds, "integral of power"
        return Measured(
            source=source.name,
            device=source.device,
            machine=host.machine(),
            power_is=source.power_is,
            period=self.period,
            seconds=totals.seconds,
            samples=totals.samples,
            failed=self._failed,
            mean_w=mean_w,
            peak_w=totals.peak_w,
            joules=joules,
            joules_by="" if joules is None else by,
            mean_mhz=totals.mean("mhz"),
            min_mhz=totals.min_mhz,
            rated_mhz=source.rated_mhz,
            limit_w=source.limit_w,
            throttled=totals.mean("throttled"),
            reasons={
                name: seconds / totals.seconds for name, seconds in sorted(totals.reasons.items())
            },
            smoothing=source.smoothing,
            cpu_seconds=self._cpu_seconds,
            series=self.series,
        )
