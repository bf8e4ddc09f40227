"""Which timesteps a run goes through and which expert takes each; pure Python.

Legend: N steps.
"""

from __future__ import annotations

from wan.settings.presets import TRAIN_TIMESTEPS
from wan.settings.request import Request

# Of the solvers, the first sigma before the shift: UniPC starts just below 1, where training does,
# at the float32 value of 1 - 1/1000.
STARTS = {"unipc": 0.9990000128746033, "dpm++": 1.0}


def sigmas(solver: str, steps: int, shift: float) -> list[float]:
    """Sigmas [N]: the official grids, bit by bit (the order of operations counts)."""
    start = STARTS[solver]
    ratios = [place * (-start / steps) + start for place in range(steps)]
    return [shift * ratio / (1 + (shift - 1) * ratio) for ratio in ratios]


def timesteps(solver: str, steps: int, shift: float) -> list[int]:
    """What the model is told: truncated, as officially (the solver steps on the exact sigmas)."""
    return [int(sigma * TRAIN_TIMESTEPS) for sigma in sigmas(solver, steps, shift)]


def expert_at(timestep: int, boundary: float | None) -> tuple[str, int]:
    """The network for a timestep and the index of its guidance scale."""
    if boundary is None:
        return "dit", 0
    if timestep >= boundary * TRAIN_TIMESTEPS:
        return "high_noise", 1
    return "low_noise", 0


def experts(request: Request, steps: int | None = None) -> tuple[str, ...]:
    """The network of each step of a run. steps: in place of the request's own number."""
    count = request.sample_steps if steps is None else steps
    times = timesteps(request.sample_solver, count, request.sample_shift)
    return tuple(expert_at(timestep, request.boundary)[0] for timestep in times)
