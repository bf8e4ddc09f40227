"""What a comparison concludes from its measurements, and the files that it leaves.

The times of a round are divided by the baseline's time in the same round, so that slow drifts of
the machine cancel.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from wan import __version__, host
from wan.checkpoint.files import whole_file
from wan.log import logger
from wan.power.compare import Options, Variant
from wan.power.meter import Measured
from wan.power.order import compare, read
from wan.power.rounds import Found, rests
from wan.run import Run
from wan.settings.errors import InputError

_RESAMPLES = 4000


@dataclass(frozen=True)
class Ratio:
    """Time of a variant / time of the baseline: median over rounds, with its 95 % interval."""

    median: float
    low: float
    high: float

    @property
    def gain(self) -> str:
        """The difference in per cent: "-12.3 % (-14.0 to -10.1)"."""
        percent = [100 * (x - 1) for x in (self.median, self.low, self.high)]
        return "{:+.1f} % ({:+.1f} to {:+.1f})".format(*percent)


def ratio(seconds: Sequence[float], baseline: Sequence[float]) -> Ratio:
    """The ratio of equal rounds; the interval is that of a bootstrap over the rounds."""
    each = np.array(seconds) / np.array(baseline)
    draws = np.random.default_rng(0).integers(len(each), size=(_RESAMPLES, len(each)))
    low, high = np.percentile(np.median(each[draws], axis=1), [2.5, 97.5])
    return Ratio(float(np.median(each)), float(low), float(high))


@dataclass(frozen=True)
class Recommendation:
    """The mode to use on this machine: values of --comm_type and --chunks, and the reason."""

    comm_type: int
    chunks: int | None
    reason: str

    @property
    def flags(self) -> str:
        more = "" if self.chunks is None else f" --chunks {self.chunks}"
        return f"--comm_type {self.comm_type}{more}"


def recommend(
    variants: Sequence[Variant], ratios: Mapping[str, Ratio], baseline: Sequence[Measured]
) -> Recommendation:
    """The fastest mode whose whole interval lies below 1, else the baseline.

    Of modes whose intervals overlap, the simpler one is recommended.

    Args:
        variants: What was compared, the baseline first.
        ratios: The ratio of each other variant, by name.
        baseline: What the meters measured in the baseline's runs.
    """
    modes = [one for one in variants[1:] if not one.is_control]
    if not modes:
        return Recommendation(0, None, "No other mode was compared.")
    faster = [one for one in modes if ratios[one.name].high < 1]
    if not faster:
        return Recommendation(0, None, f"No gain on this machine: {_no_gain(baseline)}")
    best = min(faster, key=lambda one: ratios[one.name].median)
    alike = [one for one in faster if ratios[one.name].low <= ratios[best.name].high]
    chosen = min(alike, key=lambda one: (one.chunks is not None, one.comm_type))
    gain, control = ratios[chosen.name], next((one for one in variants if one.rests), None)
    reason = f"{chosen.name}: {gain.gain} of the baseline's time. "
    if control is None or control.name not in ratios:
        return Recommendation(chosen.comm_type, chosen.chunks, f"{reason}No control was run.")
    alone = ratios[control.name]
    reason += f"Rests without exchanges between them: {alone.gain}, "
    if alone.high < 1:
        reason += "so it is the rests that help."
    elif alone.low > gain.high:
        reason += "so it is not the rests that help but the order of exchanges and attention."
    else:
        reason += "which does not show what helped."
    return Recommendation(chosen.comm_type, chosen.chunks, reason)


def _no_gain(baseline: Sequence[Measured]) -> str:
    """Why no mode is faster, as far as the baseline's clock shows it."""
    slower = "no mode is certainly faster than the baseline"
    shares = [one.throttled for one in baseline if one.throttled is not None]
    if not shares:
        return f"{slower}; throttling could not be read here."
    share = sum(shares) / len(shares)
    if share < 0.01:
        return f"{slower}, and the clock was never throttled, so that rests can save nothing."
    names = sorted({name for one in baseline for name in one.reasons})
    why = "rests are too short, or attention draws too much power"
    if not any("power" in name for name in names):
        why = "but not for power, so that rests cannot help"
    return f"{slower}; the clock was throttled {share:.0%} of the time ({', '.join(names)}), {why}."


def write(options: Options, run: Run, found: Mapping[str, Found], device: str) -> None:
    """Writes report.md and comparison.json, and logs the recommendation.

    Args:
        options: Options of the comparison.
        run: The run that was made.
        found: What was measured, by the variant's name, the baseline first.
        device: Name of the device.
    """
    baseline, *others = found.values()
    ratios = {one.variant.name: ratio(one.seconds, baseline.seconds) for one in others}
    listed = [one.variant for one in found.values()]
    advice = recommend(listed, ratios, baseline.power)
    orders = {name: _order(one) for name, one in found.items()}
    parallel, request = run.setup.parallel, run.request
    cfg, ring, ulysses = parallel.sizes
    machine = {
        "device": device,
        "host": host.cpu(),
        "ranks": parallel.world_size,
        "layout": f"ulysses {ulysses} x ring {ring} x cfg {cfg}",
        "wan": __version__,
    }
    record = {
        "command": options.words,
        "machine": machine,
        "settings": run.settings,
        "recommended": asdict(advice),
        "variants": {name: _record(one, ratios, orders[name]) for name, one in found.items()},
    }
    with whole_file(options.out / "comparison.json") as path:
        path.write_text(json.dumps(record, indent=1, allow_nan=False), encoding="utf-8")
    width, height = request.video_size
    rows = "\n".join(_row(one, ratios.get(name), one is baseline) for name, one in found.items())
    more = "\n".join(f"- {name}: {text}" for name, text in orders.items())
    with whole_file(options.out / "report.md") as path:
        path.write_text(
            f"""# Comparison of the modes of FA_Power_Cap (measured)

`python -m wan.power {options.words}`

{request.preset.task}, {width}x{height}, {request.frame_num} frames, {request.sample_steps} steps; \
{device} ({machine["host"]}), {machine["ranks"]} ranks ({machine["layout"]}); \
{options.repeats} rounds in random order; seconds of denoising; wan {__version__}.

**{advice.reason}**

Recommended: `{advice.flags}`

| Variant | Seconds: median (range) | Against the baseline: median (95 %) | Power: mean W, J \
| Clock: mean MHz, throttled | Peak memory, GiB | Video: largest difference, PSNR |
|---|---|---|---|---|---|---|
{rows}

Order of exchanges and attention in two traced steps beside the timed runs (`python -m wan.power \
report {options.out}/traces/NAME` draws them):

{more}

The folder also has a video of each variant, and comparison.json with every round's times and \
readings. How to read this: docs/measuring_power.md.
""",
            encoding="utf-8",
        )
    logger.info("%s (%s)", advice.reason, advice.flags)
    logger.info("Report: %s", options.out / "report.md")


def _record(one: Found, ratios: Mapping[str, Ratio], order: str) -> dict[str, Any]:
    name = one.variant.name
    return {
        "seconds": one.seconds,
        "steps": one.steps,
        "ratio": asdict(ratios[name]) if name in ratios else None,
        "power": [found.record() for found in one.power],
        "series": [
            [part.series for part in (whole.parts or (whole,)) if part.series]
            for whole in one.power
        ],
        "peak_memory_bytes": one.peak_memory,
        "schedule": order,
        "largest_difference": one.largest,
        "psnr": None if one.psnr == float("inf") else one.psnr,
    }


def _row(one: Found, against: Ratio | None, is_baseline: bool) -> str:
    def measured(*columns: tuple[str, str]) -> str:
        cells = []
        for name, form in columns:
            values = [x for found in one.power if (x := getattr(found, name)) is not None]
            cells.append(form.format(statistics.median(values)) if values else "not available")
        return cells[0] if len(set(cells)) == 1 else ", ".join(cells)

    middle, low, high = (f(one.seconds) for f in (statistics.median, min, max))
    psnr = "the same" if one.psnr == float("inf") else f"{one.psnr:.1f} dB"
    cells = [
        one.variant.name,
        f"{middle:.2f} ({low:.2f} to {high:.2f})",
        "" if against is None else against.gain,
        measured(("mean_w", "{:.0f}"), ("joules", "{:.0f}")),
        measured(("mean_mhz", "{:.0f}"), ("throttled", "{:.0%}")),
        "not available" if one.peak_memory is None else f"{one.peak_memory / 2**30:.2f}",
        "" if is_baseline else f"{one.largest}, {psnr}",
    ]
    return f"| {' | '.join(cells)} |"


def _order(one: Found) -> str:
    """What the trace of a variant shows, in a sentence."""
    if one.folder is None:
        return "the baseline's"
    try:
        ranks = read(one.folder)
    except InputError as error:  # the ranks of another machine wrote theirs there
        return f"not available ({error})"
    gaps = [1e3 * gap for rank in ranks for gap in rests(rank.events)]
    length = sum(event.length for rank in ranks for event in rank.events if event.kind == "step")
    busy = sum(event.length for rank in ranks for event in rank.events if event.kind == "attention")
    between = f"rests in a layer {statistics.median(gaps):.3f} ms (median)" if gaps else "no rests"
    duty = f"attention {busy / length:.0%} of a step; {between}"
    if one.variant.rests:
        return f"{duty}; a control, which follows no plan"
    found = (compare(rank.plan, rank.events).difference for rank in ranks)
    wrong = next((difference for difference in found if difference), "as planned")
    return f"{wrong}; {duty}"
