"""The variants that a comparison runs, their measurements and their traces."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wan.metering import exchange_order
from wan.metering.meter import PowerMeasurement
from wan.settings.attention_modes import MODES
from wan.settings.errors import InputError
from wan.utils.trace import Event


@dataclass(frozen=True)
class Variant:
    """One compared configuration of the attention layer.

    Attributes:
        name: Name in tables and files.
        comm_type: A key of `attention_modes.MODES`.
        chunks: Maximum head chunks of a call; None for the mode's number.
        adds_idle_gaps: The control with the baseline's exchanges and idle gaps between head chunks.
        locks_clock: The control with the baseline at a locked clock.
    """

    name: str
    comm_type: int
    chunks: int | None = None
    adds_idle_gaps: bool = False
    locks_clock: bool = False

    @property
    def is_control(self) -> bool:
        return self.adds_idle_gaps or self.locks_clock

    @property
    def slug(self) -> str:
        """The name as a file or folder name."""
        return re.sub(r"[^a-z0-9]+", "_", self.name.lower()).strip("_")

    @property
    def flags(self) -> str:
        """The flags of generate.py that select this variant; those of the baseline for controls."""
        chunks_flag = "" if self.chunks is None else f" --chunks {self.chunks}"
        return f"--comm_type {self.comm_type}{chunks_flag}"


def list_variants(modes: Sequence[int], chunks: Sequence[int]) -> list[Variant]:
    """Lists the baseline, the modes, InsertComm with other numbers of chunks, and the controls."""
    variants = [Variant(MODES[mode].name, mode) for mode in sorted({0, *modes})]
    variants += [Variant(f"InsertComm, {n} chunks", 1, n) for n in chunks]
    if 1 in modes:  # the control has its gap lengths
        variants.append(Variant("control: rests without exchanges", 0, adds_idle_gaps=True))
    return [*variants, Variant("control: baseline, locked clock", 0, locks_clock=True)]


@dataclass
class VariantResult:
    """Measurements of a variant; lists have one element per round.

    Attributes:
        seconds: Denoising time.
        steps: Seconds of each step.
        power: Combined measurement of all ranks' devices.
        peak_memory: Bytes of the fullest device; None if not reported.
        order_summary: Summary of its traces in one sentence.
        latents_difference: Largest absolute difference of the latents from the baseline's, relative
            to the baseline's largest value; None before the comparison.
        max_pixel_difference: Largest difference of the video from the baseline's, in levels of 0
            to 255; None if the video was not decoded.
        psnr: PSNR of the video against the baseline's, dB.
    """

    variant: Variant
    seconds: list[float] = field(default_factory=list)
    steps: list[list[float]] = field(default_factory=list)
    power: list[PowerMeasurement] = field(default_factory=list)
    peak_memory: int | None = None
    order_summary: str = "the baseline's"
    latents_difference: float | None = None
    max_pixel_difference: int | None = None
    psnr: float = float("inf")


def measure_chunk_gaps(events: Sequence[Event]) -> list[float]:
    """Returns the gaps between attention of consecutive head chunks in a layer, in seconds."""
    gaps, previous = [], None
    for event in events:
        if event.operation != "attention":
            continue
        layer_key = tuple(event.attributes.get(name) for name in ("step", "branch", "layer"))
        chunk = event.attributes.get("chunk")
        if previous is not None and previous[0] == layer_key and previous[1] != chunk:
            gaps.append((event.begin - previous[2]) / 1e9)
        previous = layer_key, chunk, event.end
    return gaps


def summarize_traces(folder: Path, variant: Variant) -> str:
    """Summarizes the traces of a variant in one sentence."""
    try:
        traces = exchange_order.read_traces(folder)
    except InputError as error:  # other machines keep their ranks' traces
        return f"not available ({error})"
    events = [event for rank_trace in traces for event in rank_trace.events]
    step_time, attention_time = (
        sum(e.duration for e in events if e.operation == name) for name in ("step", "attention")
    )
    duty_text = f"attention {attention_time / step_time:.0%} of a step"
    if variant.adds_idle_gaps:
        return f"a control with InsertComm's rests, without a planned order; {duty_text}"
    gaps = [1e3 * gap for rank_trace in traces for gap in measure_chunk_gaps(rank_trace.events)]
    gap_text = f"rests in a layer {statistics.median(gaps):.3f} ms (median)" if gaps else "no rests"
    differences = (
        exchange_order.compare_with_plan(rank_trace.plan, rank_trace.events).difference
        for rank_trace in traces
    )
    order_text = next((difference for difference in differences if difference), "as planned")
    return f"{order_text}; {duty_text}; {gap_text}"
