"""The power meter: readings of a device, taken by a thread beside the run, and what they tell.

Importing it imports no torch: the sources read the vendors' libraries and tools, beside PyTorch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from wan import host

if TYPE_CHECKING:
    from wan.device import Device
    from wan.distributed.mesh import Team

PERIOD = 0.05  # seconds between two readings, where the source allows it
MOST_KEPT = 1 << 16  # samples of a series: 55 minutes at 50 ms; then every second one goes


class MeterError(Exception):
    """Says why there is no meter, or why it cannot be read now."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading; what the source cannot tell is None."""

    watts: float | None = None
    joules: float | None = None  # of a counter, of which only differences count
    mhz: float | None = None
    reasons: frozenset[str] | None = None  # what lowers the clock
    time: float = field(default_factory=time.monotonic)


class PowerSource(Protocol):
    """Where the readings of one device come from."""

    name: str
    device: str = ""  # as the vendor's tools name it
    power_is: str = ""  # what `Sample.watts` is, such as a mean of a second
    period: float = 0.0  # fewest seconds between two readings
    limit_w: float | None = None
    rated_mhz: float | None = None  # the device's highest clock
    smoothing: dict[str, float] | None = None  # state of power smoothing, on devices that have it
    cpu_elsewhere: float = 0.0  # seconds of CPU time that readings took in other processes

    def read(self) -> Sample:
        """Takes a reading; raises MeterError where it fails."""
        ...

    def close(self) -> None:
        """Gives back what was opened; most sources open nothing."""
        return


class Absent(PowerSource):
    """Stands for the meter of a device that has none."""

    name = "none"

    def __init__(self, why: str) -> None:
        self.why = why

    def read(self) -> Sample:
        raise MeterError(self.why)


class Series:
    """Samples, and sums over the time between them, in which values run in straight lines.

    Of a long run, samples further apart are kept; the sums are those of all samples.
    """

    def __init__(self, most: int = MOST_KEPT) -> None:
        self.samples: list[Sample] = []
        self.count, self.seconds = 0, 0.0
        self.joules: float | None = None
        self.peak_w: float | None = None
        self.min_mhz: float | None = None
        self.reasons: dict[str, float] = {}  # seconds
        self._areas = {name: [0.0, 0.0] for name in ("watts", "mhz", "throttled")}
        self._first: Sample | None = None
        self._last: Sample | None = None
        self._most, self._every = most, 1

    def add(self, sample: Sample) -> None:
        """Adds a sample; where only a counter tells its power, that since the last sample."""
        first, last = self._first or sample, self._last
        if last is not None and sample.time > last.time:
            if sample.joules is not None and first.joules is not None:
                self.joules = sample.joules - first.joules
            if sample.watts is None and sample.joules is not None and last.joules is not None:
                watts = (sample.joules - last.joules) / (sample.time - last.time)
                sample = replace(sample, watts=watts)
            for one in (last, sample):
                self._weigh(one, (sample.time - last.time) / 2)
            self.seconds = sample.time - first.time
        self._first, self._last = first, sample
        if sample.watts is not None:
            self.peak_w = max(sample.watts, self.peak_w or 0.0)
        if sample.mhz is not None:
            self.min_mhz = sample.mhz if self.min_mhz is None else min(sample.mhz, self.min_mhz)
        if self.count % self._every == 0:
            self.samples.append(sample)
        self.count += 1
        if len(self.samples) > self._most:
            self._every *= 2
            del self.samples[1::2]

    def mean(self, name: str) -> float | None:
        """The mean over the time in which a value was told; of a single sample, its value."""
        area, seconds = self._areas[name]
        if seconds or self._last is None:
            return area / seconds if seconds else None
        return _values(self._last)[name]

    def _weigh(self, sample: Sample, seconds: float) -> None:
        for name, value in _values(sample).items():
            if value is not None:
                self._areas[name][0] += value * seconds
                self._areas[name][1] += seconds
        for reason in sample.reasons or ():
            self.reasons[reason] = self.reasons.get(reason, 0.0) + seconds

    def record(self) -> dict[str, list[Any]]:
        """Returns columns of equal length for JSON; seconds count from the first sample."""
        columns: dict[str, list[Any]] = {
            "seconds": [round(one.time - self.samples[0].time, 4) for one in self.samples]
        }
        for name, digits in (("watts", 2), ("joules", 3), ("mhz", 1)):
            told = [getattr(one, name) for one in self.samples]
            columns[name] = [None if value is None else round(value, digits) for value in told]
        reasons = [one.reasons for one in self.samples]
        return columns | {
            "reasons": [None if found is None else sorted(found) for found in reasons]
        }


def _values(sample: Sample) -> dict[str, float | None]:
    throttled = None if sample.reasons is None else float(bool(sample.reasons))
    return {"watts": sample.watts, "mhz": sample.mhz, "throttled": throttled}


@dataclass(frozen=True)
class Measured:
    """What a meter has found from its start to its stop, or the meters of several devices."""

    source: str = "none"  # the interface that was read
    device: str = ""
    machine: str = ""  # named so that no other has the name
    covers: str = ""  # which part of a run was metered
    why: str | None = None  # why nothing was measured; of several devices, why one was not
    power_is: str = ""
    period: float = 0.0  # seconds between two readings that were aimed at
    seconds: float = 0.0  # from the first reading to the last
    samples: int = 0
    failed: int = 0  # readings that failed
    mean_w: float | None = None  # of several devices, their sum
    peak_w: float | None = None  # highest power of one device
    joules: float | None = None  # of several devices, their sum
    joules_by: str = ""  # how the energy was found
    mean_mhz: float | None = None
    min_mhz: float | None = None
    rated_mhz: float | None = None
    limit_w: float | None = None
    throttled: float | None = None  # share of time in which something lowered the clock
    reasons: dict[str, float] = field(default_factory=dict)  # shares; several may hold at once
    smoothing: dict[str, float] | None = None
    cpu_seconds: float = 0.0  # CPU time of metering, also in processes that it started
    parts: tuple[Measured, ...] = ()  # of several devices, each
    series: Series | None = None  # of one device

    def record(self) -> dict[str, Any]:
        """Returns the result for JSON, without the series, which has a record of its own."""
        if not self.samples:
            return {"source": self.source, "why": self.why}
        left_out = ("machine", "series", "parts", "reasons")
        found: dict[str, Any] = {
            name: round(value, 4) if isinstance(value, float) else value
            for name, value in ((one.name, getattr(self, one.name)) for one in fields(self))
            if name not in left_out and value not in (None, "")
        }
        if self.throttled is not None:
            found["reasons"] = {name: round(share, 4) for name, share in self.reasons.items()}
        return found | ({"devices": [one.record() for one in self.parts]} if self.parts else {})

    def line(self) -> str:
        """Returns the line in the summary of a run that has made one video."""
        if not self.samples:
            return f"Power: not available ({self.why})."
        together, of_one = (f" of {len(self.parts)} devices", " of one") if self.parts else ("", "")
        power = [] if self.mean_w is None else [f"mean {self.mean_w:.1f} W{together}"]
        if self.peak_w is not None:
            limit = "" if self.limit_w is None else f" (limit {self.limit_w:.0f} W)"
            power.append(f"peak {self.peak_w:.1f} W{of_one}{limit}")
        if self.joules is not None:
            covers = f" ({self.covers})" if self.covers else ""
            digits = 0 if self.joules >= 100 else 2
            power.append(f"{self.joules:.{digits}f} J per video{covers}")
        parts = [", ".join(power)]
        if self.mean_mhz is not None:
            rated = "" if self.rated_mhz is None else f" of {self.rated_mhz:.0f}"
            parts.append(f"clock mean {self.mean_mhz:.0f}, lowest {self.min_mhz:.0f}{rated} MHz")
        if self.throttled is None:
            parts.append("throttling not known")
        else:
            reasons = sorted(self.reasons.items(), key=lambda item: -item[1])
            why = ", ".join(f"{name} {share:.1%}" for name, share in reasons)
            share = f"throttled {self.throttled:.1%} of the time"
            parts.append(share + (f" ({why})" if why else ""))
        if self.why is not None:
            parts.append(f"without a device whose power is not available ({self.why})")
        return f"Power ({self.source}): {'; '.join(parts)}."


_TOGETHER: dict[str, Any] = {
    **dict.fromkeys(("samples", "failed", "mean_w", "joules"), sum),
    **dict.fromkeys(("period", "seconds", "peak_w", "rated_mhz", "limit_w"), max),
    "min_mhz": min,
}


def combine(found: Sequence[Measured]) -> Measured:
    """Returns what all ranks have measured, together.

    A device that several ranks have metered (the CPU, a board of two NPUs) counts once, by the
    longest of their measurements. Means are over the time of the devices that tell the value.
    """
    longest: dict[tuple[str, ...], Measured] = {}
    for one in sorted(found, key=lambda one: one.seconds):
        if one.samples:
            longest[one.machine, one.source, one.device] = one
    parts = tuple(one for one in found if any(one is kept for kept in longest.values()))
    why = next((one.why for one in found if not one.samples), None)
    if len(parts) < 2:
        return replace(parts[0], why=why) if parts else Measured(why=why)
    together: dict[str, Any] = {}
    for name, take in _TOGETHER.items():
        told = [value for one in parts if (value := getattr(one, name)) is not None]
        together[name] = take(told) if told else None
    for name in ("mean_mhz", "throttled"):
        timed = [(v, one.seconds) for one in parts if (v := getattr(one, name)) is not None]
        seconds = sum(s for _, s in timed)
        together[name] = sum(v * s for v, s in timed) / seconds if seconds else None
    whole = sum(one.seconds for one in parts)
    return Measured(
        source=", ".join(dict.fromkeys(one.source for one in parts)),
        why=why,
        reasons={
            name: sum(one.reasons.get(name, 0.0) * one.seconds for one in parts) / whole
            for name in sorted({name for one in parts for name in one.reasons})
        },
        cpu_seconds=sum(one.cpu_seconds for one in found),
        parts=parts,
        **together,
    )


class Meter:
    """Reads a source every `period` seconds, or as often as it allows, from start to stop.

    A reading that fails is counted and the next one tried: the run that is metered goes on,
    whatever the meter meets.
    """

    def __init__(self, source: PowerSource, period: float = PERIOD) -> None:
        self.source, self.period = source, max(period, source.period)
        self.series = Series()
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
        """Takes the last reading and returns what was found; called again, the same."""
        source, series = self.source, self.series
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._thread = None
            source.close()
        if not series.count:
            return Measured(machine=host.machine(), why=self._why, failed=self._failed)
        mean_w, joules, by = series.mean("watts"), series.joules, "energy counter"
        if joules is not None:
            mean_w = joules / series.seconds
        elif mean_w is not None and series.seconds:
            joules, by = mean_w * series.seconds, "integral of power"
        return Measured(
            source=source.name,
            device=source.device,
            machine=host.machine(),
            power_is=source.power_is,
            period=self.period,
            seconds=series.seconds,
            samples=series.count,
            failed=self._failed,
            mean_w=mean_w,
            peak_w=series.peak_w,
            joules=joules,
            joules_by="" if joules is None else by,
            mean_mhz=series.mean("mhz"),
            min_mhz=series.min_mhz,
            rated_mhz=source.rated_mhz,
            limit_w=source.limit_w,
            throttled=series.mean("throttled"),
            reasons={name: s / series.seconds for name, s in sorted(series.reasons.items())},
            smoothing=source.smoothing,
            cpu_seconds=self._cpu_seconds,
            series=series,
        )

    def __enter__(self) -> Self:
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
            self.series.add(self.source.read())
        except MeterError as reason:
            self._failed, self._why = self._failed + 1, str(reason)
        self._cpu_seconds = time.thread_time() + self.source.cpu_elsewhere


class VideoMeter(Meter):
    """Meters one video, from the text to the decoded frames, on all ranks' devices.

    The main rank's device is metered to the end of decoding, the others' to that of denoising.
    """

    def __init__(self, device: Device, covers: str) -> None:
        """Starts nothing yet; `covers` tells the user what is metered."""
        super().__init__(source_of(device))
        self._covers = covers
        self._others: list[Measured] = []

    def gather(self, team: Team) -> None:
        """Brings all ranks' results to the main rank; every rank calls it, after denoising."""
        own = None if team.is_main else super().stop()
        self._covers += ", other ranks to the end of denoising"
        self._others = [found for found in team.gather(own) if found is not None]

    def stop(self) -> Measured:
        """Returns all devices together, on the main rank."""
        return replace(combine([super().stop(), *self._others]), covers=self._covers)


def source_of(device: Device) -> PowerSource:
    """Returns the source of a device's readings; `Absent`, with the reason, where it has none."""
    from wan.power.npu_smi import NpuSmi
    from wan.power.nvml import Nvml
    from wan.power.rapl import Rapl

    try:
        if device.type == "cuda":
            return Nvml(device.uuid())
        if device.type == "npu":
            index = host.renumbered("ASCEND_RT_VISIBLE_DEVICES", device.torch_device.index)
            if index is None:
                raise MeterError("ASCEND_RT_VISIBLE_DEVICES does not hold this NPU's number")
            return NpuSmi(index)
        return Rapl()
    except MeterError as reason:
        return Absent(str(reason))
