"""diffusers' stochastic DPM-Solver++ with the noise of a video's seed."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import DPMSolverMultistepScheduler
from torch import Tensor

from wan.tasks.base import SampleNoise


class SdeDpmSolver(DPMSolverMultistepScheduler):
    """Passes noise to diffusers' solver, which would draw it from PyTorch's own generator."""

    sample_noise: SampleNoise

    def step(
        self, model_output: Tensor, timestep: Tensor, sample: Tensor, **options: Any
    ) -> tuple[Tensor]:
        index = self.begin_index if self.step_index is None else self.step_index
        is_last = index == len(self.timesteps) - 1  # which multiplies the noise by 0
        noise = torch.zeros_like(sample) if is_last else self.sample_noise()
        result: tuple[Tensor] = super().step(
            model_output, timestep, sample, variance_noise=noise.to(sample), **options
        )
        return result
