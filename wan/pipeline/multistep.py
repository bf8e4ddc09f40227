"""The official multistep solvers, UniPC (arXiv:2302.04867) and DPM-Solver++ (arXiv:2211.01095).

They take the operations of diffusers' schedulers in their order, so their results are bit-equal on
a CPU; importing diffusers would take longer than a short video on a small machine.

Legend: D is the prediction of the clean latents at sigma s, lambda = log((1 - s) / s), h the
difference of lambda over a step. Coefficients are float32 tensors without axes, on the CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wan.pipeline.scheduler import SigmaSolver


def compute_lambda(sigma: Tensor) -> Tensor:
    """Computes half of the log of the signal-to-noise ratio."""
    return torch.log(1 - sigma) - torch.log(sigma)


class UniPC(SigmaSolver):
    """UniPC of order 2 with B(h) = exp(h) - 1: predicts a step, and corrects it in the next one."""

    kept_names = ("_x", "_clean", "_previous_clean")
    _x: Tensor | None = None
    _clean: Tensor | None = None
    _previous_clean: Tensor | None = None
    _order = 1

    def advance(self, x: Tensor, clean: Tensor, sigma: float, next_sigma: float) -> Tensor:
        if self._clean is not None:
            x = self._correct(clean)
        # The first step has no earlier prediction; the last one, to sigma 0, is not computed here.
        is_second_order = self._clean is not None
        self._order = 1 + is_second_order
        self._previous_clean, self._clean, self._x = self._clean, clean, x
        base, weight, _ = self._predict_first_order(self._index + 1)
        if self._order == 1:
            return base
        difference = self._compute_difference(self._index + 1)
        return base - weight * (0.5 * difference)

    def _correct(self, clean: Tensor) -> Tensor:
        """Repeats the previous step with the prediction at its end."""
        base, weight, h = self._predict_first_order(self._index)
        assert self._clean is not None
        end_difference = clean - self._clean
        if self._order == 1:
            return base - weight * (0.5 * end_difference)
        difference = self._compute_difference(self._index)
        ratio = self._compute_ratio(self._index)
        ratios = torch.stack([ratio, torch.ones(())])
        powers = torch.stack([ratios.pow(0), ratios])
        phi1 = torch.expm1(-h)
        phi2 = phi1 / -h - 1
        phi3 = phi2 / -h - 1 / 2
        weights = torch.linalg.solve(powers, torch.stack([phi2 / phi1, phi3 * 2 / phi1]))
        return base - weight * (weights[0] * difference + weights[1] * end_difference)

    def _predict_first_order(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the latents of a first-order step to a sigma, (1 - s') (exp(-h) - 1), and h."""
        assert self._x is not None and self._clean is not None
        sigma, next_sigma = self._coefficients[index - 1 : index + 1]
        h = compute_lambda(next_sigma) - compute_lambda(sigma)
        weight = (1 - next_sigma) * torch.expm1(-h)
        return next_sigma / sigma * self._x - weight * self._clean, weight, h

    def _compute_ratio(self, index: int) -> Tensor:
        """Computes the previous step's difference of lambda, negative, by that of the step."""
        earlier, sigma, next_sigma = map(compute_lambda, self._coefficients[index - 2 : index + 1])
        return (earlier - sigma) / (next_sigma - sigma)

    def _compute_difference(self, index: int) -> Tensor:
        """Computes the divided difference of the two predictions before a sigma."""
        assert self._previous_clean is not None and self._clean is not None
        return (self._previous_clean - self._clean) / self._compute_ratio(index)


class DpmSolver(SigmaSolver):
    """DPM-Solver++ of order 2 with the midpoint rule."""

    kept_names = ("_previous_clean",)
    _previous_clean: Tensor | None = None

    def advance(self, x: Tensor, clean: Tensor, sigma: float, next_sigma: float) -> Tensor:
        index, previous = self._index, self._previous_clean
        self._previous_clean = clean
        start, end = self._coefficients[index : index + 2]
        h = compute_lambda(end) - compute_lambda(start)
        x_weight, weight = self.compute_weights(start, end, h)
        result = x_weight * x + weight * clean
        if previous is not None:
            previous_h = compute_lambda(start) - compute_lambda(self._coefficients[index - 1])
            slope = (1.0 / (previous_h / h)) * (clean - previous)
            result = result + 0.5 * weight * slope
        return self.add_noise(result, end, h)

    def compute_weights(
        self, sigma: Tensor, next_sigma: Tensor, h: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Computes the weights of the latents and of the clean latents."""
        return next_sigma / sigma, -((1 - next_sigma) * (torch.exp(-h) - 1.0))

    def add_noise(self, x: Tensor, sigma: Tensor, h: Tensor) -> Tensor:
        return x


class SdeDpmSolver(DpmSolver):
    """The stochastic DPM-Solver++ (SDE) of order 2."""

    def compute_weights(
        self, sigma: Tensor, next_sigma: Tensor, h: Tensor
    ) -> tuple[Tensor, Tensor]:
        weight = (1 - next_sigma) * (1 - torch.exp(-2.0 * h))
        return next_sigma / sigma * torch.exp(-h), weight

    def add_noise(self, x: Tensor, sigma: Tensor, h: Tensor) -> Tensor:
        return x + sigma * torch.sqrt(1.0 - torch.exp(-2 * h)) * self.sample_noise(x)
