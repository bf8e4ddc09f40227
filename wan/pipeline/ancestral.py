"""The ancestral Euler solver for flows, as in ComfyUI and diffusers' LTX pipelines."""

from __future__ import annotations

from torch import Tensor

from wan.pipeline.scheduler import SigmaSolver


class AncestralEuler(SigmaSolver):
    """Steps below the next sigma, and adds the noise that is then missing (eta 1).

    diffusers' class, LTXEulerAncestralRFScheduler, draws noise from a generator only.
    """

    def advance(self, x: Tensor, clean: Tensor, sigma: float, next_sigma: float) -> Tensor:
        lower_sigma = next_sigma**2 / sigma
        scale = (1 - next_sigma) / (1 - lower_sigma)
        noise_sigma = (next_sigma**2 - (scale * lower_sigma) ** 2) ** 0.5
        ratio = lower_sigma / sigma
        x = ratio * x + (1 - ratio) * clean
        return scale * x + noise_sigma * self.sample_noise(x)
