"""Solvers, which step latents from one sigma of the noise schedule to the next.

Legend: N steps. With v the network's velocity at sigma s and s' the next sigma, an ODE step is
x + (s' - s) v (Euler). A stochastic step predicts the clean latents x - s v and mixes them with new
noise, (1 - s') (x - s v) + s' noise, as the distillations DMD, rCM and LCM do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pkgutil import resolve_name
from typing import ClassVar

import torch
from torch import Tensor

from wan.settings.noise_schedule import NoiseSchedule
from wan.settings.solvers import SOLVERS
from wan.tasks.base import SampleNoise, VideoParams


class Stepper(ABC):
    """Base class of the solvers.

    Args:
        sigmas: The sigmas of a `NoiseSchedule`.
        sample_noise: Samples new noise; only needed by stochastic solvers.
    """

    kept_names: ClassVar[tuple[str, ...]] = ()  # attributes that keep latents, or None

    def __init__(self, sigmas: tuple[float, ...], sample_noise: SampleNoise | None = None) -> None:
        self._sigmas, self._sample_noise, self._index = sigmas, sample_noise, 0
        self._coefficients = torch.tensor(sigmas, dtype=torch.float32)

    def to(self, device: torch.device) -> None:
        """Moves the latents that are kept between steps."""
        for name in self.kept_names:
            latents = getattr(self, name)
            setattr(self, name, None if latents is None else latents.to(device))

    @abstractmethod
    def step(self, x: Tensor, velocity: Tensor) -> Tensor:
        """Returns the latents at the next sigma, from those at the sigma of this step.

        Args:
            x: The latents.
            velocity: The velocity that the network predicts from them.
        """


class Euler(Stepper):
    """Takes first-order steps."""

    def step(self, x: Tensor, velocity: Tensor) -> Tensor:
        difference = self._coefficients[self._index + 1] - self._coefficients[self._index]
        self._index += 1
        return x + difference * velocity


class SigmaSolver(Stepper):
    """Base class of the solvers that compute a step from the prediction of the clean latents."""

    def step(self, x: Tensor, velocity: Tensor) -> Tensor:
        """Returns the latents at the next sigma; those at sigma 0 are the predicted clean ones."""
        sigma, next_sigma = self._sigmas[self._index : self._index + 2]
        clean = x - sigma * velocity
        next_latents = self.advance(x, clean, sigma, next_sigma) if next_sigma else clean
        self._index += 1
        return next_latents

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

    def step(self, x: Tensor, velocity: Tensor) -> Tensor:
        """Returns the latents at the next sigma, in the dtype and on the device of `x`."""
        x64, velocity64 = (tensor.to("cpu", torch.float64) for tensor in (x, velocity))
        return super().step(x64, velocity64).to(x)

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
    solver: Stepper = resolve_name(spec.factory)(schedule.sigmas, sample_noise)
    return solver, torch.tensor(schedule.timesteps, dtype=dtype)
