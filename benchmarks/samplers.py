"""Plots the error of each sampler over the forward passes of a branch, on a flow that is known.

    python benchmarks/samplers.py --out docs/samplers_order.png

The data are Gaussian, N(0, 1.5^2), so the network's velocity is linear and its flow is known. The
error is that of the standard deviation of the result, 1.5. Latents are kept as coefficients of the
independent noises, so the error of stochastic samplers is computed, not sampled.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.demo.outputs import PICTURE
from wan.app.flag_parser import Parser
from wan.app.programs import make_output_path_type, run_program
from wan.pipeline.scheduler import make_solver
from wan.settings.noise_schedule import make_noise_schedule
from wan.settings.presets import PRESETS
from wan.settings.solvers import SOLVERS
from wan.tasks.base import make_video_params
from wan.utils.files import write_output

DEVIATION, COUNTS = 1.5, (5, 10, 20, 40, 80, 160, 320)
NOT_PLOTTED = ("dmd", "rcm", "lcm")  # of distilled models: they do not follow the flow


def compute_end_deviation(solver: str, steps: int) -> tuple[int, float]:
    """Returns the forward passes of a video, and the standard deviation of its result."""
    values: dict[str, Any] = {"sample_solver": solver, "sample_steps": steps, "sample_shift": 1.0}
    sizes = {"prompt": "", "size": (64, 64), "frame_num": 1}
    params = make_video_params(PRESETS["t2v-A14B"], sizes | values)
    schedule = make_noise_schedule(params)
    noises = iter(torch.eye(steps + 1, dtype=torch.float64).view(steps + 1, 1, 1, -1))

    def sample_noise() -> Tensor:
        return next(noises)

    stepper, timesteps = make_solver(params, schedule, sample_noise)
    sigma = schedule.sigmas[0]  # a step from 0.999 lacks 1/1000 of the data; their share follows
    x = sample_noise() * ((1 - sigma) ** 2 * DEVIATION**2 + sigma**2) ** 0.5
    for sigma in schedule.sigmas[:-1]:
        variance = (1 - sigma) ** 2 * DEVIATION**2 + sigma**2
        velocity = (sigma - (1 - sigma) * DEVIATION**2) / variance * x
        x = stepper.step(x, velocity)
    return len(timesteps), x.norm().item()


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=make_output_path_type(PICTURE), help="PNG to write")
    options = parser.parse_args(argv)
    errors: dict[str, list[tuple[int, float]]] = {}
    for solver in SOLVERS:
        if solver in NOT_PLOTTED:
            continue
        ends = [compute_end_deviation(solver, steps) for steps in COUNTS]
        errors[solver] = [(forwards, abs(end - DEVIATION)) for forwards, end in ends]
        print(f"{solver:16}", *(f"{n}: {error:.1e}" for n, error in errors[solver]), sep="  ")
    if options.out:
        draw_errors(errors, options.out)


def draw_errors(errors: dict[str, list[tuple[int, float]]], path: Path) -> None:
    """Draws the errors, with lines of first and second order."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for solver, points in errors.items():
        style = "--" if SOLVERS[solver].adds_noise else "-"
        axes.loglog(*zip(*points, strict=True), style, marker="o", markersize=3, label=solver)
    for order, start in ((1, 2.0), (2, 0.7)):
        line = [start * COUNTS[0] ** order / n**order * 0.5 for n in COUNTS]
        axes.loglog(COUNTS, line, ":", color="gray", linewidth=1)
        axes.annotate(f"order {order}", (COUNTS[-1], line[-1]), color="gray", fontsize=8)
    axes.set_xlabel("forward passes of a branch")
    axes.set_ylabel("error of the standard deviation")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3, which="both")
    with write_output(path, PICTURE) as temporary:
        figure.savefig(temporary, format="png", dpi=110, metadata={"Software": "tools.demo"})
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(run_program(main))
