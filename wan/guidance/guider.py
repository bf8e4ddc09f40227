"""The guiders: classes that are rows of `wan.settings.guidance.GUIDERS`.

Legend: Z latent channels, f h w latent frames/height/width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from wan.settings.guidance import GUIDERS
from wan.settings.solvers import SOLVERS
from wan.tasks.base import VideoParams

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_MIN_STEPS = 9  # from which on the first step has velocity 0 by default: with few it harms


class Guider(ABC):
    """Combines the velocities of both guidance branches in the steps of one video or clip."""

    def __init__(self, params: VideoParams) -> None:
        self.params = params

    @property
    def num_zero_steps(self) -> int:
        """Number of first forward passes that are left out, as their velocity is 0."""
        return 0

    def to(self, device: torch.device) -> None:  # noqa: B027
        """Moves the tensors that are kept between steps; the base class keeps none."""

    @abstractmethod
    def combine(self, cond_Zfhw: Tensor, uncond_Zfhw: Tensor, scale: float) -> Tensor:
        """Returns the velocity of a step from those of both branches, float32."""


class ClassifierFree(Guider):
    """Classifier-free guidance: uncond + scale (cond - uncond)."""

    def combine(self, cond_Zfhw: Tensor, uncond_Zfhw: Tensor, scale: float) -> Tensor:
        return combine_linearly(cond_Zfhw, uncond_Zfhw, scale)


def combine_linearly(cond_Zfhw: Tensor, uncond_Zfhw: Tensor, scale: float) -> Tensor:
    """Returns uncond + scale (cond - uncond)."""
    return uncond_Zfhw + scale * (cond_Zfhw - uncond_Zfhw)


class CfgZeroStar(Guider):
    """CFG-Zero* (arXiv:2503.18886).

    Scales the unconditional velocity by its projection on the conditional one.
    """

    @property
    def num_zero_steps(self) -> int:
        params = self.params
        num_steps = params.guider_parameters["zero_init_steps"]
        if num_steps is None:
            num_steps = int(params.sample_steps >= _MIN_STEPS)
        return num_steps * SOLVERS[params.sample_solver].forwards_per_step

    def combine(self, cond_Zfhw: Tensor, uncond_Zfhw: Tensor, scale: float) -> Tensor:
        ratio = (cond_Zfhw * uncond_Zfhw).sum() / ((uncond_Zfhw**2).sum() + 1e-8)
        return combine_linearly(cond_Zfhw, ratio * uncond_Zfhw, scale)


class AdaptiveProjected(Guider):
    """Adaptive projected guidance (arXiv:2410.02416).

    Leaves out the part of the update along the conditional velocity, which oversaturates.

    The limit of the update is per element, so that it does not depend on the size of the video.
    """

    def __init__(self, params: VideoParams) -> None:
        super().__init__(params)
        parameters = params.guider_parameters
        self._eta, self._momentum = parameters["eta"], parameters["momentum"]
        self._threshold = parameters["threshold"]
        self._update: Tensor | None = None

    def to(self, device: torch.device) -> None:
        if self._update is not None:
            self._update = self._update.to(device)

    def combine(self, cond_Zfhw: Tensor, uncond_Zfhw: Tensor, scale: float) -> Tensor:
        import torch

        update = cond_Zfhw - uncond_Zfhw
        if self._update is not None:
            update = update + self._momentum * self._update
        self._update = update if self._momentum else None
        if self._threshold:
            update = update * (self._threshold / update.pow(2).mean().sqrt()).clamp(max=1)
        # NPUs have no float64; on other devices the sums are exact enough in float64 only.
        device = torch.device("cpu") if update.device.type == "npu" else update.device
        update64, direction = (x.to(device, torch.float64) for x in (update, cond_Zfhw))
        direction = direction / direction.norm().clamp_min(1e-12)
        parallel = (update64 * direction).sum() * direction
        projected = update64 + (self._eta - 1) * parallel
        return uncond_Zfhw + scale * projected.to(update)


def make_guider(params: VideoParams) -> Guider:
    """Makes the guider of a video or clip."""
    guider: Guider = resolve_name(GUIDERS[params.guider_name].factory)(params)
    return guider


def select_skipped_blocks(params: VideoParams, step: int) -> tuple[int, ...]:
    """Returns the blocks that the unconditional branch skips in a step (skip-layer guidance)."""
    start, stop = (share * params.num_forwards for share in params.slg_range)
    return params.skipped_blocks if start <= step < stop else ()
