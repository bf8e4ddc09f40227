"""Noise tables of `--sigmas`: the sigmas of the steps before the shift. Pure Python.

Each is ComfyUI's scheduler of the same name, which selects among the 1000 levels of training.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from math import exp, lgamma, log, log1p

from wan.settings.presets import TRAIN_TIMESTEPS


def _list_simple_levels(steps: int) -> tuple[int, ...]:
    spacing = TRAIN_TIMESTEPS / steps
    return tuple(TRAIN_TIMESTEPS - int(i * spacing) for i in range(steps))


@cache
def _list_beta_levels(a: float, b: float, steps: int) -> tuple[int, ...]:
    """Lists quantiles of Beta(a, b); equal neighbors count once, so there may be fewer steps."""
    shares = (1 - i / steps for i in range(steps))
    positions = (compute_beta_quantile(a, b, p) * (TRAIN_TIMESTEPS - 1) for p in shares)
    # The inner rounding removes the error of the quantile, which could decide at N + 0.5.
    return tuple(dict.fromkeys(round(round(position, 6)) + 1 for position in positions))


NOISE_TABLES: dict[str, Callable[[int], tuple[int, ...]]] = {
    "simple": _list_simple_levels,
    "beta": partial(_list_beta_levels, 0.6, 0.6),
    "beta57": partial(_list_beta_levels, 0.5, 0.7),
}
"""Name -> a function of the number of steps that returns falling timesteps, from 1000 on."""
OFFICIAL_TABLE = "official"


def compute_beta_quantile(a: float, b: float, probability: float) -> float:
    """Computes the quantile of the beta distribution by bisection."""
    low, high = 0.0, 1.0
    if probability in (low, high):
        return probability
    while low < (middle := (low + high) / 2) < high:
        if compute_beta_distribution(a, b, middle) < probability:
            low = middle
        else:
            high = middle
    return middle


def compute_beta_distribution(a: float, b: float, x: float) -> float:
    """Computes P(X <= x) of Beta(a, b), 0 < x < 1, by its continued fraction (Lentz's method)."""
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly
        return 1 - compute_beta_distribution(b, a, 1 - x)
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    fraction = d
    for m in range(1, 200):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            c, d = 1 + term / c, 1 / (1 + term * d)
            fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    log_beta = lgamma(a) + lgamma(b) - lgamma(a + b)
    return exp(a * log(x) + b * log1p(-x) - log_beta) * fraction / a
