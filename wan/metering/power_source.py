"""The interface of power sources, and their samples."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol


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
    external_cpu_seconds: float = 0.0  # CPU time of readings in child processes

    def read_sample(self) -> Sample:
        """Takes a sample; raises MeterError if that fails."""
        ...

    def close(self) -> None:
        """Releases the source's handles; most sources have none."""
        return


class UnavailableSource(PowerSource):
    """Power source of a device without a meter; `reason` explains why."""

    name = "none"

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def read_sample(self) -> Sample:
        raise MeterError(self.reason)
