"""Predicts the time of each attention mode with a power model, without running anything.

    python benchmarks/power_model.py --task t2v-A14B --frame_num 81 --ulysses_size 8

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
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from wan.app import failures
from wan.app.flag_parser import Parser
from wan.app.programs import run_program
from wan.app.resolve import ResolveContext, resolve_run
from wan.app.run import Run
from wan.settings.attention_modes import (
    MODES,
    OVERLAP,
    Mode,
    TokenPlan,
    count_heads_per_chunk,
    q_ranges,
)
from wan.settings.errors import COMMAND_LINE_NAMING, InputError
from wan.settings.flags import FLAGS
from wan.settings.layers import Layer, merge
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
# Seconds by mode, measured by its authors on four NPUs.
PUBLISHED_SECONDS = {0: 108.35, 1: 90.36, 2: 90.34}
RUN_FLAGS = (*PUBLISHED_RUN, "ring_size", "cfg_size")
FITTED = "fitted to the published row"
_EXACT_LAYERS = 400  # further layers are extrapolated from the second half
_SENSITIVITY_FACTORS = (0.5, 0.8, 0.95, 1.05, 1.25, 2.0)


def _declare_constant(
    default: float, unit: str, meaning: str, low: float, high: float, **reader_options: Any
) -> Any:
    source = reader_options.pop("source", "assumed")
    metadata = {
        "unit": unit,
        "meaning": meaning,
        "read": real(low, high, **reader_options),
        "source": source,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Constants:
    """Device constants of the model; each has a flag of the same name."""

    tau: float = _declare_constant(
        0.06, "s", "time constant of the average", 1e-3, 1e3, source=FITTED
    )
    f_low: float = _declare_constant(
        0.55, "", "lowered clock", 0.05, 1, exclude_max=True, source=FITTED
    )
    hold: float = _declare_constant(
        0.25, "s", "duration of the lowered clock", 1e-3, 1e3, source=FITTED
    )
    pfa: float = _declare_constant(1.05, "TDP", "power of attention", 0.01, 10, source=FITTED)
    fixed: float = _declare_constant(12.3, "s", "time outside denoising", 0, 1e5, source=FITTED)
    link_gbs: float = _declare_constant(20, "GB/s", "send bandwidth of a rank", 1e-3, 1e5)
    ps: float = _declare_constant(0.3, "TDP", "static power", 0, 1, exclude_max=True)
    alpha: float = _declare_constant(3, "", "exponent of the clock in power", 1, 4)
    a_linear: float = _declare_constant(0.75, "", "activity of other work", 0, 2)
    a_comm: float = _declare_constant(0.12, "", "activity of all-to-alls", 0, 2)
    fa_tflops: float = _declare_constant(310, "TFLOP/s", "attention at the rated clock", 1e-3, 1e5)
    linear_tflops: float = _declare_constant(
        320, "TFLOP/s", "other work at the rated clock", 1e-3, 1e5
    )
    exchange_us: float = _declare_constant(30, "us", "latency of an all-to-all", 0, 1e6)
    launch_us: float = _declare_constant(10, "us", "idle time before each attention call", 0, 1e6)
    element_bytes: float = _declare_constant(2, "bytes", "size of a sent element", 0.5, 4)

    def __post_init__(self) -> None:
        if self.pfa <= self.ps:
            reason = f"is not above --ps {self.ps:g}"
            raise InputError("--pfa", self.pfa, reason, "give a larger one")
        if max(self.compute_power(kind, self.f_low) for kind in ("fa", "linear", "comm")) >= 1:
            reason = "keeps the device at or above its power limit"
            raise InputError("--f_low", self.f_low, reason, "give a lower one")

    def compute_power(self, kind: str, clock: float) -> float:
        """Computes the device's power for a kind of work at a clock."""
        activity = {"fa": 1.0, "linear": self.a_linear, "comm": self.a_comm, "idle": 0.0}[kind]
        return self.ps + activity * (self.pfa - self.ps) * clock**self.alpha


_CONSTANT_READERS = {
    field_info.name: field_info.metadata["read"] for field_info in fields(Constants)
}


@dataclass(frozen=True)
class Workload:
    """Computation and communication of the busiest rank in one layer."""

    plan: TokenPlan
    config: Mapping[str, Any]
    ulysses: int
    ring: int
    layers: int  # layer calls of a rank: layers x steps x local guidance branches

    @classmethod
    def from_run(cls, run: Run) -> Workload:
        parallel, config, params = run.setup.parallel, run.setup.checkpoint.config, run.params
        multiple = run.setup.attention.row_multiple(parallel.ring_size)
        plan = TokenPlan(params.max_clip_tokens, parallel.sequence_size, multiple)
        branches = 2 if params.uses_guidance and parallel.cfg_size == 1 else 1
        layers = config["num_layers"] + run.setup.checkpoint.num_control_blocks
        layers *= params.sample_steps * branches
        return cls(plan, config, parallel.ulysses_size, parallel.ring_size, layers)

    @property
    def local_heads(self) -> int:
        """Heads per rank in attention, which is the maximum number of head chunks."""
        return int(self.config["num_heads"]) // self.ulysses

    def list_layer_work(
        self, mode: Mode, chunks: int, constants: Constants
    ) -> list[tuple[str, float]]:
        """Lists a layer's work as (kind, seconds at the rated clock), in the order of the mode.

        Computation and communication overlap: only communication that is waited for is listed.
        """
        dim, num_heads = self.config["dim"], self.config["num_heads"]
        num_queries = min(self.plan.tokens, self.plan.shard_len * self.ulysses)
        work_items, compute_end, transfer_end = list[tuple[str, float]](), 0.0, 0.0
        chunk_heads = count_heads_per_chunk(num_heads, self.ulysses, chunks)
        arrival_times, return_times = dict[int, float](), dict[int, float]()

        def add_work(kind: str, seconds: float) -> None:
            nonlocal compute_end
            if seconds > 0:
                compute_end += seconds
                work_items.append((kind, seconds))

        def compute_transfer_seconds(elements: float) -> float:
            return (
                elements * constants.element_bytes / (constants.link_gbs * 1e9)
                + constants.exchange_us / 1e6
            )

        for action, chunk in mode.order(len(chunk_heads)):
            width = chunk_heads[chunk] * dim / num_heads  # channels of the head chunk
            exchange = compute_transfer_seconds(self.plan.shard_len * width * (self.ulysses - 1))
            if action == "start":
                arrival_times[chunk] = transfer_end = max(transfer_end, compute_end) + 3 * exchange
            elif action == "finish":
                add_work("comm", return_times[chunk] - compute_end)
            else:
                add_work("comm", arrival_times[chunk] - compute_end)
                borders = [self.plan.tokens * i // self.ring for i in range(self.ring + 1)]
                for hop, (first, end) in enumerate(pairwise(borders), 1):
                    hop_begin = compute_end
                    for a, b in q_ranges(num_queries, mode.blocks):
                        add_work("idle", constants.launch_us / 1e6)
                        add_work(
                            "fa", 4 * (b - a) * (end - first) * width / (constants.fa_tflops * 1e12)
                        )
                    if hop < self.ring:
                        add_work(
                            "comm",
                            compute_transfer_seconds(2 * num_queries * width)
                            - (compute_end - hop_begin),
                        )
                return_times[chunk] = transfer_end = max(transfer_end, compute_end) + exchange
        per_token = (
            12 * dim * dim + 4 * self.config["text_len"] * dim + 4 * dim * self.config["ffn_dim"]
        )
        add_work("linear", self.plan.shard_len * per_token / (constants.linear_tflops * 1e12))
        return work_items


class Prediction(NamedTuple):
    """Predicted seconds, mean power (TDP) and share of throttled time of one mode."""

    name: str
    chunks: int
    seconds: float
    power: float
    throttled: float


def simulate_layers(
    layer: Sequence[tuple[str, float]], count: int, constants: Constants
) -> tuple[float, ...]:
    """Simulates `count` equal layers; returns seconds, energy (TDP x s) and throttled seconds.

    Power is constant between two clock changes, so its moving average has a closed form.
    """
    average_power, hold_remaining = constants.ps, 0.0  # seconds until the clock is raised again
    seconds = energy = throttled = 0.0
    num_exact, half_totals = min(count, _EXACT_LAYERS), (0.0, 0.0, 0.0)
    for index in range(num_exact):
        if index == _EXACT_LAYERS // 2:
            half_totals = seconds, energy, throttled
        for kind, work in layer:
            while work > 0:
                clock = constants.f_low if hold_remaining else 1.0
                power = constants.compute_power(kind, clock)
                speed = clock if kind in ("fa", "linear") else 1.0
                event_seconds = hold_remaining or _compute_seconds_to_limit(
                    average_power, power, constants.tau
                )
                elapsed = min(event_seconds, work / speed)
                work = work - elapsed * speed if event_seconds <= work / speed else 0.0
                seconds, energy = seconds + elapsed, energy + elapsed * power
                throttled += elapsed * (clock < 1)
                if elapsed == event_seconds and not hold_remaining:
                    total = _compute_throttle_cycle(kind, constants)
                    cycles = work // total[0]
                    work -= cycles * total[0]
                    seconds, energy = seconds + cycles * total[1], energy + cycles * total[2]
                    throttled += cycles * constants.hold
                    average_power, hold_remaining = 1.0, constants.hold
                    continue
                average_power = power + (average_power - power) * math.exp(-elapsed / constants.tau)
                hold_remaining = (
                    max(hold_remaining - elapsed, 0.0)
                    if elapsed < event_seconds
                    else constants.hold * (average_power >= 1)
                )
    if num_exact == count:
        return seconds, energy, throttled
    num_halves = (count - num_exact) / (num_exact - _EXACT_LAYERS // 2)
    totals = zip((seconds, energy, throttled), half_totals, strict=True)
    return tuple(total + num_halves * (total - half_total) for total, half_total in totals)


def _compute_throttle_cycle(kind: str, constants: Constants) -> tuple[float, float, float]:
    """Computes the work, seconds and energy between two clock reductions in work of one kind."""
    low, high = constants.compute_power(kind, constants.f_low), constants.compute_power(kind, 1.0)
    raised_seconds = _compute_seconds_to_limit(
        low + (1 - low) * math.exp(-constants.hold / constants.tau), high, constants.tau
    )
    speed = constants.f_low if kind in ("fa", "linear") else 1.0
    return (
        constants.hold * speed + raised_seconds,
        constants.hold + raised_seconds,
        constants.hold * low + raised_seconds * high,
    )


def _compute_seconds_to_limit(average: float, power: float, tau: float) -> float:
    """Computes the seconds at a power until its moving average reaches the limit."""
    if power <= 1:
        return math.inf
    return tau * math.log((power - average) / (power - 1)) if average < 1 else 0.0


def predict_mode(
    workload: Workload, constants: Constants, mode: Mode, chunks: int, name: str = ""
) -> Prediction:
    """Predicts the run with one attention mode and at most `chunks` head chunks."""
    seconds, energy, throttled = simulate_layers(
        workload.list_layer_work(mode, chunks, constants), workload.layers, constants
    )
    total, chunks = seconds + constants.fixed, min(chunks, workload.local_heads)
    return Prediction(name or mode.name, chunks, total, energy / seconds, throttled / seconds)


def predict_modes(workload: Workload, constants: Constants) -> list[Prediction]:
    """Predicts all modes, the overlap, and the baseline with a clock locked below the limit."""
    modes = {f"{key} {mode.name}": mode for key, mode in MODES.items()} | {OVERLAP.name: OVERLAP}
    predictions = [
        predict_mode(workload, constants, mode, mode.chunks, name) for name, mode in modes.items()
    ]
    if constants.pfa > 1:
        clock = ((1 - constants.ps) / (constants.pfa - constants.ps)) ** (1 / constants.alpha)
        rates = {
            "fa_tflops": constants.fa_tflops * clock,
            "linear_tflops": constants.linear_tflops * clock,
        }
        name = f"0, clock locked at {clock:.1%}"
        predictions.append(
            predict_mode(workload, replace(constants, pfa=1.0, **rates), MODES[0], 1, name)
        )
    return predictions


def compute_sensitivity(
    workload: Workload, constants: Constants
) -> dict[str, dict[str, float | None]]:
    """Computes the gain of mode 1 with each fitted constant multiplied by each factor."""

    def compute_gain(name: str, value: float) -> float | None:
        try:
            trial = replace(constants, **{name: _CONSTANT_READERS[name](f"--{name}", value)})
        except InputError:
            return None
        baseline, chunked = (
            predict_mode(workload, trial, MODES[key], MODES[key].chunks) for key in (0, 1)
        )
        return 1 - chunked.seconds / baseline.seconds

    return {
        info.name: {
            f"{factor:g}": compute_gain(info.name, getattr(constants, info.name) * factor)
            for factor in _SENSITIVITY_FACTORS
        }
        for info in fields(Constants)
        if info.metadata["source"] == FITTED
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the prediction for the given flags."""
    parser = Parser(
        description=(__doc__ or "").splitlines()[0],
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for name in RUN_FLAGS:
        parser.add_argument(f"--{name}", metavar=name.upper(), help=FLAGS[name].help)
    for info in fields(Constants):
        help_text = (
            f"{info.metadata['meaning']} ({info.default} {info.metadata['unit']}".rstrip() + ")"
        )
        parser.add_argument(f"--{info.name}", metavar=info.name.upper(), help=help_text)
    readers = {name: FLAGS[name].reader for name in RUN_FLAGS} | _CONSTANT_READERS
    raw_values = vars(parser.parse_args(argv))
    flag_values = {name: readers[name](f"--{name}", value) for name, value in raw_values.items()}
    run_settings = {name: flag_values[name] for name in RUN_FLAGS if name in flag_values}
    task = run_settings.get("task", PUBLISHED_RUN["task"])
    is_known = TASK_ALIASES.get(task, task) == PUBLISHED_RUN["task"]
    defaults = PUBLISHED_RUN if is_known else {"ulysses_size": PUBLISHED_RUN["ulysses_size"]}
    layer = Layer("the command line", COMMAND_LINE_NAMING, {**defaults, **run_settings})
    run = resolve_run(merge(layer), ResolveContext(plan=True))
    if run.setup.parallel.ulysses_size == 1:
        raise InputError("`ulysses_size`", 1, "has no exchanges to predict", "give a larger one")
    constants = Constants(**{n: flag_values[n] for n in _CONSTANT_READERS if n in flag_values})
    workload = Workload.from_run(run)
    is_published = is_known and not run_settings.keys() - {"task"}
    lines = _format_predictions(run, workload, constants, flag_values.keys(), is_published)
    with failures.ignore_closed_stdout():
        print(*lines, sep="\n")


def _format_predictions(
    run: Run,
    workload: Workload,
    constants: Constants,
    flag_names: Collection[str],
    is_published: bool,
) -> Iterator[str]:
    predictions = predict_modes(workload, constants)
    gains_by_constant = compute_sensitivity(workload, constants)
    params, parallel, baseline = run.params, run.setup.parallel, predictions[0]
    yield (
        f"Predicted, not run: {params.preset.task}, {params.size[0]}*{params.size[1]}, "
        f"{params.frame_num} frames, {params.sample_steps} steps; cfg {parallel.cfg_size} "
        f"x ring {parallel.ring_size} x ulysses {parallel.ulysses_size}; "
        f"{workload.layers} layers per rank."
    )
    yield f"\n{'mode':30}{'chunks':>7}{'time':>15}{'gain':>9}{'power':>10}{'throttled':>11}"
    for row in predictions:
        gain = "" if row is baseline else f"{1 - row.seconds / baseline.seconds:z.1%}"
        numbers = f"{row.seconds:>13.2f} s{gain:>9}{row.power:>6.2f} TDP{row.throttled:>11.0%}"
        yield f"{row.name:30}{row.chunks:>7}{numbers}"
    if is_published:
        times = "; ".join(
            f"mode {key} {seconds:.2f} s" for key, seconds in PUBLISHED_SECONDS.items()
        )
        yield f"The authors measured: {times}."
    by_chunks = [
        predict_mode(workload, constants, MODES[1], n + 1) for n in range(workload.local_heads)
    ]
    best = min(by_chunks, key=lambda row: round(row.seconds, 1))
    saved = 1 - best.seconds / baseline.seconds
    # Smaller gains are within the model's error.
    verdict = "help" if saved >= 0.02 else "do not help"
    reason = (
        "" if baseline.throttled else " The baseline is not throttled, so nothing can be saved."
    )
    yield f"\nPredicted: head chunks {verdict}, {saved:z.1%} with {best.chunks} of mode 1.{reason}"
    yield f"\nGain of mode 1 when a constant that was {FITTED} is multiplied by"
    yield f"{'':14}" + "".join(f"{factor:>9}" for factor in next(iter(gains_by_constant.values())))
    for name, gains in gains_by_constant.items():
        cells = ("-" if item is None else f"{item:z.1%}" for item in gains.values())
        yield f"{name:14}" + "".join(f"{cell:>9}" for cell in cells)
    yield f"\nThe prediction assumes a governor with hysteresis ({FITTED}) and these constants:"
    for item in fields(Constants):
        source = "command line" if item.name in flag_names else item.metadata["source"]
        number = f"{getattr(constants, item.name):g} {item.metadata['unit']}"
        yield f"  {item.name:14}{number:>14}  {source:28} {item.metadata['meaning']}"


if __name__ == "__main__":
    sys.exit(run_program(main))
