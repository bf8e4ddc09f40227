"""The recommendation that a comparison of modes makes from its measurements."""

from __future__ import annotations

import numpy as np
import pytest

from wan.metering.meter import PowerMeasurement
from wan.power.compare import (
    compute_time_ratio,
    drop_unsupported_control,
    format_variant_row,
    recommend_variant,
)
from wan.power.variants import Variant, VariantResult, list_variants, measure_chunk_gaps
from wan.settings.attention import Attention
from wan.utils.trace import Event

BASE, INSERT, BLOCK, CONTROL, _ = list_variants((0, 1, 2), ())
FIVE_CHUNKS = Variant("InsertComm, 5 chunks", 1, 5)


def recommend_from_factors(
    factors: dict[Variant, float], *power: PowerMeasurement, noise: float = 0.004, rounds: int = 7
) -> tuple[Variant, str]:
    """Recommends among variants whose times are the baseline's by a factor, drift and noise."""
    random = np.random.default_rng(3)
    drift = np.linspace(10, 12, rounds)
    results = [
        VariantResult(variant, list(factor * drift * (1 + noise * random.standard_normal(rounds))))
        for variant, factor in {BASE: 1.0, **factors}.items()
    ]
    results[0].power += power
    return recommend_variant(results)


def test_a_ratio_and_its_interval_hold_the_true_one() -> None:
    covered = 0
    for seed in range(200):
        random = np.random.default_rng(seed)
        drift, noise = np.linspace(5, 9, 7), 1 + 0.02 * random.standard_normal((2, 7))
        ratio = compute_time_ratio(list(0.9 * drift * noise[0]), list(drift * noise[1]))
        assert ratio.low <= ratio.median <= ratio.high
        covered += ratio.low <= 0.9 <= ratio.high
    assert covered >= 170  # seven rounds: a bootstrap of the median is a little too narrow


def test_the_fastest_mode_is_recommended() -> None:
    chosen, reason = recommend_from_factors({INSERT: 0.84, BLOCK: 0.93, CONTROL: 0.85})
    assert chosen == INSERT and chosen.flags == "--comm_type 1"
    assert "InsertComm: -1" in reason and "it is the rests that help" in reason


def test_the_simpler_of_equal_variants_is_recommended() -> None:
    assert recommend_from_factors({INSERT: 0.9, BLOCK: 0.8999, CONTROL: 0.9})[0] == INSERT
    assert recommend_from_factors({INSERT: 0.9, FIVE_CHUNKS: 0.8999, CONTROL: 0.9})[0] == INSERT
    assert recommend_from_factors({FIVE_CHUNKS: 0.8999, BLOCK: 0.9, CONTROL: 0.9})[0] == BLOCK
    chosen, _ = recommend_from_factors({INSERT: 0.95, FIVE_CHUNKS: 0.85, CONTROL: 0.9})
    assert chosen == FIVE_CHUNKS and chosen.flags == "--comm_type 1 --chunks 5"


# Seconds of InsertComm and of BlockAttn in five rounds, and the recommended mode, by hand. The
# baseline takes 10 s; medians of 9.2 and 9.1 s are as good where the rounds differ by more.
SECONDS = (
    ([9.0, 9.1, 9.2, 9.3, 9.4], [8.9, 9.0, 9.1, 9.2, 9.3], INSERT),
    ([9.0, 9.1, 9.2, 9.3, 9.4], [7.9, 8.0, 8.1, 8.2, 8.3], BLOCK),
    ([9.5, 9.6, 9.7, 9.8, 9.9], [], INSERT),
    ([9.7, 9.8, 9.9, 10.3, 10.4], [], BASE),  # less in most rounds only
)


def test_modes_that_are_certainly_faster() -> None:
    for insert, block, chosen in SECONDS:
        results = [VariantResult(BASE, [10.0] * 5), VariantResult(INSERT, insert)]
        results += [VariantResult(BLOCK, block)] if block else []
        assert recommend_variant(results)[0] == chosen, (insert, block)
    assert recommend_from_factors({INSERT: 1.02, CONTROL: 0.8})[0] == BASE, "no control"
    chosen, reason = recommend_from_factors({INSERT: 0.5}, rounds=2)  # ended after two rounds
    assert chosen == BASE and "Fewer than 5 rounds" in reason


def test_the_reason_separates_rests_from_overlap() -> None:
    expected_texts = {
        0.97: "the rests that help.",
        1.02: "not the rests that help",
        None: "No control was run",
    }
    for factor, text in expected_texts.items():
        extra = {} if factor is None else {CONTROL: factor}
        assert text in recommend_from_factors({INSERT: 0.9, **extra})[1], factor


def test_no_gain_has_a_reason() -> None:
    measurements: dict[str, list[PowerMeasurement]] = {
        "could not be read here": [],
        "the clock was never throttled": [PowerMeasurement(throttled=0.0, samples=9)],
    }
    for reason, text in (
        ("SW thermal slowdown", "40% of the time (SW thermal slowdown), but not for power"),
        ("SW power cap", "40% of the time (SW power cap), rests are too short"),
    ):
        measurements[text] = [PowerMeasurement(throttled=0.4, reasons={reason: 0.4}, samples=9)]
    for text, power in measurements.items():
        for factor in (1.0, 1.05):
            chosen, reason = recommend_from_factors({INSERT: factor, BLOCK: factor}, *power)
            assert chosen.flags == "--comm_type 0" and reason.startswith("No gain on this machine")
            assert text in reason


def test_runs_without_the_control_with_idle_gaps() -> None:
    variants = list_variants((0, 1, 2), ())
    assert drop_unsupported_control(variants, Attention(), False) == variants
    unsupported = [(Attention(quant_alltoall=True), False), (Attention(use_rainfusion=True), False)]
    for attention, has_reference in (*unsupported, (Attention(), True)):
        supported = drop_unsupported_control(variants, attention, has_reference)
        assert supported == [variant for variant in variants if variant != CONTROL]


def test_equal_numbers_of_a_row_are_both_shown() -> None:
    """500 W for a second are 500 J; numbers that are all missing are mentioned once."""
    for power, text in (
        (PowerMeasurement(mean_w=500.0, joules=500.0), "500, 500"),
        (PowerMeasurement(mean_w=500.0), "500, not available"),
        (PowerMeasurement(), "not available"),
    ):
        row = format_variant_row(VariantResult(BASE, [1.0], power=[power]), None)
        assert row[3] == text


def layer(start: float, index: int, branch: str = "cond") -> list[Event]:
    """Returns the events of half a second from `start`: two chunks, the first in two blocks."""

    def event(kind: str, begin: float, end: float, **fields: object) -> Event:
        times = (round(1e9 * (start + x)) for x in (begin, end, begin))
        return Event(kind, {"step": 0, "branch": branch, "layer": index, **fields}, *times)

    return [
        event("project", 0.0, 0.05),
        event("a2a", 0.05, 0.1, chunk=0),
        event("attention", 0.1, 0.2, chunk=0, block=0),
        event("attention", 0.21, 0.25, chunk=0, block=1),
        event("a2a", 0.26, 0.3, chunk=1),
        event("attention", 0.31, 0.4, chunk=1, block=0),
        event("cross-attention", 0.4, 0.5),
        event("project", 0.41, 0.45),
    ]


def test_rests_are_those_between_chunks() -> None:
    """Those of one layer, also where a network has only one: branches follow one another."""
    events = [*layer(1.0, 0), *layer(2.0, 1), *layer(3.0, 1, "uncond")]
    assert measure_chunk_gaps(events) == pytest.approx([0.06] * 3)
