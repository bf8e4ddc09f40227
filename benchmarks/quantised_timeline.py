"""Draws when a block of the DiT dequantizes its weights and when it multiplies.

    python -m benchmarks.quantised_timeline --out quantised_timeline.png
    python -m benchmarks.quantised_timeline --variants bf16 Q8_0 --steps 9 --out Q8_0.png

Each row is one block with both guidance branches, one after the other, and random weights, as
`benchmarks.quantised_weights` times them: of several steps the one of median duration. Weights that
are dequantized have two rows, eager and compiled. Needs matplotlib (requirements-power.txt).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from benchmarks.quantised_weights import MODELS, SCALES, VARIANTS, make_network, make_step
from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type, make_output_path_type, run_program
from wan.kernels.compiled_dequantise import MIN_VALUES, CompiledDequantizer
from wan.kernels.int8_linear import W8A8Linear
from wan.kernels.weight_only_linear import UpcastMemory, WeightOnlyLinear
from wan.modules.model import WanModel
from wan.settings.presets import PRESETS
from wan.settings.values import integer
from wan.utils import system
from wan.utils.files import make_marked_kind, write_output

try:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
except ModuleNotFoundError as error:
    from wan.app.programs import exit_without_package

    exit_without_package(error)

PLOT = make_marked_kind(
    "a plot of benchmarks.quantised_timeline", b"Software\0benchmarks.quantised_timeline"
)
METADATA = {"Software": "benchmarks.quantised_timeline"}
LAYERS = 2  # the second one is drawn
COLORS = {"other operations": "#BBBBBB", "matrix products": "#0072B2", "dequantizing": "#D55E00"}
"""Kind of an interval -> its color; it is drawn over those of the kinds before it."""
Intervals = dict[str, list[tuple[float, float]]]
"""Kind -> begin and end of each interval, seconds."""


@contextmanager
def record_intervals(network: WanModel) -> Iterator[Intervals]:
    """Records the intervals of the last block's calls, linear layers and dequantized weights."""
    intervals: Intervals = {kind: [] for kind in COLORS}
    begun: list[float] = []

    def begin(*_: object) -> None:
        begun.append(time.perf_counter())

    def end(kind: str) -> Callable[..., None]:
        return lambda *_: intervals[kind].append((begun.pop(), time.perf_counter()))

    fill_weight = UpcastMemory.get_or_fill

    def fill_timed(memory: Any, layer: Any, like: Any, shape: Any, fill: Any) -> Any:
        begin()
        weight = fill_weight(memory, layer, like, shape, fill)
        end("dequantizing")()
        return weight

    block, handles = network.blocks[-1], []
    linears = (
        m for m in block.modules() if isinstance(m, nn.Linear | WeightOnlyLinear | W8A8Linear)
    )
    for kind, module in chain(
        [("other operations", block)], (("matrix products", m) for m in linears)
    ):
        handles += [
            module.register_forward_pre_hook(begin),
            module.register_forward_hook(end(kind)),
        ]
    with patch.object(UpcastMemory, "get_or_fill", fill_timed):
        yield intervals
    for handle in handles:
        handle.remove()


def join_calls(intervals: Intervals) -> Intervals:
    """Keeps what lies in the block's calls, and moves the calls to follow each other from 0."""
    joined: Intervals = {kind: [] for kind in intervals}
    offset = 0.0
    for start, stop in intervals["other operations"]:
        for kind, pairs in intervals.items():
            joined[kind] += [
                (begin - start + offset, end - start + offset)
                for begin, end in pairs
                if start <= begin and end <= stop
            ]
        offset += stop - start
    return joined


def measure_blocks(
    networks: dict[str, WanModel], grid: tuple[int, int, int], num_steps: int
) -> dict[str, Intervals]:
    """Returns each network's intervals in the step whose block takes the median time.

    Every round runs a step of each network, after one that is not measured.
    """
    runs = {name: make_step(network, grid) for name, network in networks.items()}
    recorded: dict[str, list[Intervals]] = {name: [] for name in networks}
    for _ in range(num_steps + 1):
        for name, run in runs.items():
            with record_intervals(networks[name]) as intervals:
                run()
            recorded[name].append(join_calls(intervals))
    return {
        name: sorted(steps[1:], key=get_duration)[num_steps // 2]
        for name, steps in recorded.items()
    }


def get_duration(intervals: Intervals) -> float:
    """Returns the seconds of the block."""
    return intervals["other operations"][-1][1]


def draw_rows(rows: dict[str, Intervals], title: str, path: Path) -> None:
    """Draws one row for each name."""
    figure: Any = Figure(figsize=(10, 1.2 + 0.36 * len(rows)), dpi=130, layout="constrained")
    axes = figure.subplots()
    for row, intervals in enumerate(rows.values()):
        for kind, pairs in intervals.items():
            bars = [(1e3 * begin, 1e3 * (end - begin)) for begin, end in pairs]
            axes.broken_barh(bars, (row - 0.38, 0.76), facecolors=COLORS[kind], linewidth=0)
    axes.set_yticks(range(len(rows)), list(rows), fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("milliseconds of one block, both guidance branches", fontsize=8)
    axes.set_title(title, fontsize=8)
    handles = [Patch(facecolor=color, label=kind) for kind, color in COLORS.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, fontsize=8, frameon=False)
    with write_output(path, PLOT) as temporary:
        figure.savefig(temporary, format="png", metadata=METADATA)


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the options."""
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    positive = make_argument_type(integer(1, 1_000_000))
    parser.add_argument("--model", choices=MODELS, default="5B")
    parser.add_argument("--tokens", type=positive, default=180, help="of a video (180)")
    default = ["bf16", "Q8_0", "Q4_K", "Q3_K", "FP8", "int8"]
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=default)
    parser.add_argument("--steps", type=positive, default=9, help="of each variant (9)")
    out_file = make_output_path_type(PLOT)
    parser.add_argument("--out", type=out_file, required=True, help="PNG file")
    return parser.parse_args(argv)


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options(argv)
    preset = PRESETS[MODELS[options.model]]
    weights, networks = dict[str, nn.Parameter](), {}
    for variant in options.variants:
        for suffix, min_values in {" eager": MIN_VALUES, " compiled": 0}.items():
            is_compiled = variant in SCALES or variant == "FP8"
            if is_compiled or not min_values:
                dequantizer = CompiledDequantizer(min_values)
                name = variant + suffix * is_compiled
                networks[name] = make_network(preset, LAYERS, variant, weights, dequantizer)
    rows = measure_blocks(networks, (1, 1, options.tokens), options.steps)
    for name, intervals in rows.items():
        print(f"{name:16}{1e3 * get_duration(intervals):8.1f} ms")
    cpu = f"{system.read_cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    draw_rows(rows, f"{preset.task}, {options.tokens} tokens; {cpu}", options.out)


if __name__ == "__main__":
    sys.exit(run_program(main))
