"""Static policies: which steps of a run compute all blocks, known before the run.

A list has one entry for each step: whether all blocks are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import groupby

Computed = tuple[bool, ...]


@dataclass(frozen=True)
class Plan:
    """What a run is to do.

    Attributes:
        computed: Guidance branch -> what is computed in each step; of First Block Cache, whatever
            it finds.
        threshold: Of First Block Cache; None: the lists are all there is.
        order: 0: the kept residual; 1: extrapolated from the last two that were computed.
        first: How many blocks, from the first on, are computed in every step.
    """

    computed: dict[str, Computed]
    threshold: float | None = None
    order: int = 0
    first: int = 0


@dataclass(frozen=True)
class Phase:
    """The steps first to last (excluded) of one expert."""

    expert: str
    first: int
    last: int


def phases(experts: Sequence[str]) -> list[Phase]:
    """Of the experts of all steps."""
    found, first = [], 0
    for expert, group in groupby(experts):
        last = first + len(list(group))
        found.append(Phase(expert, first, last))
        first = last
    return found


def forced(experts: Sequence[str], warmup: int) -> Computed:
    """What is computed whatever a policy says.

    The first step of each expert, which has nothing to reuse; with a warm-up the first so many and
    the last one.
    """
    always = [False] * len(experts)
    for phase in phases(experts):
        count = min(max(warmup, 1), phase.last - phase.first)
        always[phase.first : phase.first + count] = [True] * count
        always[phase.last - 1] |= warmup > 0
    return tuple(always)


def mag(
    ratios: Sequence[float],
    experts: Sequence[str],
    branch: str,
    kind: str,
    threshold: float,
    max_skip: int,
    retention: float,
) -> Computed:
    """MagCache's rule for one guidance branch, as its authors run it on Wan2.2.

    The error of a skipped step is how far the product of ratios since the last computed one is from
    1; errors are summed up. The first steps of each expert are computed; image-to-video computes
    all of the high-noise expert's. The counters go on at the switch of experts.

    Args:
        ratios: For each step.
        experts: For each step.
        branch: "cond" or "uncond".
        kind: "t2v", "i2v" or "ti2v".
        threshold: A step is skipped while the sum is below it.
        max_skip: Most steps in a row.
        retention: Share of an expert's steps that are computed at its start.
    """
    # The authors count calls, of which a step has two, and truncate some of the bounds.
    calls, split = 2 * len(experts), 2 * sum(expert == "high_noise" for expert in experts)
    low = (calls - split) * retention + split

    def kept(call: int) -> bool:
        if kind == "i2v":
            return call < int(low)
        if split:
            return call < int(split * retention) or split <= call <= low
        return call < int(calls * retention)

    computed, product, error, skipped = [], 1.0, 0.0, 0
    for step, ratio in enumerate(ratios):
        skips = False
        if not kept(2 * step + (branch == "uncond")):
            product *= ratio
            skipped += 1
            error += abs(1 - product)
            skips = error < threshold and skipped <= max_skip
            if not skips:
                product, error, skipped = 1.0, 0.0, 0
        computed.append(not skips)
    return tuple(computed)


def tea(changes: Sequence[float], polynomial: Sequence[float], threshold: float) -> Computed:
    """TeaCache's rule: a step is skipped while the summed estimates of change are below threshold.

    Args:
        changes: For each step, mean |e - e_prev| / mean |e_prev| of the time embedding; the first
            counts as computed.
        polynomial: Coefficients, highest power first, of what turns a change of the embedding into
            one of the output.
        threshold: Of the sum.
    """
    computed, total = [True], 0.0
    for change in changes[1:]:
        total += reduce(lambda value, coefficient: value * change + coefficient, polynomial, 0.0)
        computed.append(total >= threshold)
        total = 0.0 if computed[-1] else total
    computed[-1] = True
    return tuple(computed)


def attention(steps: int, interval: int, start: int, end: int) -> Computed:
    """MindIE-SD's rule: self-attention is computed up to start, behind end, and every interval."""
    return tuple(not start < step <= end or (step - start) % interval == 0 for step in range(steps))


_CFG_EVERY = 5


def cfg(experts: Sequence[str], many_pixels: bool) -> Computed:
    """MaxDiffusion's rule for the unconditional branch.

    It is left out in four of five steps of the low-noise expert or a single network, from a third
    of the run to nine tenths of it (many_pixels: 720p and more) or to its last step.
    """
    steps = len(experts)
    first, last = steps // 3, int(0.9 * steps) if many_pixels else steps - 1
    computed, since = list[bool](), 0
    for step, expert in enumerate(experts):
        begun = step > 0 and experts[step - 1] == expert and expert != "high_noise"
        skips = begun and first <= step < last and since < _CFG_EVERY - 1
        computed.append(not skips)
        since = since + 1 if skips else 0
    return tuple(computed)
