"""The unconditional branch, rebuilt from the conditional one (FasterCache's CFG cache).

Legend: Z latent channels, f h w latent frames/height/width.

The two branches differ by little that changes slowly: of the last step that computed both, the
difference of their spectra is kept, and added to the conditional spectrum of a step that computes
one. High frequencies count a little more, as late in a run they do.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from wan import trace
from wan.cache.lists import Computed

_LOW, _HIGH = 1.0, 1.2
Branches = Callable[[Callable[[str], Tensor]], tuple[Tensor, Tensor]]


class GuidanceCache:
    """Attributes computed, skipped: branch -> steps of this run that were computed, or not."""

    def __init__(self) -> None:
        self._listed: Computed = ()
        self._difference: Tensor | None = None
        self.computed: dict[str, list[int]] = {}
        self.skipped: dict[str, list[int]] = {}

    def begin(self, computed: Computed) -> None:
        """A run begins. computed: whether the unconditional branch is, in each step."""
        self._listed, self._difference = computed, None
        self.computed, self.skipped = {}, {}

    def at(self, step: int, branches: Branches) -> Branches:
        """Where the two branches of a step come from."""

        def both(branch: Callable[[str], Tensor]) -> tuple[Tensor, Tensor]:
            self.computed.setdefault("cond", []).append(step)
            uncond_steps = self.computed if self._listed[step] else self.skipped
            uncond_steps.setdefault("uncond", []).append(step)
            decision = "computed" if self._listed[step] else "skipped"
            trace.mark("cache", what="uncond", decision=decision)
            if not self._listed[step]:
                cond = branch("cond")
                return cond, self._rebuilt(cond)
            cond, uncond = branches(branch)
            self._difference = torch.fft.rfft2(uncond - cond) * _weights(cond)
            return cond, uncond

        return both

    def _rebuilt(self, cond_Zfhw: Tensor) -> Tensor:
        assert self._difference is not None
        return cond_Zfhw + torch.fft.irfft2(self._difference, s=cond_Zfhw.shape[-2:])


def _weights(x_Zfhw: Tensor) -> Tensor:
    """Of the frequencies along h and w: low ones, below a quarter of the rate, and high ones."""
    h, w = x_Zfhw.shape[-2:]
    along_h = torch.fft.fftfreq(h, device=x_Zfhw.device).abs()[:, None]
    along_w = torch.fft.rfftfreq(w, device=x_Zfhw.device).abs()[None]
    low = (along_h < 0.25) & (along_w < 0.25)
    return torch.where(low, _LOW, _HIGH)
