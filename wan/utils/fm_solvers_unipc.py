"""The official UniPC solver."""

from __future__ import annotations

from typing import Any

from diffusers import UniPCMultistepScheduler
from torch import Tensor

from wan.utils.fm_solvers import FlowScheduleMixin


class FlowUniPCMultistepScheduler(FlowScheduleMixin, UniPCMultistepScheduler):
    """UniPC of order 2 with the official noise schedule."""

    def step(
        self,
        model_output: Tensor,
        timestep: int | Tensor,
        sample: Tensor,
        return_dict: bool = True,
        generator: object = None,
    ) -> Any:
        """Computes a step as diffusers does; `generator` has no effect: UniPC draws no noise."""
        return super().step(model_output, timestep, sample, return_dict)
