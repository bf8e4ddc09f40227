"""Which noise levels a run goes through, and which expert takes each; pure Python.

Legend: N steps. A level sigma is the share of noise; the model is told timesteps, 1000 sigma.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import atan, cos, sin

from wan.settings.presets import TRAIN_TIMESTEPS
from wan.settings.request import Request
from wan.settings.solvers import SOLVERS

RCM_ANGLES = (1.5, 1.4, 1.0)
"""TrigFlow times of rCM between the first level and 0; fewer steps take the first of them."""


@dataclass(frozen=True)
class Schedule:
    """The levels of a run.

    Attributes:
        sigmas: [N+1], falling, the last one 0.
        timesteps: [N], what the model is told.
        experts: [N], the network of each step.
        scales: [N], which of the guidance scales (low, high noise) each step takes.
    """

    sigmas: tuple[float, ...]
    timesteps: tuple[float, ...]
    experts: tuple[str, ...]
    scales: tuple[int, ...]

    @property
    def high_noise_steps(self) -> int:
        """Of the high-noise expert."""
        return self.experts.count("high_noise")


def schedule(request: Request, steps: int | None = None) -> Schedule:
    """Of a video. steps: in place of the request's own number."""
    solver = request.sample_solver
    count = request.sample_steps if steps is None else steps
    if request.timesteps is not None:
        levels = [timestep / TRAIN_TIMESTEPS for timestep in request.timesteps]
        told = request.timesteps
    elif solver == "rcm":
        levels = rcm_sigmas(count, request.first_sigma)
        told = tuple(TRAIN_TIMESTEPS * sigma for sigma in levels)
    else:
        levels = sigmas(solver, count, request.sample_shift)
        told = timesteps(solver, levels)
    rows = [
        expert_at(timestep, request.boundary)
        if request.boundary_step is None
        else (("high_noise", 1) if index < request.boundary_step else ("low_noise", 0))
        for index, timestep in enumerate(told)
    ]
    experts, scales = zip(*rows, strict=True)
    return Schedule((*levels, 0.0), told, experts, scales)


def sigmas(solver: str, steps: int, shift: float) -> list[float]:
    """Shifted levels [N], bit by bit the official grids (the order of operations counts)."""
    start = SOLVERS[solver].start
    ratios = [place * (-start / steps) + start for place in range(steps)]
    return [shift * ratio / (1 + (shift - 1) * ratio) for ratio in ratios]


def timesteps(solver: str, levels: list[float]) -> tuple[float, ...]:
    """What the model is told at levels; the solver steps on the exact ones."""
    told = [sigma * TRAIN_TIMESTEPS for sigma in levels]
    return tuple(map(int, told)) if SOLVERS[solver].whole else tuple(told)


def rcm_sigmas(steps: int, first: float) -> list[float]:
    """rCM's levels [N] (arXiv:2510.08431): tan t is the noise-to-data ratio of a TrigFlow.

    first: that ratio of the first level (`sigma_max` there).
    """
    angles = (atan(first), *RCM_ANGLES[: steps - 1])
    return [sin(angle) / (sin(angle) + cos(angle)) for angle in angles]


def expert_at(timestep: float, boundary: float | None) -> tuple[str, int]:
    """The network for a timestep and the index of its guidance scale."""
    if boundary is None:
        return "dit", 0
    if timestep >= boundary * TRAIN_TIMESTEPS:
        return "high_noise", 1
    return "low_noise", 0
