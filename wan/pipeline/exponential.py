"""Second-order exponential integrators (arXiv 2308.02157), which ComfyUI calls res.

Legend: D(s) is the prediction of the clean latents at sigma s, h = log(s / s'). The flow is
dx/dlambda = D - x with lambda = -log s. A step to s' is exact for a D that is linear in lambda; it
takes the line through two predictions: x' = exp(-h) x + h (b1 D + b2 D2).
"""

from __future__ import annotations

from math import exp, expm1, log

from torch import Tensor

from wan.pipeline.scheduler import SigmaSolver


def compute_weights(h: float, c: float) -> tuple[float, float]:
    """Returns h b1 and h b2, where D2 is the prediction at lambda + c h."""
    phi1 = -expm1(-h) / h
    phi2 = (1 - phi1) / h
    return h * (phi1 - phi2 / c), h * phi2 / c


class ExponentialMultistep(SigmaSolver):
    """Takes D2 from the previous step; the first step is Euler's (`res_multistep`)."""

    kept_names = ("_previous",)
    _previous: Tensor | None = None

    def advance(self, x: Tensor, clean: Tensor, sigma: float, next_sigma: float) -> Tensor:
        h, previous = log(sigma / next_sigma), self._previous
        self._previous = clean
        if previous is None:
            return exp(-h) * x - expm1(-h) * clean
        c = log(self._sigmas[self._index - 1] / sigma) / -h
        weight, previous_weight = compute_weights(h, c)
        return exp(-h) * x + weight * clean + previous_weight * previous


class ExponentialMidpoint(SigmaSolver):
    """Computes D2 by a second forward pass, in the middle of a step (`res_2s`)."""

    kept_names = ("_x", "_clean")
    _x: Tensor | None = None
    _clean: Tensor | None = None

    def advance(self, x: Tensor, clean: Tensor, sigma: float, next_sigma: float) -> Tensor:
        h = log(sigma / next_sigma)  # half of that of the step
        if self._x is None or self._clean is None:  # the first forward pass of a step
            self._x, self._clean = x, clean
            return exp(-h) * x - expm1(-h) * clean
        weight, middle_weight = compute_weights(2 * h, 0.5)
        x = exp(-2 * h) * self._x + weight * self._clean + middle_weight * clean
        self._x = self._clean = None
        return x
