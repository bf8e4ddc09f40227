"""CFG-Zero* (arXiv:2503.18886)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wan.guidance.guider import Guider, combine_linearly
from wan.settings.solvers import SOLVERS

if TYPE_CHECKING:
    from torch import Tensor

_MIN_STEPS = 9  # from which on the first step has velocity 0 by default: with few it harms


class CfgZeroStar(Guider):
    """Scales the unconditional velocity by its projection on the conditional one."""

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
