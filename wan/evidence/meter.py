"""The power meter: a thread reads a device while it works, and the readings are summed up.

Importing it imports no torch: the sources read the vendors' libraries and tools directly.
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
    from wan.distributed.mesh import Team

PERIOD = 0.05  # seconds between two readings, where the source allows it
MOST_RECORDED = 1 << 16  # rows of a series: 55 minutes at 50 ms


class MeterError(Exception):
    """Says why there is no meter, or why it cannot be read now."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading. A value is None where the source does not have it."""

    watts: float | None = None
    joules: float | None = None  # of a counter, of which only differences count
    mhz: float | None = None
    reasons: frozenset[str] | None = None  # what lowers the clock
    time: float = field(default_factory=time.monotonic)


class PowerSource(Protocol):
    """Where the readings of one device come from."""

    name: str
    device: str = ""  # as the vendor's tools name it
    power_is: str = ""  # how `Sample.watts` is measured, for example as the mean of a second
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
    """The source of a device that has no meter."""

    name = "none"

    def __init__(self, why: str) -> None:
        self.why = why

    def read(self) -> Sample:
        raise MeterError(self.why)


@dataclass(frozen=True)
class Measured:
    """What a meter measured from its start to its stop, or the meters of several devices."""

    source: str = "none"  # the interface that was read
    device: str = ""
    machine: str = ""  # an identifier that no other machine has
    covers: str = ""  # the part of a run that was metered
    why: str | None = None  # why nothing was measured; of several devices, why one was not
    power_is: str = ""
    period: float = 0.0  # seconds between two readings that were aimed at
    seconds: float = 0.0  # from the first reading to the last
    samples: int = 0
    failed: int = 0  # readings that failed
    mean_w: float | None = None  # of several devices, their sum
    peak_w: float | None = None  # highest power of one device
    joules: float | None = None  # of several devices, their sum
    joules_by: str = ""  # how the energy was measured
    mean_mhz: float | None = None
    min_mhz: float | None = None
    rated_mhz: float | None = None
    limit_w: float | None = None
    throttled: float | None = None  # share of time in which something lowered the clock
    reasons: dict[str, float] = field(default_factory=dict)  # shares; several may hold at once
    smoothing: dict[str, float] | None = None
    cpu_seconds: float = 0.0  # CPU time of metering, also in processes that it started
    parts: tuple[Measured, ...] = ()  # of several devices, each
    series: dict[str, list[Any]] | None = None  # of one device: columns of equal length, for JSON

    def record(self) -> dict[str, Any]:
        """Returns the result for JSON, without the series."""
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


def sum_up(samples: Sequence[Sample]) -> dict[str, Any]:
    """Returns the fields of `Measured` that follow from the readings of one device.

    Between two readings, values are taken to run in straight lines; a mean is over the time in
    which the value is known. An energy counter is believed more than the integral of power.

    Args:
        samples: At least one reading, with increasing times.
    """
    columns: dict[str, list[Any]] = {
        one.name: [getattr(sample, one.name) for sample in samples] for one in fields(Sample)
    }
    times, counter = columns.pop("time"), columns["joules"]
    seconds, joules, by = times[-1] - times[0], None, "energy counter"
    spans = [until - since for since, until in pairwise(times)]
    if seconds and None not in (counter[0], counter[-1]):
        joules = counter[-1] - counter[0]
        if not any(columns["watts"]):  # power is that since the last reading
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
    """Returns what all ranks have measured, together.

    A device that several ranks have metered (the CPU, a board of two NPUs) counts once, by the
    longest of their measurements. Means are over the time of the devices that have the value.
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
    """Returns what the same devices have measured in several spans of time, as if in one."""
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
    """Reads a source every `period` seconds, or as often as it allows, inside a `with` block.

    A reading that fails is counted, and the next one is tried: the metered run goes on.
    """

    def __init__(self, source: PowerSource, period: float = PERIOD) -> None:
        self.source, self.period = source, max(period, source.period)
        self._samples: list[Sample] = []
        self._failed, self._why = 0, "no reading was made"
        self._cpu_seconds = 0.0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def stop(self) -> Measured:
        """Takes the last reading and returns what was measured; called again, the same."""
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
            sample = self.source.read()
            if not self._samples or sample.time > self._samples[-1].time:
                self._samples.append(sample)
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
