"""The base class of guiders, and classifier-free guidance.

A guider is a class in a module of this package and a row of `wan.settings.guidance.GUIDERS`.

Legend: Z latent channels, f h w latent frames/height/width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from wan.settings.guidance import GUIDERS
from wan.tasks.base import VideoParams

if TYPE_CHECKING:
    import torch
    from torch import Tensor


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


def make_guider(params: VideoParams) -> Guider:
    """Makes the guider of a video or clip."""
    guider: Guider = resolve_name(GUIDERS[params.guider_name].factory)(params)
    return guider


def select_skipped_blocks(params: VideoParams, step: int) -> tuple[int, ...]:
    """Returns the blocks that the unconditional branch skips in a step (skip-layer guidance)."""
    start, stop = (share * params.num_forwards for share in params.slg_range)
    return params.skipped_blocks if start <= step < stop else ()
