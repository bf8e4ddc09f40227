"""What a comparison leaves behind: report.md, comparison.json, plots. All numbers are measured."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from wan import __version__, host
from wan.checkpoint.files import whole_file
from wan.log import logger
from wan.power import traces
from wan.power.order import compare
from wan.power.rounds import Found, rests
from wan.power.verdict import Ratio, Verdict, ratio, recommend
from wan.run import Run
from wan.settings.errors import InputError

if TYPE_CHECKING:
    from wan.power.compare import Options


class Summary:
    """Of a comparison, on the main rank.

    Args:
        options: Of the comparison.
        run: What was made.
        found: What was measured, by the variant's name, the baseline first.
        device: Its name.
    """

    def __init__(self, options: Options, run: Run, found: Mapping[str, Found], device: str) -> None:
        self.options, self.run, self.found, self.device = options, run, found, device
        self.baseline = next(iter(found.values()))
        self.ratios: dict[str, Ratio] = {
            name: ratio(one.seconds, self.baseline.seconds)
            for name, one in found.items()
            if one is not self.baseline
        }
        listed = [one.variant for one in found.values()]
        self.verdict: Verdict = recommend(listed, self.ratios, self.baseline.power)
        self.schedules = {name: _schedule(one) for name, one in found.items()}

    def write(self) -> None:
        """All files; then the recommendation on the terminal."""
        out = self.options.out
        with whole_file(out / "comparison.json") as path:
            path.write_text(json.dumps(self._json(), indent=1, allow_nan=False), encoding="utf-8")
        from wan.power import plots

        plots.times(self.found, out / "times.png")
        drawn = plots.power(self.found, out / "power.png")
        with whole_file(out / "report.md") as path:
            path.write_text(self._report(drawn), encoding="utf-8")
        logger.info("%s (%s)", self.verdict.reason, self.verdict.flags)
        logger.info("Report: %s", out / "report.md")

    def _json(self) -> dict[str, Any]:
        return {
            "command": self.options.words,
            "machine": self._machine(),
            "settings": self.run.settings,
            "recommended": asdict(self.verdict),
            "variants": {
                name: {
                    "seconds": one.seconds,
                    "steps": one.steps,
                    "ratio": asdict(self.ratios[name]) if name in self.ratios else None,
                    "power": [found.record() for found in one.power],
                    "series": [
                        [part.series.record() for part in (whole.parts or (whole,)) if part.series]
                        for whole in one.power
                    ],
                    "peak_memory_bytes": one.peak_memory,
                    "schedule": self.schedules[name],
                    "largest_difference": one.largest,
                    "psnr": None if one.psnr == float("inf") else one.psnr,
                }
                for name, one in self.found.items()
            },
        }

    def _machine(self) -> dict[str, Any]:
        parallel = self.run.setup.parallel
        return {
            "device": self.device,
            "host": host.cpu(),
            "ranks": parallel.world_size,
            "layout": f"ulysses {parallel.ulysses_size} x ring {parallel.ring_size} x cfg "
            f"{parallel.cfg_size}",
            "wan": __version__,
        }

    def _report(self, drawn: bool) -> str:
        request, machine = self.run.request, self._machine()
        width, height = request.video_size
        rows = "\n".join(self._row(name, one) for name, one in self.found.items())
        clock = "power.png" if drawn else "no meter could be read, so there is no plot of power"
        more = "\n".join(f"- {name}: {text}" for name, text in self.schedules.items())
        return f"""# Comparison of the modes of FA_Power_Cap (measured)

`python -m wan.power {self.options.words}`

{request.preset.task}, {width}x{height}, {request.frame_num} frames, {request.sample_steps} steps; \
{machine["device"]} ({machine["host"]}), {machine["ranks"]} ranks ({machine["layout"]}); \
{self.options.repeats} rounds in random order; seconds of denoising; wan {machine["wan"]}.

**{self.verdict.reason}**

Recommended: `{self.verdict.flags}`

| Variant | Seconds: median (range) | Against the baseline: median (95 %) | Power: mean W, J \
| Clock: mean MHz, held down | Peak memory, GiB | Video: largest difference, PSNR |
|---|---|---|---|---|---|---|
{rows}

Schedules, of two traced steps beside the timed runs (`python -m wan.power report \
{self.options.out}/traces/NAME`):

{more}

Plots: times.png (each run, each step), {clock}. Videos: one of each variant. Raw series: \
comparison.json. How to read this: docs/measuring_power.md.
"""

    def _row(self, name: str, one: Found) -> str:
        middle, low, high = (f(one.seconds) for f in (statistics.median, min, max))
        against = self.ratios[name].gain if name in self.ratios else ""
        memory = "not available" if one.peak_memory is None else f"{one.peak_memory / 2**30:.2f}"
        same = "" if one is self.baseline else f"{one.largest}, {_decibels(one.psnr)}"
        cells = [
            name,
            f"{middle:.2f} ({low:.2f} to {high:.2f})",
            against,
            _told(one, ("mean_w", "{:.0f}"), ("joules", "{:.0f}")),
            _told(one, ("mean_mhz", "{:.0f}"), ("throttled", "{:.0%}")),
            memory,
            same,
        ]
        return f"| {' | '.join(cells)} |"


def _decibels(psnr: float) -> str:
    return "the same" if psnr == float("inf") else f"{psnr:.1f} dB"


def _told(one: Found, *columns: tuple[str, str]) -> str:
    """Medians over the rounds of what the meters told."""
    cells = []
    for name, form in columns:
        values = [x for found in one.power if (x := getattr(found, name)) is not None]
        cells.append(form.format(statistics.median(values)) if values else "not available")
    return cells[0] if len(set(cells)) == 1 else ", ".join(cells)


def _schedule(one: Found) -> str:
    """What its trace shows, in a sentence."""
    if one.folder is None:
        return "the baseline's"
    try:
        ranks = traces.read(one.folder)
    except InputError as error:  # of several machines, say; what was measured counts all the same
        return f"not available ({error})"
    gaps = [1e3 * gap for rank in ranks for gap in rests(rank.events)]
    length = sum(event.length for rank in ranks for event in rank.events if event.kind == "step")
    busy = sum(event.length for rank in ranks for event in rank.events if event.kind == "attention")
    between = f"rests in a layer {statistics.median(gaps):.3f} ms (median)" if gaps else "no rests"
    duty = f"attention {100 * busy / length:.0f} % of a step; {between}"
    if one.variant.rests:
        return f"{duty}; a control, not held against a plan"
    found = [verdict.difference for rank in ranks if (verdict := compare(rank.plan, rank.events))]
    wrong = next((difference for difference in found if difference is not None), None)
    return f"{'as planned' if wrong is None else wrong}; {duty}"
