"""What the assumptions make of a run: its time in every mode, and whether head chunks can help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from wan.modules.schedule import MODES, OVERLAP, Mode
from wan.power.assumptions import Assumptions
from wan.power.governor import Totals, simulate, stays_within, trip_time
from wan.power.workload import Workload, layer

WORTH = 0.02  # gain from which on something is said to help; assumptions allow nothing finer


@dataclass(frozen=True)
class Row:
    """One way of running it.

    Attributes:
        name: For the table.
        chunks: Head chunks of a layer.
        seconds: Of the whole run.
        denoising: Of the layers alone.
    """

    name: str
    chunks: int
    seconds: float
    denoising: Totals


@dataclass(frozen=True)
class Prediction:
    """Of a run on one device.

    Attributes:
        modes: By --comm_type.
        overlap: The opposite aim.
        locked: Mode 0 with the clock locked at `clock`.
        by_chunks: Mode 1 with 1, 2, ... chunks, as many as a rank has heads.
        clock: Share of the rated one at which attention draws no more than the limit.
    """

    modes: dict[int, Row]
    overlap: Row
    locked: Row
    by_chunks: tuple[Row, ...]
    clock: float

    @property
    def rows(self) -> tuple[Row, ...]:
        """For a table."""
        locked = (self.locked,) if self.clock < 1 else ()
        return (*self.modes.values(), self.overlap, *locked)

    @property
    def best(self) -> Row:
        """Mode 1 with the fewest chunks that take at most 0.1 % longer than the best number."""
        least = min(row.seconds for row in self.by_chunks)
        return next(row for row in self.by_chunks if row.seconds <= 1.001 * least)

    def gain(self, row: Row) -> float:
        """Share of mode 0's time that is saved."""
        return 1 - row.seconds / self.modes[0].seconds


def run_time(work: Workload, by: Assumptions, mode: Mode, chunks: int) -> Row:
    """One way of running it."""
    totals = simulate(by.device(), by.model(), layer(work, mode, chunks, by), work.layers)
    return Row(mode.name, min(chunks, work.local_heads), totals.seconds + by.fixed, totals)


def predict(work: Workload, by: Assumptions) -> Prediction:
    """Every mode, mode 1 with every number of chunks, and the alternatives to them."""
    modes = {
        key: replace(run_time(work, by, mode, mode.chunks), name=f"{key} {mode.name}")
        for key, mode in MODES.items()
    }
    slower, clock = by.locked()
    locked = run_time(work, slower, MODES[0], 1)
    return Prediction(
        modes,
        run_time(work, by, OVERLAP, OVERLAP.chunks),
        replace(locked, name=f"0, clock locked at {clock:.1%}"),
        tuple(run_time(work, by, MODES[1], n + 1) for n in range(work.local_heads)),
        clock,
    )


def verdict(work: Workload, by: Assumptions, found: Prediction) -> Iterator[str]:
    """Whether head chunks can help, why, and what else does; a sentence each."""
    best, gain = found.best, found.gain(found.best)
    before, after = (_throttled(row) for row in (found.modes[0], best))
    if gain < WORTH:
        yield (
            f"Verdict: head chunks are predicted not to help (best predicted gain {gain:z.2%}, "
            f"with {_chunks(best)}): {_why_not(work, by, found)}."
        )
    else:
        yield (
            f"Verdict: head chunks are predicted to help. {_chunks(best)} of mode 1 are predicted "
            f"to be the fewest that save most: predicted gain {gain:.2%}, predicted throttling "
            f"{before:.0%} -> {after:.0%} of denoising."
        )
        if after >= WORTH:
            yield f"They do not end the throttling: {_why_not(work, by, found)}."
    others = {
        f"Mode 0 with the clock locked at predicted {found.clock:.1%} of the rated one (a GPU's "
        "-lgc; during attention: --fa_freq_cap of NPUs)": found.locked,
        "Hiding the exchanges instead (--fa_alltoall_overlap)": found.overlap,
    }
    for words, row in others.items():
        if found.gain(row) >= WORTH:
            more = "more" if row.seconds < best.seconds else "less"
            yield f"{words} is predicted to save {found.gain(row):.2%}, {more} than head chunks."


def _why_not(work: Workload, by: Assumptions, found: Prediction) -> str:
    """The reason that the governor's formulas give; part of a sentence."""
    device, row = by.device(), found.modes[0]
    if work.local_heads == 1:
        return "each rank has one head, so there is one chunk; use a smaller --ulysses_size"
    if by.pfa <= 1:
        return "attention draws no more than the limit (pfa)"
    if by.governor == "clamp":
        return (
            "the governor acts at once, and slows every piece that draws more than the limit, "
            "however short it is"
        )
    if by.governor == "average":
        return "the governor keeps the mean power, which rests inside a layer hardly change"
    if not row.denoising.trips:
        return (
            "nothing is throttled, as the governor's average (tau) does not reach the limit within "
            "the attention of a layer"
        )
    finest = layer(work, MODES[1], work.local_heads, by)
    burst = max(seconds for kind, seconds in finest if kind == "fa")
    gap = sum(s for kind, s in finest if kind == "comm") / work.local_heads
    share = burst / (burst + gap)
    mean = share * by.pfa + (1 - share) * device.power("comm", 1)
    if mean >= 1:
        return (
            "attention's power (pfa) is too far above the limit, and with exchanges evenly between "
            f"its pieces the predicted mean is still {mean:.3f} TDP"
        )
    if not stays_within(device, by.tau, burst, gap):
        trip = trip_time(device.power("comm", 1), by.pfa, by.tau)
        return (
            f"the governor reacts faster than a chunk: predicted {trip * 1e3:.0f} ms of attention "
            f"are enough, and a chunk of one head takes predicted {burst * 1e3:.0f} ms"
        )
    return "they cost about as much in exchanges and other work as they save"


def _throttled(row: Row) -> float:
    """Share of denoising."""
    return row.denoising.throttled / row.denoising.seconds


def _chunks(row: Row) -> str:
    return f"{row.chunks} chunk{'s' if row.chunks > 1 else ''}"
