"""What a power meter has found: of one device, or of several together."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

MOST_KEPT = 1 << 16  # samples of a series: 55 minutes at 50 ms; then every second one goes


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading.

    Attributes:
        watts: Power; None where only energy is counted.
        joules: An energy counter, of which only differences count.
        mhz: Clock.
        reasons: What lowers the clock; None where the source cannot tell.
        time: Seconds of time.monotonic().
    """

    watts: float | None = None
    joules: float | None = None
    mhz: float | None = None
    reasons: frozenset[str] | None = None
    time: float = field(default_factory=time.monotonic)


class Series:
    """Samples in columns of float64, NaN where one is not told.

    Bounded: of a long run, samples further apart are kept.
    """

    def __init__(self, most: int = MOST_KEPT) -> None:
        self.times, self.watts, self.joules, self.mhz = (array("d") for _ in range(4))
        self.reasons: list[frozenset[str] | None] = []
        self._most, self._every, self._seen = most, 1, 0

    def add(self, sample: Sample) -> None:
        if self._seen % self._every == 0:
            self.times.append(sample.time)
            for column, value in (
                (self.watts, sample.watts),
                (self.joules, sample.joules),
                (self.mhz, sample.mhz),
            ):
                column.append(math.nan if value is None else value)
            self.reasons.append(sample.reasons)
        self._seen += 1
        if len(self.times) > self._most:
            self._every *= 2
            for column in (self.times, self.watts, self.joules, self.mhz):
                del column[1::2]
            del self.reasons[1::2]

    def record(self) -> dict[str, list[Any]]:
        """For JSON: columns of equal length; seconds count from the first sample."""

        def plain(column: array[float], digits: int) -> list[float | None]:
            return [None if math.isnan(value) else round(value, digits) for value in column]

        return {
            "seconds": [round(at - self.times[0], 4) for at in self.times],
            "watts": plain(self.watts, 2),
            "joules": plain(self.joules, 3),
            "mhz": plain(self.mhz, 1),
            "reasons": [None if found is None else sorted(found) for found in self.reasons],
        }


@dataclass(frozen=True)
class Measured:
    """What a meter has found from its start to its stop.

    Attributes:
        source: The interface that was read; "none" where there is none.
        device: What was metered, as its vendor's tools name it.
        machine: Its machine, named so that no other has the name.
        covers: Which part of a run was metered.
        why: Why nothing was measured; of several devices, why one was not.
        power_is: What the power readings are, such as means of a second.
        period: Seconds between two readings that were aimed at.
        seconds: From the first reading to the last.
        samples: Readings.
        failed: Readings that failed.
        mean_w: Mean power; of several devices, their sum.
        peak_w: Highest power of a device.
        joules: Energy; of several devices, their sum.
        joules_by: How it was found.
        mean_mhz: Clock, mean over time.
        min_mhz: Lowest clock of a device.
        rated_mhz: Highest clock that a device can have.
        limit_w: The power that a device is held to.
        throttled: Share of time in which something lowered the clock.
        reasons: Share of time of each reason; several may hold at once.
        smoothing: The state of power smoothing, where the device has it.
        cpu_seconds: CPU time that metering took, also in processes that it started.
        parts: Of several devices, each.
        series: The readings of one device.
    """

    source: str = "none"
    device: str = ""
    machine: str = ""
    covers: str = ""
    why: str | None = None
    power_is: str = ""
    period: float = 0.0
    seconds: float = 0.0
    samples: int = 0
    failed: int = 0
    mean_w: float | None = None
    peak_w: float | None = None
    joules: float | None = None
    joules_by: str = ""
    mean_mhz: float | None = None
    min_mhz: float | None = None
    rated_mhz: float | None = None
    limit_w: float | None = None
    throttled: float | None = None
    reasons: dict[str, float] = field(default_factory=dict)
    smoothing: dict[str, float] | None = None
    cpu_seconds: float = 0.0
    parts: tuple[Measured, ...] = ()
    series: Series | None = None

    def record(self) -> dict[str, Any]:
        """For JSON, without the series, which has a record of its own."""
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
        """For the summary of a run that has made one video."""
        if not self.samples:
            return f"Power: not available ({self.why})."
        parts = [self._power(), *self._clock(), self._throttling()]
        if self.why is not None:
            parts.append(f"without a device whose power is not available ({self.why})")
        return f"Power ({self.source}): {'; '.join(parts)}."

    def _power(self) -> str:
        together, of_one = (f" of {len(self.parts)} devices", " of one") if self.parts else ("", "")
        words = [] if self.mean_w is None else [f"mean {self.mean_w:.1f} W{together}"]
        if self.peak_w is not None:
            limit = "" if self.limit_w is None else f" (limit {self.limit_w:.0f} W)"
            words.append(f"peak {self.peak_w:.1f} W{of_one}{limit}")
        if self.joules is not None:
            covers = f" ({self.covers})" if self.covers else ""
            words.append(f"{self.joules:.{0 if self.joules >= 100 else 2}f} J per video{covers}")
        return ", ".join(words)

    def _clock(self) -> list[str]:
        if self.mean_mhz is None:
            return []
        rated = "" if self.rated_mhz is None else f" of {self.rated_mhz:.0f}"
        return [f"clock mean {self.mean_mhz:.0f}, lowest {self.min_mhz:.0f}{rated} MHz"]

    def _throttling(self) -> str:
        if self.throttled is None:
            return "throttling not known"
        reasons = sorted(self.reasons.items(), key=lambda item: -item[1])
        why = ", ".join(f"{name} {share:.1%}" for name, share in reasons)
        return f"throttled {self.throttled:.1%} of the time" + (f" ({why})" if why else "")


def combine(found: Sequence[Measured]) -> Measured:
    """What all ranks have measured, together.

    A device that several ranks have metered (the CPU, a board of two NPUs) counts once, by the
    longest of their measurements.
    """
    longest: dict[tuple[str, ...], Measured] = {}
    for one in sorted(found, key=lambda one: one.seconds):
        if one.samples:
            longest[one.machine, one.source, one.device] = one
    parts = tuple(one for one in found if any(one is kept for kept in longest.values()))
    why = next((one.why for one in found if not one.samples), None)
    if len(parts) < 2:
        return replace(parts[0], why=why) if parts else Measured(why=why)
    return Measured(
        source=", ".join(dict.fromkeys(one.source for one in parts)),
        why=why,
        period=max(one.period for one in parts),
        seconds=max(one.seconds for one in parts),
        samples=sum(one.samples for one in parts),
        failed=sum(one.failed for one in parts),
        mean_w=_over("mean_w", parts, sum),
        peak_w=_over("peak_w", parts, max),
        joules=_over("joules", parts, sum),
        mean_mhz=_mean("mean_mhz", parts),
        min_mhz=_over("min_mhz", parts, min),
        rated_mhz=_over("rated_mhz", parts, max),
        limit_w=_over("limit_w", parts, max),
        throttled=_mean("throttled", parts),
        reasons={
            name: sum(one.reasons.get(name, 0.0) * one.seconds for one in parts)
            / sum(one.seconds for one in parts)
            for name in sorted({name for one in parts for name in one.reasons})
        },
        cpu_seconds=sum(one.cpu_seconds for one in found),
        parts=parts,
    )


def _over(
    name: str, parts: Sequence[Measured], take: Callable[[list[float]], float]
) -> float | None:
    told = [value for one in parts if (value := getattr(one, name)) is not None]
    return take(told) if told else None


def _mean(name: str, parts: Sequence[Measured]) -> float | None:
    """Over the time of those that tell it."""
    told = [one for one in parts if getattr(one, name) is not None]
    seconds = sum(one.seconds for one in told)
    return sum(getattr(one, name) * one.seconds for one in told) / seconds if seconds else None
