"""The power meter: its sums against numpy, the CPU's counters, and runs with --power."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.dist import Ranks, make_rank_envs
from wan.cli import main as generate
from wan.metering import meter, rapl
from wan.metering.meter import (
    Meter,
    PowerMeasurement,
    aggregate_samples,
    combine_devices,
    combine_spans,
)
from wan.metering.power_source import MeterError, PowerSource, Sample, UnavailableSource

QUICK = ["--size", "64*32", "--frame_num", "5", "--sample_steps", "1", "--base_seed", "7"]


# The meter


class Recorded(PowerSource):
    """Returns the samples in turn (None: a failed reading), then fails."""

    name, device, power_is = "recorded", "the device", "exact"
    limit_w, rated_mhz = 700.0, 1980.0

    def __init__(self, samples: Sequence[Sample | None]) -> None:
        self.remaining, self.exhausted, self.closed = list(samples), threading.Event(), 0

    def read_sample(self) -> Sample:
        sample = self.remaining.pop(0) if self.remaining else None
        if not self.remaining:
            self.exhausted.set()
        if sample is None:
            raise MeterError("nothing is left")
        return sample

    def close(self) -> None:
        self.closed += 1


def run_meter(samples: Sequence[Sample | None]) -> PowerMeasurement:
    source = Recorded(samples)
    with Meter(source, period=1e-4) as meter:
        assert source.exhausted.wait(60)
    result = meter.stop()
    assert meter.stop() == result and source.closed == 1
    return result


def aggregate(samples: Sequence[Sample]) -> PowerMeasurement:
    return PowerMeasurement("recorded", **aggregate_samples(samples))


def times(count: int) -> np.ndarray:
    """Returns unevenly spaced times, as a thread produces them."""
    return 1e5 + np.cumsum(np.random.default_rng(0).uniform(0.01, 0.2, count))


def integrate(values: np.ndarray, moments: np.ndarray) -> float:
    """The integral by trapezoids, which NumPy 1 and 2 name differently."""
    return float(((values[1:] + values[:-1]) / 2 * np.diff(moments)).sum())


def test_power_and_clock_that_change() -> None:
    moments = times(500)
    watts = np.linspace(100, 600, 500) + 50 * np.sin(moments)
    mhz = 1500 + 400 * np.cos(moments)
    result = aggregate(
        [Sample(w, mhz=f, time=t) for w, f, t in zip(watts, mhz, moments, strict=True)]
    )
    span = moments[-1] - moments[0]
    assert result.joules == pytest.approx(integrate(watts, moments))
    assert result.mean_w == pytest.approx(integrate(watts, moments) / span)
    assert result.mean_mhz == pytest.approx(integrate(mhz, moments) / span)
    assert (result.peak_w, result.min_mhz) == (watts.max(), mhz.min())
    assert (result.joules_by, result.samples) == ("integral of power", 500)
    assert result.seconds == pytest.approx(span) and result.throttled is None


def test_an_energy_counter_is_believed() -> None:
    """It takes precedence over readings of power, which may be means of a second."""
    moments = times(100)
    joules = 5 + np.cumsum(np.random.default_rng(1).uniform(0, 30, 100))
    measured = joules[-1] - joules[0]
    for watts, peak in ((100.0, 100), (None, (np.diff(joules) / np.diff(moments)).max())):
        samples = [Sample(watts, j, time=t) for j, t in zip(joules, moments, strict=True)]
        result = run_meter([*samples[:50], samples[49], *samples[50:]])  # one at the same time
        assert result.joules == pytest.approx(measured) and result.joules_by == "energy counter"
        assert result.mean_w == pytest.approx(measured / (moments[-1] - moments[0]))
        assert result.peak_w == pytest.approx(peak)


def test_shares_of_reasons() -> None:
    moments, names = times(300), ("SW power cap", "HW slowdown")
    active = np.random.default_rng(2).random((2, 300)) < 0.3
    reasons = [frozenset(n for n, h in zip(names, row, strict=True) if h) for row in active.T]
    result = aggregate(
        [Sample(1.0, reasons=r, time=t) for r, t in zip(reasons, moments, strict=True)]
    )
    span = moments[-1] - moments[0]
    shares = [integrate(row.astype(float), moments) / span for row in (*active, active.any(axis=0))]
    assert [*(result.reasons[name] for name in names), result.throttled] == pytest.approx(shares)
    assert "throttled" in result.summary() and "SW power cap" in result.summary()


def test_readings_that_fail() -> None:
    samples = [Sample(200.0, time=float(t)) for t in range(10)]
    result = run_meter([None, *samples[:5], None, None, *samples[7:]])
    assert result.joules == pytest.approx(200 * 9) and result.samples == 8 and result.failed >= 3
    unavailable = run_meter([None, None])
    assert unavailable.summary() == "Power: not available (nothing is left)."
    assert unavailable.to_record() == {"source": "none", "why": "nothing is left"}
    partial = aggregate([Sample(100.0 if t % 2 else None, time=float(t)) for t in range(11)])
    assert partial.joules == pytest.approx(1000), "missing readings count as the mean"


def test_a_slow_reading_skips_the_readings_that_it_overran() -> None:
    """Of a first reading that takes 40 periods; the others are not made up for."""
    taken: list[float] = []

    class Slow(PowerSource):
        name = "slow"

        def read_sample(self) -> Sample:
            taken.append(time.monotonic())
            if len(taken) == 1:
                time.sleep(40 * period)
            elif len(taken) == 10:
                tenth.set()
            return Sample(1.0)

    period, tenth = 2e-3, threading.Event()
    with Meter(Slow(), period):
        assert tenth.wait(60)
    assert taken[9] - taken[1] > 6 * period, "once per period"


def test_one_reading() -> None:
    result = run_meter([Sample(250.0, 1.0, 1500.0, frozenset(), time=3.0)])
    assert result.samples == 1 and result.mean_w == 250 and result.joules is None
    assert result.mean_mhz == 1500 and result.throttled == 0 and "J per" not in result.summary()


def test_a_failing_run_does_not_wait_for_the_meter() -> None:
    """A device without a meter has no thread, either."""

    def list_threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "power meter"]

    with pytest.raises(ZeroDivisionError), Meter(Recorded([Sample(1.0)]), period=1e-4):
        raise ZeroDivisionError
    for thread in list_threads():
        thread.join(60)
    with Meter(UnavailableSource("there is none here")) as meter:
        assert not list_threads()
    assert meter.stop().summary() == "Power: not available (there is none here)."


def test_a_series_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record of a long run has evenly spaced readings, and sums over all readings."""
    monkeypatch.setattr(meter, "MAX_SERIES_ROWS", 100)
    result = aggregate([Sample(float(t), time=float(t)) for t in range(10_001)])
    assert result.series is not None and (result.peak_w, result.mean_w) == (10_000, 5_000)
    seconds = result.series["seconds"]
    assert 50 <= len(seconds) <= 100 and seconds[0] == 0 and seconds[-1] > 9_700
    assert len({*np.diff(np.array(seconds))}) == 1 and result.series["watts"] == seconds
    assert {len(column) for column in result.series.values()} == {len(seconds)}
    json.dumps(result.series, allow_nan=False)


def test_a_record_is_json() -> None:
    result = run_meter([Sample(1 / 3, j, None, frozenset({"x"}), float(j)) for j in range(5)])
    record = json.loads(json.dumps(result.to_record(), allow_nan=False))
    assert record["reasons"] == {"x": 1.0} and record["throttled"] == 1.0
    assert record["joules"] == 4 and "series" not in record


# Several devices


def make_measurement(
    device: str, machine: str, seconds: float, watts: float, **more: Any
) -> PowerMeasurement:
    values = {"source": "NVML", "device": device, "machine": machine, "seconds": seconds}
    values |= {"samples": 9, "mean_w": watts, "peak_w": 2 * watts, "joules": watts * seconds}
    return PowerMeasurement(**{**values, **more})


def test_spans_of_time_are_as_one() -> None:
    """Joules and seconds are sums, means are weighted by the seconds of each span."""
    reasons = [frozenset({"cap"}), frozenset[str]()]
    spans = [
        run_meter([Sample(100.0, None, 1000.0, reasons[0], time=t) for t in (0.0, 1.0)]),
        run_meter([Sample(300.0, None, 1600.0, reasons[1], time=t) for t in (5.0, 8.0)]),
    ]
    result = combine_spans(spans)
    assert (result.seconds, result.samples, result.joules) == (4.0, 4, 100.0 + 900.0)
    assert (result.mean_w, result.mean_mhz, result.min_mhz) == (250.0, 1450.0, 1000.0)
    assert (result.throttled, result.reasons, result.peak_w) == (0.25, {"cap": 0.25}, 300.0)
    assert result.series is not None and result.series["seconds"] == [0.0, 1.0, 1.0, 4.0]
    assert combine_spans([PowerMeasurement(why="none"), spans[0]]) == spans[0]
    devices = [combine_devices([span, replace(span, device="other")]) for span in spans]
    combined = combine_spans(devices)
    assert combined.joules == 2000 and [part.joules for part in combined.parts] == [1000, 1000]


def test_devices_together() -> None:
    first = {"mean_mhz": 1000.0, "min_mhz": 900.0, "throttled": 0.5, "reasons": {"x": 0.5}}
    second = {"mean_mhz": 2000.0, "min_mhz": 800.0, "throttled": 0.1, "reasons": {"y": 0.1}}
    devices = [make_measurement("a", "m", 10, 100, **first)]
    result = combine_devices([*devices, make_measurement("b", "m", 30, 300, **second)])
    assert (result.mean_w, result.joules, result.peak_w) == (400, 10_000, 600)
    assert result.mean_mhz == pytest.approx(1750) and result.min_mhz == 800
    assert result.throttled == pytest.approx(0.2)
    assert result.reasons == pytest.approx({"x": 0.125, "y": 0.075})
    assert [part["device"] for part in result.to_record()["devices"]] == ["a", "b"]
    assert "mean 400.0 W of 2 devices, peak 600.0 W of one" in result.summary()


def test_a_device_counts_once() -> None:
    """One CPU that two ranks have metered, and a like-named one of another machine."""
    cpu = [make_measurement("CPU", *more, 50) for more in (("m", 20), ("m", 10), ("n", 10))]
    result = combine_devices(cpu)
    assert (result.mean_w, result.joules, len(result.parts)) == (100, 1500, 2)
    assert combine_devices(cpu[:2]).joules == 1000 and not combine_devices(cpu[:2]).parts
    absent = PowerMeasurement(why="no driver")
    result = combine_devices([absent, cpu[1]])
    assert result.joules == 500 and "is not available (no driver)" in result.summary()
    assert combine_devices([absent, absent]).summary() == "Power: not available (no driver)."


# RAPL


def write_line(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """The sysfs files of a machine with two packages, as and counters of two ranges."""
    powercap, ranges = tmp_path / "class/powercap", {"intel-rapl:1": 65_532_610_987}
    for zone, name, energy in (
        ("intel-rapl:0", "package-0", 262_143_000_000),
        ("intel-rapl:0:0", "core", 5_000_000),
        ("intel-rapl:0:1", "dram", 6_000_000),
        ("intel-rapl:1", "package-1", 1_000_000),
        ("intel-rapl:2", "psys", 7_000_000),
        ("intel-rapl-mmio:0", "package-0", 8_000_000),
    ):
        write_line(powercap / zone / "name", name)
        write_line(powercap / zone / "energy_uj", energy)
        write_line(powercap / zone / "max_energy_range_uj", ranges.get(zone, 262_143_328_850))
        write_line(powercap / zone / "constraint_0_power_limit_uw", 205_000_000)
    for core in range(64):
        policy = tmp_path / f"devices/system/cpu/cpufreq/policy{core}"
        write_line(policy / "scaling_cur_freq", 2_400_000)
        write_line(policy / "cpuinfo_max_freq", 3_700_000)
    return tmp_path


def set_energy(sysfs: Path, package: int, microjoules: int) -> None:
    write_line(sysfs / f"class/powercap/intel-rapl:{package}/energy_uj", microjoules)


def test_rapl_sums_packages_and_goes_on_where_counters_begin_again(sysfs: Path) -> None:
    source = rapl.Rapl(sysfs)
    assert (source.limit_w, source.rated_mhz, source.device) == (410, 3700, "2 CPU packages")
    first = source.read_sample()
    assert first.watts is None and first.mhz == 2400 and first.reasons is None
    set_energy(sysfs, 0, 171_150)  # 500 000 further on, over the end of its range
    set_energy(sysfs, 1, 4_000_000)
    second = source.read_sample()
    assert second.joules - first.joules == pytest.approx(0.5 + 3)
    set_energy(sysfs, 0, 100_000)
    third = source.read_sample()
    assert third.joules - second.joules == pytest.approx(262_143.328850 - 0.07115)
    set_energy(sysfs, 1, 1_000_000)
    assert source.read_sample().joules - third.joules == pytest.approx(65_532.610987 - 3)


def test_rapl_without_clocks_limits_and_counters(tmp_path: Path, sysfs: Path) -> None:
    for path in [*sysfs.glob("devices/**/scaling_*"), *sysfs.glob("class/*/*/constraint_0*")]:
        path.unlink()
    write_line(sysfs / "class/powercap/intel-rapl:0/constraint_0_power_limit_uw", "broken")
    source = rapl.Rapl(sysfs)
    assert source.read_sample().mhz is None and source.limit_w is None
    with pytest.raises(MeterError, match=r"no RAPL in .*virtual machines"):
        rapl.Rapl(tmp_path / "nowhere")
    write_line(sysfs / "class/powercap/intel-rapl:1/energy_uj", "not a number")
    with pytest.raises(MeterError, match=r"intel-rapl:1/energy_uj cannot be read"):
        rapl.Rapl(sysfs)


def test_rapl_for_root_only(sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only root may read RAPL since Linux 5.10; the test also works as root."""
    original_open = Path.open

    def refuse_energy_file(path: Path, *arguments: Any, **more: Any) -> Any:
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied", str(path))
        return original_open(path, *arguments, **more)

    monkeypatch.setattr(Path, "open", refuse_energy_file)
    with pytest.raises(MeterError, match=r"root only: .*sudo chmod a\+r"):
        rapl.Rapl(sysfs)


# generate.py --power


def check_metered(video: Path, output: str) -> None:
    power = json.loads(video.with_suffix(".json").read_text())["power"]
    (line,) = re.findall(r"Power\b.*", output)
    if power["source"] == "none":
        assert line == f"Power: not available ({power['why']})."
    else:  # a machine with RAPL that may be read
        assert power["source"] == "RAPL" and power["joules"] > 0 and " J per video" in line


def test_a_run_on_the_cpu(tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "v.mp4"
    argv = ["--task", "t2v-1.3B", "--ckpt_dir", str(tiny("t2v-1.3B")), *QUICK, "--save_latents"]
    assert generate.main([*argv, "--power", "--save_file", str(out)]) == 0
    check_metered(out, capfd.readouterr().out)
    assert "power" not in json.loads(out.with_suffix(".json").read_text())["settings"]
    argv = ["--decode_latents", str(out.with_suffix(".latents.safetensors"))]
    plain = tmp_path / "plain.mp4"
    assert generate.main([*argv, "--save_file", str(plain)]) == 0
    assert "power" not in json.loads(plain.with_suffix(".json").read_text())
    assert "Power" not in capfd.readouterr().out


def generate_each(arguments: list[list[str]]) -> int:
    """Runs generate.py on a rank with the arguments for that rank."""
    return generate.main(arguments[int(os.environ["RANK"])])


@pytest.mark.slow
@pytest.mark.dist
def test_two_ranks(tiny, tmp_path: Path) -> None:
    out = tmp_path / "v.mp4"
    argv = ["--task", "t2v-1.3B", "--ckpt_dir", str(tiny("t2v-1.3B")), *QUICK]
    argv += ["--save_file", str(out)]
    with Ranks(make_rank_envs(2), generate_each, [[*argv, "--power"]] * 2) as ranks:
        assert ranks.wait_for_exit(120) == [0, 0], ranks.format_outputs()
        check_metered(out, "".join(ranks.texts))
    with Ranks(make_rank_envs(2), generate_each, [argv, [*argv, "--power"]]) as ranks:
        assert ranks.wait_for_exit(120) == [2, 2], ranks.format_outputs()
        assert any("--power is True, but False on rank 0" in line for line in ranks.lines())
