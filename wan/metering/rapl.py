"""Energy of a machine's CPU packages from Linux's powercap (RAPL), their clock from cpufreq."""

from __future__ import annotations

import os
from pathlib import Path

from wan.metering.power_source import MeterError, PowerSource, Sample

_MAX_CLOCK_FILES = 8  # at most so many cores: each read queries the hardware


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
        zones = [zone for zone in zones if _read_sysfs_text(zone / "name").startswith("package")]
        if not zones:
            raise MeterError(f"no RAPL in {sys / 'class/powercap'}, as on most virtual machines")
        self.device = f"{len(zones)} CPU package{'s' if zones[1:] else ''}"
        self._counters = [SysfsNumber(zone / "energy_uj") for zone in zones]
        self._counter_ranges = [
            _read_sysfs_number(zone / "max_energy_range_uj") or 0 for zone in zones
        ]
        self._last_values, self._wrapped_total = [counter.read() for counter in self._counters], 0
        # Constraint 0 is the long-term limit.
        limits = [_read_sysfs_number(zone / "constraint_0_power_limit_uw") or 0 for zone in zones]
        self.limit_w = sum(limits) / 1e6 if all(limits) else None
        policies = sorted((sys / "devices/system/cpu/cpufreq").glob("policy*"))
        policies = policies[:: -(-len(policies) // _MAX_CLOCK_FILES) or 1]
        clocks = [policy / "scaling_cur_freq" for policy in policies]
        self._clocks = [
            SysfsNumber(path) for path in clocks if _read_sysfs_number(path) is not None
        ]
        clocks_khz = [_read_sysfs_number(path / "cpuinfo_max_freq") for path in policies]
        max_clocks_khz = [khz for khz in clocks_khz if khz is not None]
        self.rated_mhz = max(max_clocks_khz) / 1000 if max_clocks_khz else None

    def read_sample(self) -> Sample:
        clocks = [clock.read() for clock in self._clocks]
        for index, counter in enumerate(self._counters):
            counter_value = counter.read()
            self._wrapped_total += (
                self._counter_ranges[index] if counter_value < self._last_values[index] else 0
            )
            self._last_values[index] = counter_value
        return Sample(
            joules=(self._wrapped_total + sum(self._last_values)) / 1e6,
            mhz=sum(clocks) / len(clocks) / 1000 if clocks else None,
        )


class SysfsNumber:
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


def _read_sysfs_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _read_sysfs_number(path: Path) -> int | None:
    text = _read_sysfs_text(path)
    return int(text) if text.isascii() and text.isdigit() else None
