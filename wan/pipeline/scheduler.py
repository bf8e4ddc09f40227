"""Solvers, which step latents from one sigma of the noise schedule to the next.

Legend: N steps. With v the network's velocity at sigma s and s' the next sigma, an ODE step is
x + (s' - s) v (Euler). A stochastic step predicts the clean latents x - s v and mixes them with new
noise, (1 - s') (x - s v) + s' noise, as the distillations DMD and rCM do.
"""

from __future__ import annotations

from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor

from wan.settings.noise_schedule import NoiseSchedule
from wan.settings.solvers import SOLVERS
from wan.tasks.base import SampleNoise, VideoParams


class Stepper(Protocol):
    """A solver with the `step` of diffusers' schedulers."""

    def step(
        self, model_output: Tensor, timestep: Tensor, sample: Tensor, *, return_dict: bool
    ) -> tuple[Tensor]: ...


class Renoise:
    """Takes stochastic steps in float64 on the CPU; they are few, and NPUs have no float64."""

    def __init__(self, sigmas: tuple[float, ...], sample_noise: SampleNoise) -> None:
        self._sigmas, self._sample_noise, self._index = sigmas, sample_noise, 0

    def step(
        self, model_output: Tensor, timestep: Tensor, sample: Tensor, *, return_dict: bool
    ) -> tuple[Tensor]:
        """Returns the latents at the next sigma, in the dtype and on the device of `sample`."""
        sigma, next_sigma = self._sigmas[self._index : self._index + 2]
        self._index += 1
        x, v = (tensor.to("cpu", torch.float64) for tensor in (sample, model_output))
        x = x - sigma * v
        if next_sigma:
            x = (1 - next_sigma) * x + next_sigma * self._sample_noise().to("cpu", torch.float64)
        return (x.to(sample),)


def make_solver(
    params: VideoParams, schedule: NoiseSchedule, sample_noise: SampleNoise | None = None
) -> tuple[Stepper, Tensor]:
    """Makes the solver of a video.

    Args:
        schedule: The noise schedule of the video.
        sample_noise: Only needed by the stochastic solvers.

    Returns:
        The solver, and the timesteps [N] of the model: int64 with the official solvers, float32
        with the others.
    """
    spec = SOLVERS["euler" if params.ode else params.sample_solver]
    truncates = SOLVERS[params.sample_solver].truncates_timesteps
    timesteps = torch.tensor(schedule.timesteps, dtype=torch.int64 if truncates else torch.float32)
    module, _, class_name = spec.factory.partition(":")
    solver_class = getattr(import_module(module), class_name)
    if spec.adds_noise:
        assert sample_noise is not None
        return solver_class(schedule.sigmas, sample_noise), timesteps
    solver = solver_class(**spec.scheduler_kwargs)  # a scheduler of diffusers, with our sigmas
    solver.set_timesteps(len(timesteps))
    solver.sigmas = torch.tensor(schedule.sigmas, dtype=torch.float32)
    solver.timesteps = timesteps
    # The scheduler counts steps from 0 instead of searching the timestep: with many steps,
    # neighboring timesteps truncate to the same integer, and the search would start one step late.
    solver.set_begin_index(0)
    return solver, timesteps
