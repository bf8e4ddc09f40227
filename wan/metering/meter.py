"""The power meter: a thread samples a device's power during a run and aggregates the samples.

Importing it imports no torch: power sources read the vendors' libraries and tools directly.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self

from wan.metering.npu_smi import NpuSmi
from wan.metering.nvml import Nvml
from wan.metering.power_source import MeterError, PowerSource, Sample, UnavailableSource
from wan.metering.rapl import Rapl
from wan.utils import system

if TYPE_CHECKING:
    from wan.device import Device
    from wan.distributed.mesh import ParallelGroups

DEFAULT_PERIOD = 0.05  # seconds between two samples, unless the source is slower
MAX_SERIES_ROWS = 1 << 16  # 55 minutes at 50 ms


@dataclass(frozen=True)
class PowerMeasurement:
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
    parts: tuple[PowerMeasurement, ...] = ()  # one per device, if several
    series: dict[str, list[Any]] | None = None  # columns for JSON

    def to_record(self) -> dict[str, Any]:
        """Returns the JSON record, without the series."""
        if not self.samples:
            return {"source": self.source, "why": self.why}
        excluded = ("machine", "series", "parts", "reasons")
        record: dict[str, Any] = {
            name: round(value, 4) if isinstance(value, float) else value
            for name, value in ((item.name, getattr(self, item.name)) for item in fields(self))
            if name not in excluded and value not in (None, "")
        }
        if self.throttled is not None:
            record["reasons"] = {name: round(share, 4) for name, share in self.reasons.items()}
        return record | (
            {"devices": [item.to_record() for item in self.parts]} if self.parts else {}
        )

    def summary(self) -> str:
        """Returns the line for the run's summary; energy is per video."""
        if not self.samples:
            return f"Power: not available ({self.why})."
        device_count, one_device = (
            (f" of {len(self.parts)} devices", " of one") if self.parts else ("", "")
        )
        power = [] if self.mean_w is None else [f"mean {self.mean_w:.1f} W{device_count}"]
        if self.peak_w is not None:
            limit = "" if self.limit_w is None else f" (limit {self.limit_w:.0f} W)"
            power.append(f"peak {self.peak_w:.1f} W{one_device}{limit}")
        if self.joules is not None:
            covers = f" ({self.covers})" if self.covers else ""
            digits = 0 if self.joules >= 100 else 2
            power.append(f"{self.joules:.{digits}f} J per video{covers}")
        clauses = [", ".join(power)]
        if self.mean_mhz is not None:
            rated = "" if self.rated_mhz is None else f" of {self.rated_mhz:.0f}"
            clauses.append(f"clock mean {self.mean_mhz:.0f}, lowest {self.min_mhz:.0f}{rated} MHz")
        if self.throttled is None:
            clauses.append("throttling not known")
        else:
            reasons = sorted(self.reasons.items(), key=lambda item: -item[1])
            why = ", ".join(f"{name} {share:.1%}" for name, share in reasons)
            share = f"throttled {self.throttled:.1%} of the time"
            clauses.append(share + (f" ({why})" if why else ""))
        if self.why is not None:
            clauses.append(f"without a device whose power is not available ({self.why})")
        return f"Power ({self.source}): {'; '.join(clauses)}."


def aggregate_samples(samples: Sequence[Sample]) -> dict[str, Any]:
    """Computes the fields of `PowerMeasurement` from the samples of one device.

    Values are interpolated linearly between samples, and means are weighted by time over the
    samples that have the value. An energy counter is preferred to the integral of power.

    Args:
        samples: At least one sample, with increasing times.
    """
    columns: dict[str, list[Any]] = {
        info.name: [getattr(sample, info.name) for sample in samples] for info in fields(Sample)
    }
    times, counter = columns.pop("time"), columns["joules"]
    seconds, joules, joules_by = times[-1] - times[0], None, "energy counter"
    spans = [end - begin for begin, end in pairwise(times)]
    if seconds and None not in (counter[0], counter[-1]):
        joules = counter[-1] - counter[0]
        if not any(columns["watts"]):  # derive mean power since the previous sample
            joules_per_span = [b - a for a, b in pairwise(counter)]
            columns["watts"] = [None, *(j / s for j, s in zip(joules_per_span, spans, strict=True))]
    weights = [(before_s + after_s) / 2 for before_s, after_s in pairwise([0.0, *spans, 0.0])]
    mean = partial(_compute_weighted_mean, weights if seconds else [1.0])
    mean_w, reasons = mean(columns["watts"]), columns["reasons"]
    if joules is not None:
        mean_w = joules / seconds
    elif mean_w is not None and seconds:
        joules, joules_by = mean_w * seconds, "integral of power"
    watts, mhz = ([x for x in columns[name] if x is not None] for name in ("watts", "mhz"))
    stride = -(-len(samples) // MAX_SERIES_ROWS)
    series = {"seconds": [round(timestamp - times[0], 4) for timestamp in times]}
    for name, digits in (("watts", 2), ("joules", 3), ("mhz", 1)):
        series[name] = [None if x is None else round(x, digits) for x in columns[name]]
    series["reasons"] = [None if active is None else sorted(active) for active in reasons]
    return {
        "seconds": seconds,
        "samples": len(samples),
        "mean_w": mean_w,
        "peak_w": max(watts, default=None),
        "joules": joules,
        "joules_by": "" if joules is None else joules_by,
        "mean_mhz": mean(columns["mhz"]),
        "min_mhz": min(mhz, default=None),
        "throttled": mean([None if active is None else float(bool(active)) for active in reasons]),
        "reasons": {
            name: mean([float(name in (active or ())) for active in reasons])
            for name in sorted(frozenset().union(*(active for active in reasons if active)))
        },
        "series": {name: column[::stride] for name, column in series.items()},
    }


def _compute_weighted_mean(
    weights: Sequence[float], values: Sequence[float | None]
) -> float | None:
    terms = [(x, weight) for x, weight in zip(values, weights, strict=True) if x is not None]
    total_weight = sum(weight for _, weight in terms)
    return sum(x * weight for x, weight in terms) / total_weight if total_weight else None


_ACROSS_DEVICES: dict[str, Any] = {
    **dict.fromkeys(("samples", "failed", "mean_w", "joules"), sum),
    **dict.fromkeys(("period", "seconds", "peak_w", "rated_mhz", "limit_w"), max),
    "min_mhz": min,
}
_ACROSS_SPANS: dict[str, Any] = {"seconds": sum, "cpu_seconds": sum}


def combine_devices(measurements: Sequence[PowerMeasurement]) -> PowerMeasurement:
    """Combines the measurements of all ranks' devices.

    A device that several ranks share (the CPU, a board of two NPUs) counts once, with its longest
    measurement. Means are weighted by time over the devices that have the value.
    """
    longest: dict[tuple[str, ...], PowerMeasurement] = {}
    for measurement in sorted(measurements, key=lambda measurement: measurement.seconds):
        if measurement.samples:
            longest[measurement.machine, measurement.source, measurement.device] = measurement
    chosen = {id(measurement) for measurement in longest.values()}
    parts = tuple(measurement for measurement in measurements if id(measurement) in chosen)
    why = next((measurement.why for measurement in measurements if not measurement.samples), None)
    if len(parts) < 2:
        return replace(parts[0], why=why) if parts else PowerMeasurement(why=why)

    return PowerMeasurement(
        source=", ".join(dict.fromkeys(measurement.source for measurement in parts)),
        why=why,
        cpu_seconds=sum(measurement.cpu_seconds for measurement in measurements),
        parts=parts,
        **_combine_fields(parts, _ACROSS_DEVICES),
    )


def combine_spans(measurements: Sequence[PowerMeasurement]) -> PowerMeasurement:
    """Concatenates measurements of the same devices over several time spans."""
    spans = [span for span in measurements if span.samples]
    if len(spans) < 2:
        return spans[0] if spans else measurements[0]
    mean_w = _compute_weighted_mean(
        [span.seconds for span in spans], [span.mean_w for span in spans]
    )
    series: dict[str, list[Any]] | None = None
    if all(span.series for span in spans):
        series = {name: [] for name in spans[0].series or {}}
        offset = 0.0
        for span in spans:
            for name, column in (span.series or {}).items():
                series[name] += [offset + x for x in column] if name == "seconds" else column
            offset += span.seconds
    return replace(
        spans[0],
        parts=tuple(
            combine_spans(device_spans)
            for device_spans in zip(*(span.parts for span in spans), strict=False)
        ),
        series=series,
        **_combine_fields(spans, _ACROSS_DEVICES | _ACROSS_SPANS) | {"mean_w": mean_w},
    )


def _combine_fields(
    measurements: Sequence[PowerMeasurement], reductions: Mapping[str, Any]
) -> dict[str, Any]:
    """Combines fields of measurements; means are weighted by time.

    Args:
        reductions: Name of a field -> function of its values that are not None.
    """
    mean = partial(_compute_weighted_mean, [measurement.seconds for measurement in measurements])
    combined: dict[str, Any] = {}
    for name, reduction in reductions.items():
        values = [x for item in measurements if (x := getattr(item, name)) is not None]
        combined[name] = reduction(values) if values else None
    for name in ("mean_mhz", "throttled"):
        combined[name] = mean([getattr(item, name) for item in measurements])
    combined["reasons"] = {
        name: mean([item.reasons.get(name, 0.0) for item in measurements]) or 0.0
        for name in sorted({name for item in measurements for name in item.reasons})
    }
    return combined


class Meter:
    """Samples a power source every `period` seconds in a thread, inside a `with` block.

    A slower source sets the period. Failed readings are counted and do not end the measured run.
    """

    def __init__(self, source: PowerSource, period: float = DEFAULT_PERIOD) -> None:
        self.source, self.period = source, max(period, source.period)
        self._samples: list[Sample] = []
        self._num_failed, self._failure_reason = 0, "no reading was made"
        self._cpu_seconds = 0.0
        self._stop_event = threading.Event()
        self._thread: threading.Thread | None = None

    def stop(self) -> PowerMeasurement:
        """Takes a last sample and returns the measurement; repeated calls return it again."""
        source = self.source
        if self._thread is not None:
            self._stop_event.set()
            self._thread.join()
            self._thread = None
            source.close()
        if not self._samples:
            return PowerMeasurement(
                machine=system.read_machine_id(), why=self._failure_reason, failed=self._num_failed
            )
        return PowerMeasurement(
            source=source.name,
            device=source.device,
            machine=system.read_machine_id(),
            power_is=source.power_is,
            period=self.period,
            failed=self._num_failed,
            rated_mhz=source.rated_mhz,
            limit_w=source.limit_w,
            smoothing=source.smoothing,
            cpu_seconds=self._cpu_seconds,
            **aggregate_samples(self._samples),
        )

    def __enter__(self) -> Self:
        if isinstance(self.source, UnavailableSource):
            self._failure_reason = self.source.reason
            return self
        self._thread = threading.Thread(
            target=self._read_periodically, name="power meter", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is None:
            self.stop()
        self._stop_event.set()  # a failed run does not wait for a last sample

    def _read_periodically(self) -> None:
        due = time.monotonic()
        while not self._stop_event.is_set():
            self._read_once()
            lag = time.monotonic() - due  # a slow reading skips the samples it overran
            due += self.period * (lag // self.period + 1)
            self._stop_event.wait(due - time.monotonic())
        self._read_once()

    def _read_once(self) -> None:
        try:
            sample = self.source.read_sample()
            if not self._samples or sample.time > self._samples[-1].time:
                self._samples.append(sample)
        except MeterError as reason:
            self._num_failed, self._failure_reason = self._num_failed + 1, str(reason)
        self._cpu_seconds = time.thread_time() + self.source.external_cpu_seconds


class VideoMeter(Meter):
    """Measures the power of one video, from text encoding to decoding, on all ranks' devices.

    Rank 0's device is measured to the end of decoding, those of other ranks to the end of
    denoising.
    """

    def __init__(self, device: Device, covers: str) -> None:
        """Opens the power source; `covers` names the measured part of the run for the user."""
        super().__init__(open_power_source(device))
        self._covers = covers
        self._other_measurements: list[PowerMeasurement] = []

    def gather_measurements(self, groups: ParallelGroups) -> None:
        """Gathers the measurements on rank 0; every rank calls this after denoising."""
        local = None if groups.is_main else super().stop()
        self._covers += ", other ranks to the end of denoising"
        self._other_measurements = [result for result in groups.gather(local) if result is not None]

    def stop(self) -> PowerMeasurement:
        """Returns the combined measurement of all devices, on rank 0."""
        return replace(
            combine_devices([super().stop(), *self._other_measurements]), covers=self._covers
        )


def open_power_source(device: Device) -> PowerSource:
    """Opens a device's power source; returns `UnavailableSource` if it has none."""
    try:
        if device.type == "cuda":
            return Nvml(device.uuid())
        if device.type == "npu":
            index = system.find_machine_index(
                "ASCEND_RT_VISIBLE_DEVICES", device.torch_device.index
            )
            if index is None:
                raise MeterError("ASCEND_RT_VISIBLE_DEVICES does not hold this NPU's number")
            return NpuSmi(index)
        return Rapl()
    except MeterError as reason:
        return UnavailableSource(str(reason))
