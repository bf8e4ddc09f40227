"""Solvers, which step latents from one sigma of the noise schedule to the next.

Legend: N steps. With v the network's velocity at sigma s and s' the next sigma, an ODE step is
x + (s' - s) v (Euler). A stochastic step predicts the clean latents x - s v and mixes them with new
noise, (1 - s') (x - s v) + s' noise, as the distillations DMD and rCM do.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor

from wan.settings.request import Request
from wan.settings.solvers import SOLVERS
from wan.settings.timesteps import Schedule

Draw = Callable[[], Tensor]
"""Draws new noise of the latents' shape in each call."""


class Stepper(Protocol):
    """A solver with the `step` of diffusers' schedulers."""

    def step(
        self, model_output: Tensor, timestep: Tensor, sample: Tensor, *, return_dict: bool
    ) -> tuple[Tensor]: ...


class Renoise:
    """Takes stochastic steps in float64 on the CPU; they are few, and NPUs have no float64."""

    def __init__(self, levels: tuple[float, ...], draw: Draw) -> None:
        self._levels, self._draw, self._index = levels, draw, 0

    def step(
        self, model_output: Tensor, timestep: Tensor, sample: Tensor, *, return_dict: bool
    ) -> tuple[Tensor]:
        """Returns the latents at the next sigma, in the dtype and on the device of `sample`."""
        sigma, after = self._levels[self._index : self._index + 2]
        self._index += 1
        x, v = (tensor.to("cpu", torch.float64) for tensor in (sample, model_output))
        x = x - sigma * v
        if after:
            x = (1 - after) * x + after * self._draw().to("cpu", torch.float64)
        return (x.to(sample),)


def make_solver(
    request: Request, schedule: Schedule, draw: Draw | None = None
) -> tuple[Stepper, Tensor]:
    """Makes the solver of a video.

    Args:
        schedule: The noise schedule of the video.
        sample_noise: Only needed by the stochastic solvers.

    Returns:
        The solver, and the timesteps [N] of the model: int64 with the official solvers, float32
        with the others.
    """
    row = SOLVERS["euler" if request.ode else request.sample_solver]
    whole = SOLVERS[request.sample_solver].whole
    told = torch.tensor(schedule.timesteps, dtype=torch.int64 if whole else torch.float32)
    module, _, kind = row.make.partition(":")
    make = getattr(import_module(module), kind)
    if row.draws:
        assert draw is not None
        return make(schedule.sigmas, draw), told
    solver = make(**row.options)  # a scheduler of diffusers, with our sigmas
    solver.set_timesteps(len(told))
    solver.sigmas = torch.tensor(schedule.sigmas, dtype=torch.float32)
    solver.timesteps = told
    # The scheduler counts steps from 0 instead of searching the timestep: with many steps,
    # neighboring timesteps truncate to the same integer, and the search would start one step late.
    solver.set_begin_index(0)
    return solver, told
