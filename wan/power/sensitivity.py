"""How the predicted gain changes with each assumption around a set, as numbers and as a plot."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from wan.modules.schedule import MODES
from wan.power.assumptions import FACTS, Assumptions
from wan.power.prediction import Prediction, run_time
from wan.power.workload import Workload
from wan.settings.errors import InputError

Swept = dict[str, list[tuple[float, float, float]]]
"""By assumption: (its value, predicted gain of mode 1, predicted gain of mode 2)."""

_POINTS = 48
# Ranges: of its value in the set where the scale is "log", else as they stand.
_RANGES = {
    "tau": ("log", 1 / 8, 8),
    "pfa": ("linear", 0.96, 1.4),
    "f_low": ("linear", 0.3, 0.98),
    "hold": ("log", 1 / 8, 4),
    "link_gbs": ("log", 1 / 4, 4),
    "fa_tflops": ("log", 1 / 3, 3),
    "alpha": ("linear", 1, 4),
    "a_comm": ("linear", 0, 0.6),
}
_NEAR = 0.01  # gains this close are the same to the model
_SHOWN = (-0.06, 0.42)


def check_folder(folder: Path) -> None:
    """InputError where the plot could not be drawn or written."""
    if find_spec("matplotlib") is None:
        raise InputError(
            "--out draws a plot with matplotlib, which is not installed; run pip install -r "
            "requirements-power.txt, or drop --out."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror
        raise InputError(f"--out {folder} cannot be made ({reason}); give another.") from None
    if not os.access(folder, os.W_OK):
        raise InputError(f"--out {folder} cannot be written to; give another folder.")


def sweep(work: Workload, by: Assumptions) -> Swept:
    """Every assumption of the plot that matters to the governor, each alone."""
    found: Swept = {}
    for name in _RANGES:
        if by.governor in FACTS[name].of:
            found[name] = [(value, *_gains(work, changed)) for value, changed in _varied(by, name)]
    return found


def _varied(by: Assumptions, name: str) -> Iterator[tuple[float, Assumptions]]:
    """Values in rising order, with the set's own among them."""
    own = getattr(by, name)
    scale, low, high = _RANGES[name]
    shares = [i / _POINTS for i in range(_POINTS + 1)]
    if scale == "log":
        values = [own * low * (high / low) ** share for share in shares]
    else:
        values = [low + (high - low) * share for share in shares]
    for value in sorted({*values, own}):
        if name != "pfa" or value > by.ps:
            yield value, replace(by, **{name: value})


def _gains(work: Workload, by: Assumptions) -> tuple[float, float]:
    base, one, two = (run_time(work, by, mode, mode.chunks).seconds for mode in MODES.values())
    return 1 - one / base, 1 - two / base


def near(points: list[tuple[float, float, float]], own: float, gain: float) -> tuple[float, float]:
    """The values around the set's own one between which mode 1's gain stays within a point."""
    at = next(i for i, (value, *_) in enumerate(points) if value == own)
    low = high = at
    while low > 0 and abs(points[low - 1][1] - gain) <= _NEAR:
        low -= 1
    while high + 1 < len(points) and abs(points[high + 1][1] - gain) <= _NEAR:
        high += 1
    return points[low][0], points[high][0]


def draw(swept: Swept, by: Assumptions, found: Prediction, path: Path) -> None:
    """The plot, a panel for each assumption."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, PercentFormatter

    gain = found.gain(found.modes[1])
    figure, axes = pyplot.subplots(2, 4, figsize=(12, 6.2), sharey=True, layout="constrained")
    for axis, (name, points) in zip(axes.flat, swept.items(), strict=False):
        own, fact = getattr(by, name), FACTS[name]
        low, high = near(points, own, gain)
        values, ones, twos = zip(*points, strict=True)
        axis.axhspan(gain - _NEAR, gain + _NEAR, color="0.9", label="within 1 point of the set")
        axis.axhline(0, color="0.6", linewidth=0.8)
        axis.plot(values, ones, "C0.-", markersize=3, linewidth=1, label="mode 1")
        axis.plot(values, twos, "C1--", linewidth=1, label="mode 2")
        axis.plot([own], [gain], "ko", label="the set")
        axis.set_xscale(_RANGES[name][0])
        if _RANGES[name][0] == "log":
            axis.set_xticks([own / 4, own / 2, own, own * 2, own * 4])
            axis.set_xticks([], minor=True)
            axis.set_xlim(values[0], values[-1])
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
        axis.set_title(f"{name}\n{fact.meaning}", fontsize=8)
        axis.set_xlabel(f"{fact.unit}  (within 1 point: {low:.3g} to {high:.3g})", fontsize=8)
        axis.set_ylim(*_SHOWN)
        axis.yaxis.set_major_formatter(PercentFormatter(1, 0))
        axis.tick_params(labelsize=8)
    for axis in axes.flat[len(swept) :]:
        axis.set_visible(False)
    figure.supylabel("predicted gain against mode 0, share of the whole time", fontsize=9)
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.suptitle("Predicted gain when one assumption changes and all others stay", fontsize=10)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
