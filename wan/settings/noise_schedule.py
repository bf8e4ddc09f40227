"""Noise schedules: sigma, timestep and expert of each step. Pure Python.

Legend: N steps. sigma is the share of noise in the latents; the model gets timestep = 1000 sigma.
A step of two forward passes is two steps here, so that caches, records and progress count each.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import atan, cos, sin, sqrt

from wan.settings.noise_tables import NOISE_TABLES, OFFICIAL_TABLE
from wan.settings.presets import TRAIN_TIMESTEPS
from wan.settings.solvers import SOLVERS
from wan.settings.video_options import VideoSettings

RCM_ANGLES = (1.5, 1.4, 1.0)
"""TrigFlow times of rCM between the first sigma and 0; N steps use the first N - 1."""


@dataclass(frozen=True)
class NoiseSchedule:
    """Noise schedule of a video; without its first steps if the video starts from another one.

    Attributes:
        sigmas: [N+1], falling, the last one 0.
        timesteps: [N], inputs of the model.
        experts: [N], names of the networks.
        first_step: Number of the steps that are left out.
    """

    sigmas: tuple[float, ...]
    timesteps: tuple[float, ...]
    experts: tuple[str, ...]
    first_step: int = 0

    @property
    def step_range(self) -> range:
        """Indices of the steps among those of the complete schedule."""
        return range(self.first_step, self.first_step + len(self.experts))

    @property
    def high_noise_steps(self) -> int:
        """Number of steps of the high-noise expert."""
        return self.experts.count("high_noise")


def make_noise_schedule(params: VideoSettings, steps: int | None = None) -> NoiseSchedule:
    """Makes the noise schedule of a video; `steps` replaces `sample_steps`."""
    solver = params.sample_solver
    num_steps = params.sample_steps if steps is None else steps
    if params.timesteps is not None:
        levels = [timestep / TRAIN_TIMESTEPS for timestep in params.timesteps]
        model_timesteps = params.timesteps
    elif solver == "rcm":  # arXiv:2510.08431: tan of an angle is the noise-to-data ratio
        angles = (atan(params.first_sigma), *RCM_ANGLES[: num_steps - 1])
        levels = [sin(angle) / (sin(angle) + cos(angle)) for angle in angles]
        model_timesteps = tuple(TRAIN_TIMESTEPS * sigma for sigma in levels)
    else:
        levels = compute_sigmas(solver, num_steps, params.sample_shift, params.sigmas)
        model_timesteps = compute_timesteps(solver, levels)
    experts = [select_expert(timestep, params.boundary) for timestep in model_timesteps]
    if params.boundary_step is not None:
        high = params.boundary_step
        experts = ["high_noise" if i < high else "low_noise" for i in range(len(model_timesteps))]
    first = 0
    if params.strength is not None:  # as in diffusers, a share of the steps and not of the noise
        first = len(experts) - int(len(experts) * params.strength)
    elif params.refine:
        first = len(experts) - experts.count("low_noise")
    if params.refine:
        experts = ["low_noise"] * len(experts)
    schedule = NoiseSchedule(
        (*levels[first:], 0.0), model_timesteps[first:], tuple(experts[first:]), first
    )
    return schedule if SOLVERS[solver].forwards_per_step == 1 else _add_midpoints(schedule)


def _add_midpoints(schedule: NoiseSchedule) -> NoiseSchedule:
    """Adds the second forward pass of each step but the last one."""
    sigmas, timesteps, experts = list[float](), list[float](), list[str]()
    for index, expert in enumerate(schedule.experts):
        sigma, next_sigma = schedule.sigmas[index : index + 2]
        midpoint = [sqrt(sigma * next_sigma)] if next_sigma else []
        sigmas += [sigma, *midpoint]
        timesteps += [schedule.timesteps[index], *(TRAIN_TIMESTEPS * s for s in midpoint)]
        experts += [expert] * (1 + len(midpoint))
    first = 2 * schedule.first_step
    return NoiseSchedule((*sigmas, 0.0), tuple(timesteps), tuple(experts), first)


def make_schedule_notices(params: VideoSettings, num_forwards: int) -> tuple[str, ...]:
    """Describes a schedule whose forward passes, of one branch, are not its `sample_steps`."""
    solver, steps = params.sample_solver, params.sample_steps
    if SOLVERS[solver].forwards_per_step > 1:
        return (
            f"`sample_solver={solver}`: {steps} steps are {num_forwards} forward passes, which "
            "progress, step caches and traces count.",
        )
    if num_forwards < steps:
        return (
            f"`sigmas={params.sigmas}` has only {num_forwards} different sigmas for {steps} steps; "
            f"so there are {num_forwards} steps.",
        )
    return ()


def count_noise_samples(params: VideoSettings) -> int:
    """Returns how often noise is drawn for a video: for the first latents and stochastic steps."""
    if not SOLVERS["euler" if params.ode else params.sample_solver].adds_noise:
        return 1
    return sum(sigma > 0 for sigma in make_noise_schedule(params).sigmas)


def compute_sigmas(
    solver: str, steps: int, shift: float, table: str = OFFICIAL_TABLE
) -> list[float]:
    """Computes shifted sigmas [N] in the official order of operations, for bitwise equality.

    Other noise tables start at the solver's first sigma, too, and may have fewer than N sigmas.
    """
    start = SOLVERS[solver].start_sigma
    if table == OFFICIAL_TABLE:
        ratios = [index * (-start / steps) + start for index in range(steps)]
    else:
        levels = (level / TRAIN_TIMESTEPS for level in NOISE_TABLES[table](steps))
        ratios = [start, *(level for level in levels if level < start - 0.5 / TRAIN_TIMESTEPS)]
    return [shift * ratio / (1 + (shift - 1) * ratio) for ratio in ratios]


def compute_timesteps(solver: str, levels: list[float]) -> tuple[float, ...]:
    """Computes the model's timesteps, truncated for some solvers; the solver uses exact sigmas."""
    timesteps = [sigma * TRAIN_TIMESTEPS for sigma in levels]
    return tuple(map(int, timesteps)) if SOLVERS[solver].truncates_timesteps else tuple(timesteps)


def select_expert(timestep: float, boundary: float | None) -> str:
    """Returns the expert for a timestep; `boundary` is that of `VideoSettings`."""
    if boundary is None:
        return "dit"
    return "high_noise" if timestep >= boundary * TRAIN_TIMESTEPS else "low_noise"
