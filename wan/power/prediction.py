"""What the assumptions make of a run: its time in every mode, and whether head chunks can help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from wan.modules.schedule import MODES, OVERLAP, Mode
from wan.power.assumptions import Assumptions
from wan.power.governor import Totals, simulate, stays_within, trip_time
from wan.power.workload import Workload, layer

WORTH = 0.01  # gain from which on chunks are said to help; the assumptions allow nothing finer


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
        capped: Mode 0 with attention at the clock `cap`.
        by_chunks: Mode 1 with 1, 2, ... chunks, as many as a rank has heads.
        cap: Share of the rated clock at which attention draws no more than the limit; 1: any.
    """

    modes: dict[int, Row]
    overlap: Row
    capped: Row
    by_chunks: tuple[Row, ...]
    cap: float

    @property
    def rows(self) -> tuple[Row, ...]:
        """For a table."""
        capped = (self.capped,) if self.cap < 1 else ()
        return (*self.modes.values(), self.overlap, *capped)

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
    slower, cap = by.capped()
    capped = run_time(work, slower, MODES[0], 1)
    return Prediction(
        modes,
        run_time(work, by, OVERLAP, OVERLAP.chunks),
        replace(capped, name=f"0, attention at {cap:.1%} of the clock"),
        tuple(run_time(work, by, MODES[1], n + 1) for n in range(work.local_heads)),
        cap,
    )


def verdict(work: Workload, by: Assumptions, found: Prediction) -> Iterator[str]:
    """Whether head chunks can help, why, and what else does; a sentence each."""
    best, base = found.best, found.modes[0]
    gain = found.gain(best)
    if gain >= WORTH:
        yield (
            f"Verdict: head chunks are predicted to help: {_chunks(best)} of mode 1 are the fewest "
            f"that save most, predicted {gain:.2%}, as mode 0 is predicted to be throttled for "
            f"{base.denoising.throttled / base.denoising.seconds:.0%} of denoising."
        )
    else:
        yield (
            "Verdict: head chunks are predicted not to help (best predicted gain "
            f"{gain:.2%}, with {_chunks(best)}): {_why_not(work, by, found)}."
        )
    if found.cap < 1:
        yield (
            f"A clock cap of attention at predicted {found.cap:.1%} of the rated clock is "
            f"predicted to save {found.gain(found.capped):.2%} without any chunk "
            "(--fa_freq_cap on NPUs)."
        )
    if found.overlap.seconds < min(best.seconds, base.seconds):
        yield (
            "Hiding the exchanges (--fa_alltoall_overlap) is predicted to save "
            f"{found.gain(found.overlap):.2%}, which is more."
        )


def _why_not(work: Workload, by: Assumptions, found: Prediction) -> str:
    """The reason that the governor's formulas give; parts of a sentence."""
    device, governor = by.device(), by.governor
    if by.pfa <= 1:
        return f"attention draws predicted {by.pfa:g} TDP, which is within the limit"
    if governor == "clamp":
        return (
            "the governor reacts faster than any chunk: each piece is slowed as soon as it draws "
            "more than the limit, however short it is"
        )
    if governor == "average":
        return (
            "an averaging governor keeps the mean power, which rests inside a layer hardly change"
        )
    if not found.modes[0].denoising.trips:
        return (
            f"the governor averages over predicted {by.tau:g} s, longer than a layer, whose mean "
            "power is within the limit: nothing is throttled"
        )
    finest = layer(work, MODES[1], work.local_heads, by)
    burst = max(seconds for kind, seconds in finest if kind == "fa")
    gap = sum(s for kind, s in finest if kind == "comm") / work.local_heads
    share = burst / (burst + gap)
    mean = share * by.pfa + (1 - share) * device.power("comm", 1)
    if mean >= 1:
        return (
            "attention's power is too far above the limit: with its exchanges evenly between its "
            f"pieces it still averages predicted {mean:.3f} TDP; cap the clock instead"
        )
    if not stays_within(device, by.tau, burst, gap):
        trip = trip_time(device.power("comm", 1), by.pfa, by.tau)
        return (
            "the governor reacts faster than the shortest chunk: it trips within predicted "
            f"{trip * 1e3:.0f} ms of attention, and a chunk of one head takes {burst * 1e3:.0f} ms"
        )
    return "what they save in throttling they cost in exchanges"


def _chunks(row: Row) -> str:
    return f"{row.chunks} chunk{'s' if row.chunks > 1 else ''}"
