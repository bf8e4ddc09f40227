"""The denoising loop: official noise schedules, diffusers' solvers, experts and guidance.

Legend: N steps, Z latent channels, f h w latent frames/height/width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from wan.kernels.base import StepInfo
from wan.log import progress
from wan.pipeline.solvers import make_solver
from wan.settings.presets import TRAIN_TIMESTEPS
from wan.settings.request import Request


class Denoiser(Protocol):
    """`WanModel.forward`."""

    def __call__(
        self,
        x: list[Tensor],
        t: Tensor,
        context: list[Tensor],
        seq_len: int,
        y: list[Tensor] | None = None,
        *,
        step: StepInfo | None = None,
    ) -> list[Tensor]: ...


class ExpertSource(Protocol):
    """Hands out networks by name, loading and releasing them as it sees fit.

    prefetch: the network will be asked for after the next step.
    """

    def get(self, name: str) -> Denoiser: ...

    def prefetch(self, name: str) -> None: ...


@dataclass(frozen=True)
class Conditions:
    """What holds during a whole run.

    start [Z,f,h,w]: the initial latents. context, negative_context: [length, text_dim] each.
    y [20,f,h,w]: i2v's channels beside the latents. timesteps(t): what the model is told at t.
    impose(latents): puts back what is given, such as ti2v's first frame.
    """

    start: Tensor
    context: Tensor
    negative_context: Tensor
    y: Tensor | None
    timesteps: Callable[[Tensor], Tensor]
    impose: Callable[[Tensor], Tensor]


def expert_at(timestep: int, boundary: float | None) -> tuple[str, int]:
    """The network for a timestep and the index of its guidance scale."""
    if boundary is None:
        return "dit", 0
    if timestep >= boundary * TRAIN_TIMESTEPS:
        return "high_noise", 1
    return "low_noise", 0


Branches = Callable[[Callable[[str], Tensor]], tuple[Tensor, Tensor]]
"""Gets a function of the branch's name; returns the "cond" and the "uncond" result."""


def both_here(branch: Callable[[str], Tensor]) -> tuple[Tensor, Tensor]:
    """Both guidance branches one after the other, on this device."""
    return branch("cond"), branch("uncond")


def denoise(
    request: Request,
    conditions: Conditions,
    experts: ExpertSource,
    branches: Branches = both_here,
) -> Tensor:
    """Clean latents [Z,f,h,w]; solver steps are taken in float32 on the latents' device.

    branches: where the two guidance branches are computed.
    """
    solver = make_solver(request.sample_solver, request.sample_steps, request.sample_shift)
    latents = conditions.start
    plan = [expert_at(int(timestep), request.boundary) for timestep in solver.timesteps]
    experts.get(plan[0][0])  # before the bar, so that its pace is that of the steps
    with torch.no_grad(), progress(request.sample_steps, "sampling", "step") as bar:
        for index, timestep in enumerate(solver.timesteps):
            name, scale = plan[index]
            upcoming, _ = plan[min(index + 1, len(plan) - 1)]
            if upcoming != name:
                experts.prefetch(upcoming)
            bar.set_postfix_str(name, refresh=False)
            velocity = guided_velocity(
                experts.get(name),
                latents,
                conditions,
                conditions.timesteps(timestep),
                _step(request, index, name),
                request.guide_scale[scale],
                branches,
            )
            latents = solver.step(velocity, timestep, latents, return_dict=False)[0]
            latents = conditions.impose(latents)
            bar.update()
    return latents


def guided_velocity(
    model: Denoiser,
    latents: Tensor,
    conditions: Conditions,
    t: Tensor,
    step: Callable[[str], StepInfo],
    scale: float,
    branches: Branches = both_here,
) -> Tensor:
    """u + scale * (c - u) of the two guidance branches; at scale 1 that is c, and u is skipped."""
    y = None if conditions.y is None else [conditions.y]

    contexts = {"cond": conditions.context, "uncond": conditions.negative_context}

    def branch(name: str) -> Tensor:
        info = step(name)
        return model([latents], t, [contexts[name]], info.valid_len, y, step=info)[0]

    if scale == 1:
        return branch("cond")
    cond, uncond = branches(branch)
    return uncond + scale * (cond - uncond)


def _step(request: Request, index: int, expert: str) -> Callable[[str], StepInfo]:
    f, h, w = request.grid
    return lambda branch: StepInfo(
        index, request.sample_steps, branch, expert, request.grid, f * h * w
    )
