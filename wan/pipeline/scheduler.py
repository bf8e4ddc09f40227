"""Solvers, which step latents from one sigma of the noise schedule to the next.

Legend: N steps. With v the network's velocity at sigma s and s' the next sigma, an ODE step is
x + (s' - s) v (Euler). A stochastic step predicts the clean latents x - s v and mixes them with new
noise, (1 - s') (x - s v) + s' noise, as the distillations DMD, rCM and LCM do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
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


class SigmaSolver(ABC):
    """Base class of the solvers of this repository; its attributes may hold earlier latents.

    Args:
        sigmas: The sigmas of a `NoiseSchedule`.
        sample_noise: Samples new noise; only needed by stochastic solvers.
    """

    def __init__(self, sigmas: tuple[float, ...], sample_noise: SampleNoise | None = None) -> None:
        self._sigmas, self._sample_noise, self._index = sigmas, sample_noise, 0

    def step(
        self, model_output: Tensor, timestep: Tensor, sample: Tensor, *, return_dict: bool
    ) -> tuple[Tensor]:
        """Returns the latents at the next sigma; those at sigma 0 are the predicted clean ones."""
        sigma, next_sigma = self._sigmas[self._index : self._index + 2]
        clean = sample - sigma * model_output
        next_latents = self.advance(sample, clean, sigma, next_sigma) if next_sigma else clean
        self._index += 1
        return (next_latents,)

    @abstractmethod
    def advance(self, x: Tensor, clean: Tensor, sigma: float, next_sigma: float) -> Tensor:
        """Returns the latents at `next_sigma`, above 0, from those at `sigma`.

        Args:
            x: The latents at `sigma`.
            clean: The clean latents that the network predicts from them.
        """

    def sample_noise(self, x: Tensor) -> Tensor:
        """Samples noise for latents x."""
        assert self._sample_noise is not None
        return self._sample_noise().to(x)


class Renoise(SigmaSolver):
    """Takes stochastic steps in float64 on the CPU; they are few, and NPUs have no float64."""

    def step(
        self, model_output: Tensor, timestep: Tensor, sample: Tensor, *, return_dict: bool
    ) -> tuple[Tensor]:
        """Returns the latents at the next sigma, in the dtype and on the device of `sample`."""
        x, v = (tensor.to("cpu", torch.float64) for tensor in (sample, model_output))
        (x,) = super().step(v, timestep, x, return_dict=return_dict)
        return (x.to(sample),)

    def advance(self, x: Tensor, clean: Tensor, sigma: float, next_sigma: float) -> Tensor:
        return (1 - next_sigma) * clean + next_sigma * self.sample_noise(clean)


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
    dtype = torch.int64 if spec.truncates_timesteps else torch.float32
    timesteps = torch.tensor(schedule.timesteps, dtype=dtype)
    module, _, class_name = spec.factory.partition(":")
    solver_class = getattr(import_module(module), class_name)
    if issubclass(solver_class, SigmaSolver):
        return solver_class(schedule.sigmas, sample_noise), timesteps
    solver = solver_class(**spec.scheduler_kwargs)  # a scheduler of diffusers, with our sigmas
    if spec.adds_noise:
        solver.sample_noise = sample_noise
    solver.set_timesteps(len(timesteps))
    solver.sigmas = torch.tensor(schedule.sigmas, dtype=torch.float32)
    solver.timesteps = timesteps
    # The scheduler counts steps from 0 instead of searching the timestep: with many steps,
    # neighboring timesteps truncate to the same integer, and the search would start one step late.
    solver.set_begin_index(0)
    return solver, timesteps
