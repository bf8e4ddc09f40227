"""What a measured series shows of a device's powers and of its governor.

    {"source": "where it was measured",
     "rated_mhz": 1650, "limit_w": 350,
     "samples": [{"t": 0.05, "watts": 210.5, "mhz": 1650}, ...],
     "calls": [{"kind": "fa", "start": 0.041, "end": 0.398}, ...]}

`t`, `start` and `end` are seconds of one clock; watts and mhz are what the device drew and ran at
at t, not means over a longer time. Kinds are `governor.KINDS`; what is in no call is idle.
The series is one of mode 0 that is throttled, on a device that drops its clock and releases it
again (hysteresis): that is what can be fitted.

Powers are medians of samples, by kind and clock. tau and hold are the values with which the model,
led through the measured calls, has the measured clock in the most samples.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from wan.checkpoint.files import read_json
from wan.power.assumptions import FACTS, Assumptions
from wan.power.governor import KINDS, Device, Hysteresis, Segment, State, pieces
from wan.settings.errors import InputError
from wan.settings.values import choice, real

SAMPLES, SECONDS = 200, 10.0  # the least that a series must have
_TIME = 1e9  # seconds, the latest
_FEW = 8  # samples of a kind at a clock that its power is known from
_THROTTLED = 0.97  # clocks below this share of the rated one
_FINEST = 0.1  # the shortest tau, times between two samples
_RARE = 0.02  # share of samples that may have any clock
_DIFFER = 0.15  # share of samples that the fitted model may have wrong
_TAU, _HOLD = (2e-3, 2.0), (1e-2, 2.0)  # seconds that are looked at
_GRID, _VALLEYS = 40, 30  # values of each at first; points around which there are more
_SHARES = (1 / 8, 1 / 8, 1 / 4, 1 / 2, 1, 1, 1)  # of the samples, from grid to finer grid
_AROUND = tuple(product((-1, 0, 1), repeat=2))
_ALIKE, _WIDE = 0.004, 1.25  # share of samples that is no difference; ratio that is too wide


Point = tuple[float, float]
"""Logarithms of tau and hold."""


class Sample(NamedTuple):
    """At t seconds: kind of work, watts, share of the rated clock."""

    t: float
    kind: str
    watts: float
    clock: float


@dataclass(frozen=True)
class Series:
    """A measured series.

    Attributes:
        name: Of the file, for errors.
        source: Where it was measured.
        limit: W.
        rated: MHz.
        samples: In the order of time.
        segments: What was done from the first call's start to the last one's end, gaps as "idle".
        start: Of the first call, s.
    """

    name: str
    source: str
    limit: float
    rated: float
    samples: tuple[Sample, ...]
    segments: tuple[Segment, ...]
    start: float


@dataclass(frozen=True)
class Calibration:
    """What a series showed.

    Attributes:
        source: Where it was measured.
        limit: W.
        rated: MHz.
        found: Fields of `Assumptions`; powers as shares of the limit.
        differ: Share of samples in which the fitted model has another clock.
    """

    source: str
    limit: float
    rated: float
    found: dict[str, float]
    differ: float


def calibrate(path: Path, otherwise: Assumptions) -> Calibration:
    """Fit a series; what it does not show is as in `otherwise`.

    Raises:
        InputError: For a file that is no series, and for a series that cannot identify a parameter.
    """
    series = read_series(path)
    found = _powers(series, otherwise)
    activity = {"fa": 1.0, "linear": otherwise.a_linear, "comm": otherwise.a_comm, "idle": 0.0}
    activity |= {kind: found[f"a_{kind}"] for kind in ("linear", "comm") if f"a_{kind}" in found}
    alpha = found.get("alpha", otherwise.alpha)
    device = Device(found["ps"], found["pfa"], alpha, activity)
    tau, hold, differ = _times(series, device, found["f_low"])
    return Calibration(
        series.source, series.limit, series.rated, found | {"tau": tau, "hold": hold}, differ
    )


def read_series(path: Path) -> Series:
    """The series in a file. InputError for anything else."""
    raw = read_json(path)
    limit = _number(path, raw, "limit_w", 1, 1e5)
    rated = _number(path, raw, "rated_mhz", 1, 1e5)
    calls, points = list(_calls(path, raw)), list(_points(path, raw))
    start, end = calls[0][1], calls[-1][2]
    points = [point for point in points if start <= point[0] < end]
    if len(points) < SAMPLES or end - start < SECONDS:
        raise InputError(
            f"{path} is too short to identify tau and hold: {len(points)} samples in calls of "
            f"{end - start:.3g} s; measure at least {SAMPLES} in {SECONDS:g} s."
        )
    segments = tuple(_segments(calls))
    samples = tuple(_samples(points, segments, start, rated))
    source = str(raw.get("source", path))
    return Series(str(path), source, limit, rated, samples, segments, start)


def _calls(path: Path, raw: Mapping[str, Any]) -> Iterator[tuple[str, float, float]]:
    """(kind, start, end), one after the other."""
    before = 0.0
    for where, one in _entries(path, raw, "calls"):
        kind = str(choice(*KINDS)(f"{where}: kind", one.get("kind")))
        start, end = (_number(where, one, name, 0, _TIME) for name in ("start", "end"))
        if not before <= start < end:
            raise InputError(
                f"{where} is from {start:g} to {end:g} s, and the call before it ends at "
                f"{before:g} s; write calls one after the other."
            )
        yield kind, start, end
        before = end


def _points(path: Path, raw: Mapping[str, Any]) -> Iterator[tuple[float, float, float]]:
    """(t, watts, MHz) in the order of time."""
    before = -1.0
    for where, one in _entries(path, raw, "samples"):
        t = _number(where, one, "t", 0, _TIME)
        if t <= before:
            raise InputError(f"{where} is at {t:g} s, not after {before:g} s; sort the samples.")
        yield t, _number(where, one, "watts", 0, 1e5), _number(where, one, "mhz", 0, 1e5)
        before = t


def _entries(path: Path, raw: Mapping[str, Any], name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    entries = raw.get(name)
    if not isinstance(entries, list) or not entries:
        raise InputError(f"{path} has no list of {name}; docs/power_prediction.md has an example.")
    for index, one in enumerate(entries):
        if not isinstance(one, dict):
            raise InputError(f"{path}: {name}[{index}] is not an object; write one with its keys.")
        yield f"{path}: {name}[{index}]", one


def _number(where: object, raw: Mapping[str, Any], key: str, low: float, high: float) -> float:
    if key not in raw:
        raise InputError(f"{where} has no {key}; add it.")
    return float(real(low, high)(f"{where}: {key}", raw[key]))


def _segments(calls: Sequence[tuple[str, float, float]]) -> Iterator[Segment]:
    now = calls[0][1]
    for kind, start, end in calls:
        if start > now:
            yield "idle", start - now
        yield kind, end - start
        now = end


def _samples(
    points: Sequence[tuple[float, float, float]],
    segments: Sequence[Segment],
    start: float,
    rated: float,
) -> Iterator[Sample]:
    """Each point with what was being done."""
    begins = [start]
    for _, seconds in segments:
        begins.append(begins[-1] + seconds)
    for t, watts, mhz in points:
        index = min(bisect_right(begins, t) - 1, len(segments) - 1)
        yield Sample(t, segments[index][0], watts, mhz / rated)


def _powers(series: Series, otherwise: Assumptions) -> dict[str, float]:
    """f_low and the device's powers; alpha only where static power is seen by itself."""
    f_low = _low_clock(series)
    groups = dict[tuple[str, bool], list[float]]()
    for one in series.samples:
        groups.setdefault((one.kind, _is_low(one, f_low)), []).append(one.watts / series.limit)
    for is_low, names in ((False, "pfa"), (True, "ps")):
        if len(groups.get(("fa", is_low), ())) < _FEW:
            clock = f"at {'the dropped' if is_low else 'its full'} clock"
            raise _unknown(series, names, f"fewer than {_FEW} samples lie in attention {clock}")
    pfa, slow = (median(groups["fa", is_low]) for is_low in (False, True))
    if pfa <= 1:
        reason = f"attention draws {pfa:.2f} of limit_w, which no governor would throttle"
        raise _unknown(series, "tau and hold", reason)
    found, alpha = {"f_low": f_low, "pfa": pfa}, otherwise.alpha
    idle = [*groups.get(("idle", False), ()), *groups.get(("idle", True), ())]
    if len(idle) >= _FEW and min(slow, pfa) > median(idle):
        ps = median(idle)
        alpha = found["alpha"] = math.log((slow - ps) / (pfa - ps)) / math.log(f_low)
    else:
        ps = (slow - pfa * f_low**alpha) / (1 - f_low**alpha)
    found["ps"] = ps
    for kind in ("linear", "comm"):
        points = [
            ((f_low**alpha if is_low else 1.0) * (pfa - ps), power - ps)
            for is_low in (False, True)
            for power in groups.get((kind, is_low), ())
        ]
        if len(points) >= _FEW:
            found[f"a_{kind}"] = sum(x * y for x, y in points) / sum(x * x for x, _ in points)
    return {name: _checked(series, name, value) for name, value in found.items()}


def _low_clock(series: Series) -> float:
    """The clock of a throttled device, where there are just two."""
    clocks = sorted(one.clock for one in series.samples)
    lowest = clocks[int(_RARE * len(clocks))]
    middle = (1 + lowest) / 2
    low, high = [c for c in clocks if c < middle], [c for c in clocks if c >= middle]
    if lowest >= _THROTTLED or len(low) < _FEW:
        reason = f"no throttling was seen (lowest clock {lowest:.2f} of the rated one)"
        raise _unknown(series, "f_low, hold and tau", reason)
    if len(high) < _FEW or median(high) < _THROTTLED:
        raise _unknown(series, "pfa", "the clock never stays near rated_mhz")
    f_low = median(low)
    between = sum(abs(c - f_low) > (1 - f_low) / 4 for c in low)
    between += sum(abs(c - 1) > (1 - f_low) / 4 for c in high)
    if between > _DIFFER * len(clocks):
        reason = f"{between / len(clocks):.0%} of its clocks lie between a full and a dropped one"
        raise _unknown(series, "f_low and hold", reason + ": its governor is no hysteresis")
    return f_low


def _is_low(sample: Sample, f_low: float) -> bool:
    return sample.clock < (1 + f_low) / 2


def _times(series: Series, device: Device, f_low: float) -> tuple[float, float, float]:
    """tau, hold, and the share of samples that the model with them has at another clock."""
    costs = _search(series, device, f_low)
    least = min(costs.values())
    if least > _DIFFER:
        reason = f"the fitted model has {least:.0%} of the clocks wrong"
        raise _unknown(series, "tau and hold", reason + ": its governor is no hysteresis")
    alike = [point for point, cost in costs.items() if cost <= least + _ALIKE]
    for name, values in zip(("tau", "hold"), zip(*alike, strict=True), strict=True):
        if max(values) - min(values) > math.log(_WIDE):
            span = f"{math.exp(min(values)):.2g} to {math.exp(max(values)):.2g} s"
            raise _unknown(series, name, f"any from {span} explains its clocks as well")
    best = [point for point, cost in costs.items() if cost == least]
    tau, hold = (math.exp(fmean(axis)) for axis in zip(*best, strict=True))
    between = median(b.t - a.t for a, b in pairwise(series.samples))
    if tau < between * _FINEST:
        reason = f"it is below {between * _FINEST:.2g} s, too short for a sample every"
        raise _unknown(series, "tau", f"{reason} {between:.2g} s")
    return tau, hold, least


def _search(series: Series, device: Device, f_low: float) -> dict[Point, float]:
    """What points near the best ones cost: the share of samples at another clock.

    A grid first, then smaller and smaller ones around its best points. Only the beginning of the
    series counts at first: over all of it a small error of a period adds up until nothing fits, and
    a coarse grid would miss the valley.
    """
    differ = cache(partial(_differ, series, device, f_low))
    taus, holds = _axis(*_TAU), _axis(*_HOLD)
    across, down = taus[1] - taus[0], holds[1] - holds[0]
    points, costs = {(x, y) for x in taus for y in holds}, dict[Point, float]()
    for share in _SHARES:
        costs = {point: differ(point, int(share * len(series.samples))) for point in points}
        best = sorted(points, key=costs.__getitem__)[:_VALLEYS]
        across, down = across / 2, down / 2
        points = {(x + i * across, y + j * down) for x, y in best for i, j in _AROUND}
    return costs


def _differ(series: Series, device: Device, f_low: float, point: Point, count: int) -> float:
    """Share of the first samples at another clock than the model led through the calls."""
    samples = series.samples[:count]
    tau, hold = map(math.exp, point)
    governor, now, clock, state = Hysteresis(tau, f_low, hold), series.start, 1.0, State(device.ps)
    edges = list[float]()  # when the clock drops and is released, in turn
    for segment in series.segments:
        if now > samples[-1].t:
            break
        for piece, after in pieces(device, governor, state, segment, by_clock=False):
            if piece.clock != clock:
                edges.append(now)
            now, clock, state = now + piece.seconds, piece.clock, after
    wrong = (bisect_right(edges, one.t) % 2 != _is_low(one, f_low) for one in samples)
    return sum(wrong) / count


def _axis(low: float, high: float) -> list[float]:
    """Logarithms from low to high."""
    return [math.log(low) + i * math.log(high / low) / (_GRID - 1) for i in range(_GRID)]


def _checked(series: Series, name: str, value: float) -> float:
    return float(FACTS[name].read(f"{series.name}: {name}, as it was fitted,", value))


def _unknown(series: Series, names: str, reason: str) -> InputError:
    return InputError(
        f"{series.name} cannot identify {names}: {reason}; measure mode 0 on a throttled device "
        "for longer, or give values as flags instead."
    )
