"""Measures the cost of metering: CPU time of the meter's thread, and steps with and without it.

    python benchmarks/metering.py --out metering.json

The program meters every power source of this machine. It also meters "files", which reads as many
files of /proc as RAPL and cpufreq have for two packages and eight cores, so that machines without
counters give a figure.

A step is a number of matrix products. Rounds with and without the meter alternate. The CPU time of
npu-smi's processes counts as well.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from wan import device as devices
from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type, run_program
from wan.device import Device
from wan.metering.meter import DEFAULT_PERIOD, Meter, PowerMeasurement, open_power_source
from wan.metering.power_source import PowerSource, Sample, UnavailableSource
from wan.metering.rapl import SysfsNumber
from wan.settings.values import integer, real
from wan.utils import system


class Files(PowerSource):
    """Reads as many files as RAPL with two packages and eight clocks."""

    name, device = "files", "/proc"

    def __init__(self) -> None:
        self._files = [SysfsNumber(Path("/proc/sys/kernel/ns_last_pid")) for _ in range(10)]

    def read_sample(self) -> Sample:
        values = [file.read() for file in self._files]
        return Sample(mhz=sum(values) / len(values))


def list_sources() -> dict[str, tuple[Device, Callable[[], PowerSource]]]:
    """Returns this machine's power sources: name -> device to load, and a factory."""
    cpu = devices.select_device("cpu")
    sources: dict[str, tuple[Device, Callable[[], PowerSource]]] = {"files": (cpu, Files)}
    for kind in ("cpu", "auto"):
        device = devices.select_device(kind)
        source = open_power_source(device)
        source.close()
        if not isinstance(source, UnavailableSource):
            sources[source.name] = (device, partial(open_power_source, device))
    return sources


def run_step(matrix: torch.Tensor, products: int) -> None:
    for _ in range(products):
        matrix = torch.nn.functional.normalize(matrix @ matrix)


def measure_source(
    name: str, device: Device, make: Callable[[], PowerSource], options: Any
) -> dict[str, Any]:
    matrix = torch.randn(options.size, options.size, device=device.torch_device)
    run = partial(run_step, matrix, options.products)
    measurements: list[PowerMeasurement] = []

    def run_steps(metered: bool) -> None:
        meter = Meter(make() if metered else UnavailableSource("not asked for"), options.period)
        with meter:
            for _ in range(options.steps):
                run()
            device.synchronize()
        if metered:
            measurements.append(meter.stop())

    variants = {"metered": partial(run_steps, True), "plain": partial(run_steps, False)}
    times = common.time_interleaved(variants, options.rounds, device.torch_device)
    cpu, seconds = (
        sum(getattr(measurement, n) for measurement in measurements)
        for n in ("cpu_seconds", "seconds")
    )
    samples = sum(measurement.samples for measurement in measurements)
    return {
        "source": name,
        "device": device.name(),
        "period_ms": 1e3 * measurements[0].period,
        "step_seconds": common.compute_spread([t / options.steps for t in times["metered"]]),
        "samples": samples,
        "cpu_us_per_sample": 1e6 * cpu / samples,
        "cpu_share_of_step_time": cpu / seconds,
        "metered_over_plain": common.compute_ratios(times["metered"], times["plain"]),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--period",
        type=make_argument_type(real(0, 3600, exclude_min=True)),
        default=DEFAULT_PERIOD,
        help="seconds",
    )
    parser.add_argument(
        "--size", type=make_argument_type(integer(1, 100_000)), default=512, help="of the matrices"
    )
    parser.add_argument(
        "--products",
        type=make_argument_type(integer(1, 1_000_000)),
        default=20,
        help="matrix products of a step",
    )
    parser.add_argument("--steps", type=make_argument_type(integer(1, 1000)), default=20)
    parser.add_argument("--rounds", type=make_argument_type(integer(1, 10_000)), default=4)
    parser.add_argument("--out", type=common.results_file, help="JSON file")
    options = parser.parse_args(argv)
    began = time.perf_counter()
    results = [measure_source(name, *source, options) for name, source in list_sources().items()]
    print(json.dumps(results, indent=1))
    print(f"{time.perf_counter() - began:.0f} s on {system.read_cpu_name()}")
    common.write_json(options.out, devices.select_device("auto").torch_device, results)


if __name__ == "__main__":
    sys.exit(run_program(main))
