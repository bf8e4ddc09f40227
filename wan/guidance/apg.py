"""Adaptive projected guidance (arXiv:2410.02416)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wan.guidance.guider import Guider
from wan.tasks.base import VideoParams

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class AdaptiveProjected(Guider):
    """Leaves out the part of the update along the conditional velocity, which oversaturates.

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
