"""What a comparison of modes says: ratios with their uncertainty, and one recommendation.

Times of a round (every variant once, in random order) are compared with the baseline's of the same
round, so that slow drifts cancel. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from wan.power.measured import Measured
from wan.power.side_by_side import Variant

_RESAMPLES, _COVERS = 4000, 95.0


@dataclass(frozen=True)
class Ratio:
    """Time of a variant / time of the baseline: median of the rounds, and a 95 % interval of it."""

    median: float
    low: float
    high: float

    @property
    def gain(self) -> str:
        """What is saved, in words: "-12.3 % (-14.0 to -10.1)"."""
        percent = [100 * (x - 1) for x in (self.median, self.low, self.high)]
        return "{:+.1f} % ({:+.1f} to {:+.1f})".format(*percent)


def ratio(seconds: Sequence[float], baseline: Sequence[float]) -> Ratio:
    """Of each round; the interval is that of a bootstrap over rounds."""
    each = np.array(seconds) / np.array(baseline)
    draws = np.random.default_rng(0).integers(len(each), size=(_RESAMPLES, len(each)))
    medians = np.median(each[draws], axis=1)
    low, high = np.percentile(medians, [(100 - _COVERS) / 2, (100 + _COVERS) / 2])
    return Ratio(float(np.median(each)), float(low), float(high))


@dataclass(frozen=True)
class Verdict:
    """A recommendation.

    Attributes:
        comm_type: For --comm_type.
        chunks: For --chunks; None: the mode's own.
        reason: One or two sentences.
    """

    comm_type: int
    chunks: int | None
    reason: str

    @property
    def flags(self) -> str:
        more = "" if self.chunks is None else f" --chunks {self.chunks}"
        return f"--comm_type {self.comm_type}{more}"


def recommend(
    variants: Sequence[Variant], ratios: Mapping[str, Ratio], baseline: Sequence[Measured]
) -> Verdict:
    """The fastest mode, where it is certainly faster than the baseline; else the baseline.

    Of modes that nothing tells apart the one of the lower number is taken.

    Args:
        variants: What was compared, the baseline first.
        ratios: Of the others, by name.
        baseline: The meters' results of the baseline's runs.
    """
    modes = [v for v in variants[1:] if not v.is_control]
    if not modes:
        return Verdict(0, None, "No other mode was compared.")
    faster = [v for v in modes if ratios[v.name].high < 1]
    if not faster:
        why = _why_not([ratios[v.name] for v in modes], baseline)
        return Verdict(0, None, f"No gain on this machine: {why}")
    best = min(faster, key=lambda v: ratios[v.name].median)
    alike = [v for v in faster if ratios[v.name].low <= ratios[best.name].high]
    chosen = min(alike, key=lambda v: (v.chunks is not None, v.comm_type))
    reason = f"{chosen.name}: {ratios[chosen.name].gain} of time against the baseline"
    if chosen is not best:
        reason += f", and {best.name} ({ratios[best.name].gain}) is not certainly faster"
    return Verdict(
        chosen.comm_type, chosen.chunks, f"{reason}. {_what_helped(chosen, variants, ratios)}"
    )


def _what_helped(chosen: Variant, variants: Sequence[Variant], ratios: Mapping[str, Ratio]) -> str:
    control = next((v for v in variants if v.rests and v.name in ratios), None)
    if control is None:
        return "The control was not run, so rest and overlap are not told apart."
    mine, rests = ratios[chosen.name], ratios[control.name]
    if rests.high < 1:
        return (
            f"The rests alone, without exchanges in them: {rests.gain}; it is the rests that help."
        )
    if rests.low > mine.high:
        return (
            f"The rests alone: {rests.gain}; it is not the rests that help but how exchanges and "
            "attention are arranged."
        )
    return f"The rests alone: {rests.gain}, which does not tell what helped."


def _why_not(ratios: Sequence[Ratio], baseline: Sequence[Measured]) -> str:
    slower = "no mode is certainly faster than the baseline"
    if all(ratio.low > 1 for ratio in ratios):
        slower = "each of the modes is slower than the baseline"
    throttled = [found.throttled for found in baseline if found.throttled is not None]
    if not throttled:
        return f"{slower}; what holds the clock down could not be read here."
    share = sum(throttled) / len(throttled)
    if share < 0.01:
        return f"{slower}, and the clock was never held down, so that rests have nothing to save."
    names = sorted({name for found in baseline for name in found.reasons})
    held = f"the clock was held down {100 * share:.0f} % of the time ({', '.join(names)})"
    if not any("power" in name for name in names):
        return f"{slower}; {held}, but not for power."
    return f"{slower}, although {held}: the rests are too short, or attention needs too much power."
