"""Solvers, which step latents from one sigma of the noise schedule to the next.

Legend: N steps. With v the network's velocity at sigma s and s' the next sigma, an ODE step is
x + (s' - s) v (Euler). The other solvers take the prediction of the clean latents, D = x - s v. A
stochastic step mixes it with new noise, (1 - s') D + s' noise, as the distillations DMD, rCM and
LCM do.

UniPC (arXiv:2302.04867) and DPM-Solver++ (arXiv:2211.01095) take the operations of diffusers'
schedulers in their order, so their results are bit-equal on a CPU; importing diffusers would take
longer than a short video on a small machine. There lambda = log((1 - s) / s), and h is the
difference of lambda over a step.

The exponential integrators (arXiv:2308.02157), which ComfyUI calls res, have lambda = -log s,
dx/dlambda = D - x and h = log(s / s'). A step is exact for a D that is linear in lambda; it takes
the line through two predictions: x' = exp(-h) x + h (b1 D + b2 D2).
"""

from __future__ import annotations

from math import exp, expm1, log
from pkgutil import resolve_name
from typing import ClassVar

import torch
from torch import Tensor

from wan.settings.noise_schedule import NoiseSchedule
from wan.settings.solvers import SOLVERS
from wan.tasks.base import SampleNoise, VideoParams


class Stepper:
    """Base class of the solvers.

    Args:
        sigmas: The sigmas of a `NoiseSchedule`.
        sample_noise: Samples new noise; only needed by stochastic solvers.
    """

    kept_names: ClassVar[tuple[str, ...]] = ()  # attributes that keep latents, or None

    def __init__(self, sigmas: tuple[float, ...], sample_noise: SampleNoise | None = None) -> None:
        self._sigmas, self._sample_noise, self._index = sigmas, sample_noise, 0
        # Float32 tensors without axes, on the CPU.
        self._coefficients = torch.tensor(sigmas, dtype=torch.float32)

    def to(self, device: torch.device) -> None:
        """Moves the latents that are kept between steps."""
        for name in self.kept_names:
            latents = getattr(self, name)
            setattr(self, name, None if latents is None else latents.to(device))

    def step(self, x: Tensor, velocity: Tensor) -> Tensor:
        """Returns the latents at the next sigma; those at sigma 0 are the predicted clean ones.

        Args:
            x: The latents at the sigma of this step.
            velocity: The velocity that the network predicts from them.
        """
        sigma, next_sigma = self._sigmas[self._index : self._index + 2]
        clean = x - sigma * velocity
        next_latents = self.advance(x, clean, sigma, next_sigma) if next_sigma else clean
        self._index += 1
        return next_latents

    def advance(self, x: Tensor, clean: Tensor, sigma: float, next_sigma: float) -> Tensor:
        """Returns the latents at `next_sigma`, above 0, from those at `sigma`.

        Args:
            x: The latents at `sigma`.
            clean: The clean latents that the network predicts from them.
        """
        raise NotImplementedError

    def sample_noise(self, x: Tensor) -> Tensor:
        """Samples noise for latents x."""
        assert self._sample_noise is not None
        return self._sample_noise().to(x)


class Euler(Stepper):
    """Takes first-order steps."""

    def step(self, x: Tensor, velocity: Tensor) -> Tensor:
        """Returns the latents at the next sigma, computed from the velocity itself."""
        difference = self._coefficients[self._index + 1] - self._coefficients[self._index]
        self._index += 1
        return x + difference * velocity


class Renoise(Stepper):
    """Takes stochastic steps in float64 on the CPU; they are few, and NPUs have no float64."""

    def step(self, x: Tensor, velocity: Tensor) -> Tensor:
        """Returns the latents at the next sigma, in the dtype and on the device of `x`."""
        x64, velocity64 = (tensor.to("cpu", torch.float64) for tensor in (x, velocity))
        return super().step(x64, velocity64).to(x)

    def advance(self, x: Tensor, clean: Tensor, sigma: float, next_sigma: float) -> Tensor:
        return (1 - next_sigma) * clean + next_sigma * self.sample_noise(clean)


class AncestralEuler(Stepper):
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


def _compute_lambda(sigma: Tensor) -> Tensor:
    """Computes half of the log of the signal-to-noise ratio."""
    return torch.log(1 - sigma) - torch.log(sigma)


class UniPC(Stepper):
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
        h = _compute_lambda(next_sigma) - _compute_lambda(sigma)
        weight = (1 - next_sigma) * torch.expm1(-h)
        return next_sigma / sigma * self._x - weight * self._clean, weight, h

    def _compute_ratio(self, index: int) -> Tensor:
        """Computes the previous step's difference of lambda, negative, by that of the step."""
        earlier, sigma, next_sigma = map(_compute_lambda, self._coefficients[index - 2 : index + 1])
        return (earlier - sigma) / (next_sigma - sigma)

    def _compute_difference(self, index: int) -> Tensor:
        """Computes the divided difference of the two predictions before a sigma."""
        assert self._previous_clean is not None and self._clean is not None
        return (self._previous_clean - self._clean) / self._compute_ratio(index)


class DpmSolver(Stepper):
    """DPM-Solver++ of order 2 with the midpoint rule."""

    kept_names = ("_previous_clean",)
    _previous_clean: Tensor | None = None

    def advance(self, x: Tensor, clean: Tensor, sigma: float, next_sigma: float) -> Tensor:
        index, previous = self._index, self._previous_clean
        self._previous_clean = clean
        start, end = self._coefficients[index : index + 2]
        h = _compute_lambda(end) - _compute_lambda(start)
        x_weight, weight = self.compute_weights(start, end, h)
        result = x_weight * x + weight * clean
        if previous is not None:
            previous_h = _compute_lambda(start) - _compute_lambda(self._coefficients[index - 1])
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


def _weigh_predictions(h: float, c: float) -> tuple[float, float]:
    """Returns h b1 and h b2, where D2 is the prediction at lambda + c h."""
    phi1 = -expm1(-h) / h
    phi2 = (1 - phi1) / h
    return h * (phi1 - phi2 / c), h * phi2 / c


class ExponentialMultistep(Stepper):
    """Takes D2 from the previous step; the first step is Euler's (`res_multistep`)."""

    kept_names = ("_previous",)
    _previous: Tensor | None = None

    def advance(self, x: Tensor, clean: Tensor, sigma: float, next_sigma: float) -> Tensor:
        h, previous = log(sigma / next_sigma), self._previous
        self._previous = clean
        if previous is None:
            return exp(-h) * x - expm1(-h) * clean
        c = log(self._sigmas[self._index - 1] / sigma) / -h
        weight, previous_weight = _weigh_predictions(h, c)
        return exp(-h) * x + weight * clean + previous_weight * previous


class ExponentialMidpoint(Stepper):
    """Computes D2 by a second forward pass, in the middle of a step (`res_2s`)."""

    kept_names = ("_x", "_clean")
    _x: Tensor | None = None
    _clean: Tensor | None = None

    def advance(self, x: Tensor, clean: Tensor, sigma: float, next_sigma: float) -> Tensor:
        h = log(sigma / next_sigma)  # half of that of the step
        if self._x is None or self._clean is None:  # the first forward pass of a step
            self._x, self._clean = x, clean
            return exp(-h) * x - expm1(-h) * clean
        weight, middle_weight = _weigh_predictions(2 * h, 0.5)
        x = exp(-2 * h) * self._x + weight * self._clean + middle_weight * clean
        self._x = self._clean = None
        return x


def make_solver(
    params: VideoParams, schedule: NoiseSchedule, sample_noise: SampleNoise | None = None
) -> tuple[Stepper, Tensor]:
    """Makes the solver of a video.

    Args:
        schedule: The noise schedule of the video.
        sample_noise: Only needed by the stochastic solvers.

    Returns:
        The solver, and the timesteps [N] of the model: int64 with the official solvers, float32
        with the others.
    """
    spec = SOLVERS["euler" if params.ode else params.sample_solver]
    dtype = torch.int64 if spec.truncates_timesteps else torch.float32
    solver: Stepper = resolve_name(spec.factory)(schedule.sigmas, sample_noise)
    return solver, torch.tensor(schedule.timesteps, dtype=dtype)
