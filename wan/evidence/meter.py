"""The power meter: a thread samples a device's power during a run and aggregates the samples.

Importing it imports no torch: power sources read the vendors' libraries and tools directly.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, Self

from wan import host

if TYPE_CHECKING:
    from wan.device import Device
    from wan.distributed.mesh import ParallelGroups

PERIOD = 0.05  # seconds between two samples, unless the source is slower
MOST_RECORDED = 1 << 16  # 55 minutes at 50 ms


class MeterError(Exception):
    """A power source is missing or cannot be read; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading of a power source; values that the source does not have are None."""

    watts: float | None = None
    joules: float | None = None  # value of a counter with an arbitrary origin
    mhz: float | None = None
    reasons: frozenset[str] | None = None  # names of the reasons for a lowered clock
    time: float = field(default_factory=time.monotonic)


class PowerSource(Protocol):
    """Reads power, energy and clock of one device."""

    name: str
    device: str = ""  # name in the vendor's tools
    power_is: str = ""  # how `Sample.watts` is measured, such as the mean of a second
    period: float = 0.0  # shortest time between two samples, seconds
    limit_w: float | None = None
    rated_mhz: float | None = None  # the device's highest clock
    smoothing: dict[str, float] | None = None  # NVML power smoothing
    cpu_elsewhere: float = 0.0  # CPU time of readings in child processes

    def read(self) -> Sample:
        """Takes a sample; raises MeterError if that fails."""
        ...

    def close(self) -> None:
        """Releases the source's handles; most sources have none."""
        return


class Absent(PowerSource):
    """Power source of a device without a meter; `reason` explains why."""

    name = "none"

    def __init__(self, why: str) -> None:
        self.why = why

    def read(self) -> Sample:
        raise MeterError(self.why)


@dataclass(frozen=True)
class Measured:
    """Power, energy and clock of one device between two times, or of several devices."""

    source: str = "none"  # NVML, npu-smi or RAPL
    device: str = ""
    machine: str = ""  # unique identifier
    covers: str = ""  # the measured part of a run
    why: str | None = None  # why a device could not be measured
    power_is: str = ""
    period: float = 0.0  # requested seconds between two samples
    seconds: float = 0.0  # from the first sample to the last
    samples: int = 0
    failed: int = 0  # readings that failed
    mean_w: float | None = None  # summed over devices
    peak_w: float | None = None  # of a single device
    joules: float | None = None  # summed over devices
    joules_by: str = ""  # "energy counter" or "integral of power"
    mean_mhz: float | None = None
    min_mhz: float | None = None
    rated_mhz: float | None = None
    limit_w: float | None = None
    throttled: float | None = None  # share of time with a lowered clock
    reasons: dict[str, float] = field(default_factory=dict)  # shares, may overlap
    smoothing: dict[str, float] | None = None
    cpu_seconds: float = 0.0  # CPU time of the meter and its child processes
    parts: tuple[Measured, ...] = ()  # one per device, if several
    series: dict[str, list[Any]] | None = None  # columns for JSON

    def record(self) -> dict[str, Any]:
        """Returns the JSON record, without the series."""
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
        """Returns the line for the run's summary; energy is per video."""
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


def sum_up(samples: Sequence[Sample]) -> dict[str, Any]:
    """Computes the fields of `PowerMeasurement` from the samples of one device.

    Values are interpolated linearly between samples, and means are weighted by time over the
    samples that have the value. An energy counter is preferred to the integral of power.

    Args:
        samples: At least one sample, with increasing times.
    """
    columns: dict[str, list[Any]] = {
        one.name: [getattr(sample, one.name) for sample in samples] for one in fields(Sample)
    }
    times, counter = columns.pop("time"), columns["joules"]
    seconds, joules, by = times[-1] - times[0], None, "energy counter"
    spans = [until - since for since, until in pairwise(times)]
    if seconds and None not in (counter[0], counter[-1]):
        joules = counter[-1] - counter[0]
        if not any(columns["watts"]):  # derive mean power since the previous sample
            gained = [b - a for a, b in pairwise(counter)]
            columns["watts"] = [None, *(j / s for j, s in zip(gained, spans, strict=True))]
    weights = [(before + after) / 2 for before, after in pairwise([0.0, *spans, 0.0])]
    mean = partial(_mean, weights if seconds else [1.0])
    mean_w, reasons = mean(columns["watts"]), columns["reasons"]
    if joules is not None:
        mean_w = joules / seconds
    elif mean_w is not None and seconds:
        joules, by = mean_w * seconds, "integral of power"
    watts, mhz = ([x for x in columns[name] if x is not None] for name in ("watts", "mhz"))
    every = -(-len(samples) // MOST_RECORDED)
    recorded = {"seconds": [round(at - times[0], 4) for at in times]}
    for name, digits in (("watts", 2), ("joules", 3), ("mhz", 1)):
        recorded[name] = [None if x is None else round(x, digits) for x in columns[name]]
    recorded["reasons"] = [None if held is None else sorted(held) for held in reasons]
    return {
        "seconds": seconds,
        "samples": len(samples),
        "mean_w": mean_w,
        "peak_w": max(watts, default=None),
        "joules": joules,
        "joules_by": "" if joules is None else by,
        "mean_mhz": mean(columns["mhz"]),
        "min_mhz": min(mhz, default=None),
        "throttled": mean([None if held is None else float(bool(held)) for held in reasons]),
        "reasons": {
            name: mean([float(name in (held or ())) for held in reasons])
            for name in sorted(frozenset().union(*(held for held in reasons if held)))
        },
        "series": {name: column[::every] for name, column in recorded.items()},
    }


def _mean(weights: Sequence[float], values: Sequence[float | None]) -> float | None:
    known = [(x, weight) for x, weight in zip(values, weights, strict=True) if x is not None]
    whole = sum(weight for _, weight in known)
    return sum(x * weight for x, weight in known) / whole if whole else None


_TOGETHER: dict[str, Any] = {
    **dict.fromkeys(("samples", "failed", "mean_w", "joules"), sum),
    **dict.fromkeys(("period", "seconds", "peak_w", "rated_mhz", "limit_w"), max),
    "min_mhz": min,
}
_IN_TURN: dict[str, Any] = {"seconds": sum, "cpu_seconds": sum}


def combine(found: Sequence[Measured]) -> Measured:
    """Combines the measurements of all ranks' devices.

    A device that several ranks share (the CPU, a board of two NPUs) counts once, with its longest
    measurement. Means are weighted by time over the devices that have the value.
    """
    longest: dict[tuple[str, ...], Measured] = {}
    for one in sorted(found, key=lambda one: one.seconds):
        if one.samples:
            longest[one.machine, one.source, one.device] = one
    parts = tuple(one for one in found if any(one is kept for kept in longest.values()))
    why = next((one.why for one in found if not one.samples), None)
    if len(parts) < 2:
        return replace(parts[0], why=why) if parts else Measured(why=why)

    mean = partial(_mean, [one.seconds for one in parts])
    together: dict[str, Any] = {}
    for name, take in _TOGETHER.items():
        known = [value for one in parts if (value := getattr(one, name)) is not None]
        together[name] = take(known) if known else None
    names = sorted({name for one in parts for name in one.reasons})
    return Measured(
        source=", ".join(dict.fromkeys(one.source for one in parts)),
        why=why,
        mean_mhz=mean([one.mean_mhz for one in parts]),
        throttled=mean([one.throttled for one in parts]),
        reasons={
            name: mean([one.reasons.get(name, 0.0) for one in parts]) or 0.0 for name in names
        },
        cpu_seconds=sum(one.cpu_seconds for one in found),
        parts=parts,
        **together,
    )


def in_turn(found: Sequence[Measured]) -> Measured:
    """Concatenates measurements of the same devices over several time spans."""
    spans = [one for one in found if one.samples]
    if len(spans) < 2:
        return spans[0] if spans else found[0]
    mean = partial(_mean, [one.seconds for one in spans])
    together: dict[str, Any] = {}
    for name, take in (_TOGETHER | _IN_TURN).items():
        known = [value for one in spans if (value := getattr(one, name)) is not None]
        together[name] = take(known) if known else None
    for name in ("mean_w", "mean_mhz", "throttled"):
        together[name] = mean([getattr(one, name) for one in spans])
    names = sorted({name for one in spans for name in one.reasons})
    series: dict[str, list[Any]] | None = None
    if all(one.series for one in spans):
        series = {name: [] for name in spans[0].series or {}}
        begun = 0.0
        for one in spans:
            for name, column in (one.series or {}).items():
                series[name] += [begun + x for x in column] if name == "seconds" else column
            begun += one.seconds
    return replace(
        spans[0],
        reasons={
            name: mean([one.reasons.get(name, 0.0) for one in spans]) or 0.0 for name in names
        },
        parts=tuple(in_turn(same) for same in zip(*(one.parts for one in spans), strict=False)),
        series=series,
        **together,
    )


class Meter:
    """Samples a power source every `period` seconds in a thread, inside a `with` block.

    A slower source sets the period. Failed readings are counted and do not end the measured run.
    """

    def __init__(self, source: PowerSource, period: float = PERIOD) -> None:
        self.source, self.period = source, max(period, source.period)
        self._samples: list[Sample] = []
        self._failed, self._why = 0, "no reading was made"
        self._cpu_seconds = 0.0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def stop(self) -> Measured:
        """Takes a last sample and returns the measurement; repeated calls return it again."""
        source = self.source
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._thread = None
            source.close()
        if not self._samples:
            return Measured(machine=host.machine(), why=self._why, failed=self._failed)
        return Measured(
            source=source.name,
            device=source.device,
            machine=host.machine(),
            power_is=source.power_is,
            period=self.period,
            failed=self._failed,
            rated_mhz=source.rated_mhz,
            limit_w=source.limit_w,
            smoothing=source.smoothing,
            cpu_seconds=self._cpu_seconds,
            **sum_up(self._samples),
        )

    def __enter__(self) -> Self:
        if isinstance(self.source, Absent):
            self._why = self.source.why
            return self
        self._thread = threading.Thread(target=self._run, name="power meter", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.stop()
        self._ended.set()  # a failed run does not wait for a last sample

    def _run(self) -> None:
        due = time.monotonic()
        while not self._ended.is_set():
            self._read()
            late = time.monotonic() - due  # a slow reading skips the samples it overran
            due += self.period * (late // self.period + 1)
            self._ended.wait(due - time.monotonic())
        self._read()

    def _read(self) -> None:
        try:
            sample = self.source.read()
            if not self._samples or sample.time > self._samples[-1].time:
                self._samples.append(sample)
        except MeterError as reason:
            self._failed, self._why = self._failed + 1, str(reason)
        self._cpu_seconds = time.thread_time() + self.source.cpu_elsewhere


class VideoMeter(Meter):
    """Measures the power of one video, from text encoding to decoding, on all ranks' devices.

    Rank 0's device is measured to the end of decoding, those of other ranks to the end of
    denoising.
    """

    def __init__(self, device: Device, covers: str) -> None:
        """Opens the power source; `covers` names the measured part of the run for the user."""
        super().__init__(source_of(device))
        self._covers = covers
        self._others: list[Measured] = []

    def gather(self, team: ParallelGroups) -> None:
        """Gathers the measurements on rank 0; every rank calls this after denoising."""
        own = None if team.is_main else super().stop()
        self._covers += ", other ranks to the end of denoising"
        self._others = [found for found in team.gather(own) if found is not None]

    def stop(self) -> Measured:
        """Returns the combined measurement of all devices, on rank 0."""
        return replace(combine([super().stop(), *self._others]), covers=self._covers)


def source_of(device: Device) -> PowerSource:
    """Opens a device's power source; returns `UnavailableSource` if it has none."""
    from wan.evidence.npu_smi import NpuSmi
    from wan.evidence.nvml import Nvml
    from wan.evidence.rapl import Rapl

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
