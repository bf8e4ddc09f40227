"""Plots of a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from wan.checkpoint.files import whole_file
from wan.power.measured import Series
from wan.power.rounds import Found


def times(found: Mapping[str, Found], path: Path) -> None:
    """Every run's seconds, and every step's."""
    pyplot = _pyplot()
    figure, (runs, steps) = pyplot.subplots(
        1, 2, figsize=(12, 1.5 + 0.5 * len(found)), width_ratios=(1, 1.4), layout="constrained"
    )
    for row, one in enumerate(found.values()):
        colour = f"C{row}"
        runs.plot(one.seconds, [row] * len(one.seconds), "o", color=colour, alpha=0.6)
        runs.plot([np.median(one.seconds)], [row], "|", color=colour, markersize=24)
        middle = np.median(np.array(one.steps), axis=0)
        steps.plot(range(len(middle)), middle, color=colour, label=one.variant.name)
    runs.set_yticks(range(len(found)), list(found))
    runs.invert_yaxis()
    runs.set_xlabel("seconds of denoising (measured; bar: median)")
    steps.set_xlabel("step")
    steps.set_ylabel("seconds (median of the rounds)")
    steps.legend(fontsize="small")
    _save(figure, path)


def power(found: Mapping[str, Found], path: Path) -> bool:
    """Power, clock and throttling over the time of the first round's runs, of the main rank's
    device; False where no meter told any."""
    series = {name: one.power[0] for name, one in found.items()}
    told = {
        name: part.series
        for name, whole in series.items()
        for part in (whole.parts or (whole,))[:1]
        if part.series is not None and len(part.series.times) > 1
    }
    if not told:
        return False
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(3, 1, figsize=(10, 8), sharex=True, layout="constrained")
    for name, one in told.items():
        at = np.array(one.times) - one.times[0]
        axes[0].plot(at, one.watts, label=name, linewidth=1)
        axes[1].plot(at, one.mhz, linewidth=1)
        axes[2].plot(at, _throttled(one), linewidth=1)
    limits = {whole.limit_w for whole in series.values() if whole.limit_w is not None}
    for limit in limits:
        axes[0].axhline(limit, color="black", linestyle=":", linewidth=1, label="limit")
    for axis, label in zip(axes, ("W", "MHz", "throttled"), strict=True):
        axis.set_ylabel(label)
    axes[0].legend(fontsize="small")
    axes[2].set_xlabel("seconds of the first round's run (measured)")
    _save(figure, path)
    return True


def _throttled(series: Series) -> list[float]:
    return [float("nan") if reasons is None else float(bool(reasons)) for reasons in series.reasons]


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path) -> None:
    with whole_file(path) as temporary:
        figure.savefig(temporary, dpi=110)
    _pyplot().close(figure)
