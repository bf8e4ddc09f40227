"""`python -m wan.power predict`: predicts the time of each attention mode with a power model.

The governor and five constants were fitted to three published times of one device. Other models
would fit these as well, and for another device the prediction is only as good as its constants.
A rank's computation and communication follow from the network and the topology. The device draws
P(kind, f) = ps + activity (pfa - ps) f^alpha; its governor tracks a moving average of power, and
when the average reaches the limit, it lowers the clock f for some time.

Powers are relative to the limit (TDP), clocks to the rated clock.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, NamedTuple

from wan.cli.flags import Parser
from wan.run import Run, resolve
from wan.settings.attention_modes import (
    MODES,
    OVERLAP,
    Mode,
    TokenPlan,
    count_heads_per_chunk,
    q_ranges,
)
from wan.settings.errors import InputError
from wan.settings.flags import FLAGS
from wan.settings.presets import TASK_ALIASES
from wan.settings.values import real

PUBLISHED_RUN: dict[str, Any] = {
    "task": "t2v-A14B",
    "size": (1280, 720),
    "frame_num": 161,
    "sample_steps": 4,
    "sample_guide_scale": (1.0, 1.0),
    "ulysses_size": 4,
}
"""The run of the published row; the default prediction."""
PUBLISHED = {0: 108.35, 1: 90.36, 2: 90.34}  # mode -> seconds measured by its authors on four NPUs
RUN_FLAGS = (*PUBLISHED_RUN, "ring_size", "cfg_size")
FITTED = "fitted to the published row"
_EXACT_LAYERS = 400  # further layers are extrapolated from the second half
_FACTORS = (0.5, 0.8, 0.95, 1.05, 1.25, 2.0)


def _constant(default: float, unit: str, meaning: str, low: float, high: float, **more: Any) -> Any:
    source = more.pop("source", "assumed")
    facts = {"unit": unit, "meaning": meaning, "read": real(low, high, **more), "source": source}
    return field(default=default, metadata=facts)


@dataclass(frozen=True)
class Constants:
    """Device constants of the model; each has a flag of the same name."""

    tau: float = _constant(0.06, "s", "time constant of the average", 1e-3, 1e3, source=FITTED)
    f_low: float = _constant(0.55, "", "lowered clock", 0.05, 1, below=True, source=FITTED)
    hold: float = _constant(0.25, "s", "duration of the lowered clock", 1e-3, 1e3, source=FITTED)
    pfa: float = _constant(1.05, "TDP", "power of attention", 0.01, 10, source=FITTED)
    fixed: float = _constant(12.3, "s", "time outside denoising", 0, 1e5, source=FITTED)
    link_gbs: float = _constant(20, "GB/s", "send bandwidth of a rank", 1e-3, 1e5)
    ps: float = _constant(0.3, "TDP", "static power", 0, 1, below=True)
    alpha: float = _constant(3, "", "exponent of the clock in power", 1, 4)
    a_linear: float = _constant(0.75, "", "activity of other work", 0, 2)
    a_comm: float = _constant(0.12, "", "activity of all-to-alls", 0, 2)
    fa_tflops: float = _constant(310, "TFLOP/s", "attention at the rated clock", 1e-3, 1e5)
    linear_tflops: float = _constant(320, "TFLOP/s", "other work at the rated clock", 1e-3, 1e5)
    exchange_us: float = _constant(30, "us", "latency of an all-to-all", 0, 1e6)
    launch_us: float = _constant(10, "us", "idle time before each attention call", 0, 1e6)
    element_bytes: float = _constant(2, "bytes", "size of a sent element", 0.5, 4)

    def __post_init__(self) -> None:
        if self.pfa <= self.ps:
            reason = f"is not above --ps {self.ps:g}"
            raise InputError("--pfa", self.pfa, reason, "give a larger one")
        if max(self.power(kind, self.f_low) for kind in ("fa", "linear", "comm")) >= 1:
            reason = "keeps the device at or above its power limit"
            raise InputError("--f_low", self.f_low, reason, "give a lower one")

    def power(self, kind: str, clock: float) -> float:
        """Computes the device's power for a kind of work at a clock."""
        activity = {"fa": 1.0, "linear": self.a_linear, "comm": self.a_comm, "idle": 0.0}[kind]
        return self.ps + activity * (self.pfa - self.ps) * clock**self.alpha


_READERS = {one.name: one.metadata["read"] for one in fields(Constants)}


@dataclass(frozen=True)
class Workload:
    """Computation and communication of the busiest rank in one layer."""

    plan: TokenPlan
    config: Mapping[str, Any]
    ulysses: int
    ring: int
    layers: int  # layer calls of a rank: layers x steps x local guidance branches

    @classmethod
    def of(cls, run: Run) -> Workload:
        parallel, config, request = run.setup.parallel, run.setup.checkpoint.config, run.request
        multiple = run.setup.attention.row_multiple(parallel.ring_size)
        plan = TokenPlan(request.max_clip_tokens, parallel.sequence_size, multiple)
        branches = 2 if request.uses_guidance and parallel.cfg_size == 1 else 1
        layers = config["num_layers"] + run.setup.checkpoint.num_control_blocks
        layers *= request.sample_steps * branches
        return cls(plan, config, parallel.ulysses_size, parallel.ring_size, layers)

    @property
    def local_heads(self) -> int:
        """Heads per rank in attention, which is the maximum number of head chunks."""
        return int(self.config["num_heads"]) // self.ulysses

    def layer(self, mode: Mode, chunks: int, by: Constants) -> list[tuple[str, float]]:
        """Lists a layer's work as (kind, seconds at the rated clock), in the order of the mode.

        Computation and communication overlap: only communication that is waited for is listed.
        """
        c, heads = self.config["dim"], self.config["num_heads"]
        rows = min(self.plan.tokens, self.plan.shard_len * self.ulysses)
        found, now, lane = list[tuple[str, float]](), 0.0, 0.0
        sizes = count_heads_per_chunk(heads, self.ulysses, chunks)
        arrived, returned = dict[int, float](), dict[int, float]()

        def spend(kind: str, seconds: float) -> None:
            nonlocal now
            if seconds > 0:
                now += seconds
                found.append((kind, seconds))

        def send(elements: float) -> float:
            return elements * by.element_bytes / (by.link_gbs * 1e9) + by.exchange_us / 1e6

        for verb, chunk in mode.order(len(sizes)):
            width = sizes[chunk] * c / heads  # channels of the head chunk
            exchange = send(self.plan.shard_len * width * (self.ulysses - 1))
            if verb == "start":
                arrived[chunk] = lane = max(lane, now) + 3 * exchange
            elif verb == "finish":
                spend("comm", returned[chunk] - now)
            else:
                spend("comm", arrived[chunk] - now)
                borders = [self.plan.tokens * i // self.ring for i in range(self.ring + 1)]
                for hop, (first, end) in enumerate(pairwise(borders), 1):
                    begun = now
                    for a, b in q_ranges(rows, mode.blocks):
                        spend("idle", by.launch_us / 1e6)
                        spend("fa", 4 * (b - a) * (end - first) * width / (by.fa_tflops * 1e12))
                    if hop < self.ring:
                        spend("comm", send(2 * rows * width) - (now - begun))
                returned[chunk] = lane = max(lane, now) + exchange
        per_token = 12 * c * c + 4 * self.config["text_len"] * c + 4 * c * self.config["ffn_dim"]
        spend("linear", self.plan.shard_len * per_token / (by.linear_tflops * 1e12))
        return found


class Prediction(NamedTuple):
    """Predicted seconds, mean power (TDP) and share of throttled time of one mode."""

    name: str
    chunks: int
    seconds: float
    power: float
    throttled: float


def denoise(layer: Sequence[tuple[str, float]], count: int, by: Constants) -> tuple[float, ...]:
    """Simulates `count` equal layers; returns seconds, energy (TDP x s) and throttled seconds.

    Power is constant between two clock changes, so its moving average has a closed form.
    """
    average, left = by.ps, 0.0  # seconds until the clock is raised again
    seconds = energy = throttled = 0.0
    exact, half = min(count, _EXACT_LAYERS), (0.0, 0.0, 0.0)
    for index in range(exact):
        if index == _EXACT_LAYERS // 2:
            half = seconds, energy, throttled
        for kind, work in layer:
            while work > 0:
                clock = by.f_low if left else 1.0
                power = by.power(kind, clock)
                speed = clock if kind in ("fa", "linear") else 1.0
                until = left or _reaches_limit(average, power, by.tau)
                taken = min(until, work / speed)
                work = work - taken * speed if until <= work / speed else 0.0
                seconds, energy = seconds + taken, energy + taken * power
                throttled += taken * (clock < 1)
                if taken == until and not left:
                    whole = _cycle(kind, by)
                    cycles = work // whole[0]
                    work -= cycles * whole[0]
                    seconds, energy = seconds + cycles * whole[1], energy + cycles * whole[2]
                    throttled += cycles * by.hold
                    average, left = 1.0, by.hold
                    continue
                average = power + (average - power) * math.exp(-taken / by.tau)
                left = max(left - taken, 0.0) if taken < until else by.hold * (average >= 1)
    if exact == count:
        return seconds, energy, throttled
    more = (count - exact) / (exact - _EXACT_LAYERS // 2)
    totals = zip((seconds, energy, throttled), half, strict=True)
    return tuple(whole + more * (whole - first) for whole, first in totals)


def _cycle(kind: str, by: Constants) -> tuple[float, float, float]:
    """Computes the work, seconds and energy between two clock reductions in work of one kind."""
    low, high = by.power(kind, by.f_low), by.power(kind, 1.0)
    raised = _reaches_limit(low + (1 - low) * math.exp(-by.hold / by.tau), high, by.tau)
    speed = by.f_low if kind in ("fa", "linear") else 1.0
    return by.hold * speed + raised, by.hold + raised, by.hold * low + raised * high


def _reaches_limit(average: float, power: float, tau: float) -> float:
    """Computes the seconds at a power until its moving average reaches the limit."""
    if power <= 1:
        return math.inf
    return tau * math.log((power - average) / (power - 1)) if average < 1 else 0.0


def predict(work: Workload, by: Constants, mode: Mode, chunks: int, name: str = "") -> Prediction:
    """Predicts the run with one attention mode and at most `chunks` head chunks."""
    seconds, energy, throttled = denoise(work.layer(mode, chunks, by), work.layers, by)
    whole, chunks = seconds + by.fixed, min(chunks, work.local_heads)
    return Prediction(name or mode.name, chunks, whole, energy / seconds, throttled / seconds)


def all_modes(work: Workload, by: Constants) -> list[Prediction]:
    """Predicts all modes, the overlap, and the baseline with a clock locked below the limit."""
    rows = {f"{key} {mode.name}": mode for key, mode in MODES.items()} | {OVERLAP.name: OVERLAP}
    found = [predict(work, by, mode, mode.chunks, name) for name, mode in rows.items()]
    if by.pfa > 1:
        clock = ((1 - by.ps) / (by.pfa - by.ps)) ** (1 / by.alpha)
        rates = {"fa_tflops": by.fa_tflops * clock, "linear_tflops": by.linear_tflops * clock}
        name = f"0, clock locked at {clock:.1%}"
        found.append(predict(work, replace(by, pfa=1.0, **rates), MODES[0], 1, name))
    return found


def sensitivity(work: Workload, by: Constants) -> dict[str, dict[str, float | None]]:
    """Computes the gain of mode 1 with each fitted constant multiplied by each factor."""

    def gain(name: str, value: float) -> float | None:
        try:
            varied = replace(by, **{name: _READERS[name](f"--{name}", value)})
        except InputError:
            return None
        base, chunked = (predict(work, varied, MODES[key], MODES[key].chunks) for key in (0, 1))
        return 1 - chunked.seconds / base.seconds

    return {
        one.name: {f"{f:g}": gain(one.name, getattr(by, one.name) * f) for f in _FACTORS}
        for one in fields(Constants)
        if one.metadata["source"] == FITTED
    }


def main(argv: Sequence[str]) -> int:
    """Prints the prediction for the given flags."""
    parser = Parser(
        prog="python -m wan.power predict", allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    parser.description = "Predict the time of each attention mode without running anything."
    for name in RUN_FLAGS:
        parser.add_argument(f"--{name}", metavar=name.upper(), help=FLAGS[name].help)
    for one in fields(Constants):
        words = f"{one.metadata['meaning']} ({one.default} {one.metadata['unit']}".rstrip() + ")"
        parser.add_argument(f"--{one.name}", metavar=one.name.upper(), help=words)
    readers = {name: FLAGS[name].reader for name in RUN_FLAGS} | _READERS
    raw = vars(parser.parse_args(list(argv)))
    given = {name: readers[name](f"--{name}", value) for name, value in raw.items()}
    asked = {name: given[name] for name in RUN_FLAGS if name in given}
    task = asked.get("task", PUBLISHED_RUN["task"])
    is_like = TASK_ALIASES.get(task, task) == PUBLISHED_RUN["task"]
    basis = PUBLISHED_RUN if is_like else {"ulysses_size": PUBLISHED_RUN["ulysses_size"]}
    run = resolve({**basis, **asked, "plan": True}, lambda *_: None, plan=True)
    if run.setup.parallel.ulysses_size == 1:
        raise InputError("`ulysses_size`", 1, "has no exchanges to predict", "give a larger one")
    by, work = Constants(**{n: given[n] for n in _READERS if n in given}), Workload.of(run)
    is_published = is_like and not asked.keys() - {"task"}
    print(*_lines(run, work, by, given.keys(), is_published), sep="\n", flush=True)
    return 0


def _lines(
    run: Run, work: Workload, by: Constants, given: Collection[str], is_published: bool
) -> Iterator[str]:
    found, varied = all_modes(work, by), sensitivity(work, by)
    request, parallel, base = run.request, run.setup.parallel, found[0]
    yield (
        f"Predicted, not run: {request.preset.task}, {request.size[0]}*{request.size[1]}, "
        f"{request.frame_num} frames, {request.sample_steps} steps; cfg {parallel.cfg_size} x ring "
        f"{parallel.ring_size} x ulysses {parallel.ulysses_size}; {work.layers} layers per rank."
    )
    yield f"\n{'mode':30}{'chunks':>7}{'time':>15}{'gain':>9}{'power':>10}{'throttled':>11}"
    for row in found:
        gain = "" if row is base else f"{1 - row.seconds / base.seconds:z.1%}"
        numbers = f"{row.seconds:>13.2f} s{gain:>9}{row.power:>6.2f} TDP{row.throttled:>11.0%}"
        yield f"{row.name:30}{row.chunks:>7}{numbers}"
    if is_published:
        times = "; ".join(f"mode {key} {seconds:.2f} s" for key, seconds in PUBLISHED.items())
        yield f"The authors measured: {times}."
    by_chunks = [predict(work, by, MODES[1], n + 1) for n in range(work.local_heads)]
    best = min(by_chunks, key=lambda row: round(row.seconds, 1))
    saved = 1 - best.seconds / base.seconds
    helps = "help" if saved >= 0.02 else "do not help"  # smaller gains are within the model's error
    reason = "" if base.throttled else " The baseline is not throttled, so nothing can be saved."
    yield f"\nPredicted: head chunks {helps}, {saved:z.1%} with {best.chunks} of mode 1.{reason}"
    yield f"\nGain of mode 1 when a constant that was {FITTED} is multiplied by"
    yield f"{'':14}" + "".join(f"{factor:>9}" for factor in next(iter(varied.values())))
    for name, gains in varied.items():
        cells = ("-" if one is None else f"{one:z.1%}" for one in gains.values())
        yield f"{name:14}" + "".join(f"{cell:>9}" for cell in cells)
    yield f"\nThe prediction assumes a governor with hysteresis ({FITTED}) and these constants:"
    for one in fields(Constants):
        source = "command line" if one.name in given else one.metadata["source"]
        number = f"{getattr(by, one.name):g} {one.metadata['unit']}"
        yield f"  {one.name:14}{number:>14}  {source:28} {one.metadata['meaning']}"
