"""The official flow-matching solvers: diffusers' classes with the official sigmas and timesteps.

A run of this package uses `wan.pipeline.scheduler`, which computes the same steps.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from diffusers import DPMSolverMultistepScheduler


class FlowScheduleMixin:
    """Replaces the noise schedule of a scheduler of diffusers by the official one."""

    def __init__(
        self,
        num_train_timesteps: int = 1000,
        solver_order: int = 2,
        prediction_type: str = "flow_prediction",
        shift: float = 1.0,
        use_dynamic_shifting: bool = False,
        **options: Any,
    ) -> None:
        """Takes the official keywords; `options` are further ones of diffusers' class.

        Raises:
            NotImplementedError: `use_dynamic_shifting`; no model of Wan uses it.
        """
        if use_dynamic_shifting:
            raise NotImplementedError("use_dynamic_shifting is not supported; give `shift`.")
        super().__init__(  # type: ignore[call-arg]
            num_train_timesteps=num_train_timesteps,
            solver_order=solver_order,
            prediction_type=prediction_type,
            use_flow_sigmas=True,
            **options,
        )
        self.register_to_config(shift=shift)  # type: ignore[attr-defined]
        largest = np.float32(1) - np.float32(1 / num_train_timesteps)
        self.sigma_max = float(_shift_sigmas(largest, shift))
        self.sigma_min = 0.0

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: str | torch.device | None = None,
        sigmas: Sequence[float] | np.ndarray | None = None,
        mu: float | None = None,
        shift: float | None = None,
    ) -> None:
        """Sets the sigmas and the truncated timesteps of a run.

        Args:
            num_inference_steps: Number of steps, if there are no `sigmas`.
            sigmas: Sigmas before the shift.
            mu: None; for dynamic shifting only.
            shift: None: that of the constructor.
        """
        if mu is not None:
            raise NotImplementedError("mu is for dynamic shifting, which is not supported.")
        if sigmas is None:
            if num_inference_steps is None:
                raise ValueError("Give num_inference_steps or sigmas.")
            sigmas = np.linspace(self.sigma_max, self.sigma_min, num_inference_steps + 1)[:-1]
        config: Any = self.config  # type: ignore[attr-defined]
        levels = _shift_sigmas(np.asarray(sigmas), config.shift if shift is None else shift)
        super().set_timesteps(len(levels), device=device)  # type: ignore[misc]
        timesteps = torch.from_numpy(levels * config.num_train_timesteps)
        self.timesteps = timesteps.to(device=device, dtype=torch.int64)
        self.sigmas = torch.from_numpy(np.append(levels, 0.0).astype(np.float32))
        if len(self.timesteps.unique()) < len(levels):  # diffusers finds steps by their timestep
            self.set_begin_index(0)  # type: ignore[attr-defined]


class FlowDPMSolverMultistepScheduler(FlowScheduleMixin, DPMSolverMultistepScheduler):
    """DPM-Solver++ of order 2 with the official noise schedule."""


def _shift_sigmas(sigmas: Any, shift: float) -> Any:
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def get_sampling_sigmas(sampling_steps: int, shift: float) -> np.ndarray:
    """Returns the shifted sigmas [N] of DPM-Solver++: from 1 on, without the last 0."""
    return _shift_sigmas(np.linspace(1, 0, sampling_steps + 1)[:sampling_steps], shift)


def retrieve_timesteps(
    scheduler: Any,
    num_inference_steps: int | None = None,
    device: str | torch.device | None = None,
    timesteps: Sequence[int] | None = None,
    sigmas: Sequence[float] | np.ndarray | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, int]:
    """Sets a scheduler's timesteps; returns them and their number.

    Args:
        scheduler: One of this module or of diffusers.
        timesteps, sigmas: Used instead of `num_inference_steps`; at most one of them.
        **kwargs: Further arguments of the scheduler's `set_timesteps`.

    Raises:
        ValueError: Both are given, or the scheduler does not take the one that is given.
    """
    custom: dict[str, Any] = {"timesteps": timesteps, "sigmas": sigmas}
    custom = {name: value for name, value in custom.items() if value is not None}
    if len(custom) > 1:
        raise ValueError("Give either timesteps or sigmas, not both.")
    for name in custom.keys() - inspect.signature(scheduler.set_timesteps).parameters.keys():
        raise ValueError(f"{type(scheduler).__name__} takes no {name}; give num_inference_steps.")
    values = custom or {"num_inference_steps": num_inference_steps}
    scheduler.set_timesteps(device=device, **values, **kwargs)
    return scheduler.timesteps, len(scheduler.timesteps)
