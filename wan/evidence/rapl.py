"""Energy of a machine's CPU packages from Linux's powercap (RAPL), their clock from cpufreq."""

from __future__ import annotations

import os
from pathlib import Path

from wan.evidence.meter import MeterError, PowerSource, Sample

_CLOCKS = 8  # at most so many cores: each read queries the hardware


class Rapl(PowerSource):
    """Reads the energy of all CPU packages, without memory; throttling is not reported.

    A package's energy counter wraps to 0 after some minutes.
    """

    name = "RAPL"
    power_is = "means between two readings"

    def __init__(self, sys: Path = Path("/sys")) -> None:
        """Opens the counter files of all packages.

        Raises:
            MeterError: There are no packages, or their counters are not readable.
        """
        zones = sorted((sys / "class/powercap").glob("intel-rapl:*"))  # also on AMD CPUs
        zones = [zone for zone in zones if _text(zone / "name").startswith("package")]
        if not zones:
            raise MeterError(f"no RAPL in {sys / 'class/powercap'}, as on most virtual machines")
        self.device = f"{len(zones)} CPU package{'s' if zones[1:] else ''}"
        self._counters = [Attribute(zone / "energy_uj") for zone in zones]
        self._ranges = [_number(zone / "max_energy_range_uj") or 0 for zone in zones]
        self._last, self._wrapped = [counter.read() for counter in self._counters], 0
        limits = [_number(zone / "constraint_0_power_limit_uw") or 0 for zone in zones]  # long term
        self.limit_w = sum(limits) / 1e6 if all(limits) else None
        policies = sorted((sys / "devices/system/cpu/cpufreq").glob("policy*"))
        policies = policies[:: -(-len(policies) // _CLOCKS) or 1]
        clocks = [policy / "scaling_cur_freq" for policy in policies]
        self._clocks = [Attribute(path) for path in clocks if _number(path) is not None]
        rated = [khz for p in policies if (khz := _number(p / "cpuinfo_max_freq")) is not None]
        self.rated_mhz = max(rated) / 1000 if rated else None

    def read(self) -> Sample:
        clocks = [clock.read() for clock in self._clocks]
        for number, counter in enumerate(self._counters):
            now = counter.read()
            self._wrapped += self._ranges[number] if now < self._last[number] else 0
            self._last[number] = now
        return Sample(
            joules=(self._wrapped + sum(self._last)) / 1e6,
            mhz=sum(clocks) / len(clocks) / 1000 if clocks else None,
        )


class Attribute:
    """A number in a sysfs file, which is kept open because opening costs more than reading."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("rb", buffering=0)
        except PermissionError as error:
            raise MeterError(
                f"{path} may be read by root only: run as root, or allow it until the next start "
                f"of the machine with sudo chmod a+r {path}"
            ) from error
        except OSError as error:
            raise MeterError(f"{path} cannot be read ({error.strerror})") from error

    def read(self) -> int:
        try:
            return int(os.pread(self._file.fileno(), 64, 0))
        except (OSError, ValueError) as error:
            raise MeterError(f"{self._path} cannot be read ({error})") from error


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isascii() and text.isdigit() else None
