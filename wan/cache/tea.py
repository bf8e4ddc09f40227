"""TeaCache: skips steps while the time embedding has changed little."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

from wan.cache.policy import (
    BRANCHES,
    ComputeChanges,
    StepLists,
    StepMask,
    split_by_expert,
)
from wan.cache.residual import ResidualPolicy
from wan.settings.errors import InputError
from wan.settings.noise_schedule import make_noise_schedule
from wan.settings.presets import Preset
from wan.settings.step_cache import StepCache
from wan.tasks.base import VideoParams

if TYPE_CHECKING:
    from torch import Tensor

# Task -> the published polynomial in the change of the time embedding, highest power first.
PUBLISHED_COEFFICIENTS = {
    "t2v-14B": (-5784.54975374, 5449.50911966, -1811.16591783, 256.27178429, -13.02252404),
    "t2v-1.3B": (2396.76752, -1311.10545, 201.331979, -8.29855975, 0.137887774),
    "ti2v-5B": (157472.669, -115702.395, 31076.1669, -3831.16651, 221.608777, -4.81179567),
}


class Tea(ResidualPolicy):
    """Estimates the change of the output by a polynomial in the change of the embedding."""

    def __init__(self, settings: StepCache, preset: Preset, folder: Path | None = None) -> None:
        super().__init__(settings, preset, folder)
        coefficients = self.parameters["coefficients"]
        if coefficients is None and preset.task not in PUBLISHED_COEFFICIENTS:
            raise InputError(
                "`step_cache`",
                "tea",
                f"has no published coefficients for {preset.task} (there are for "
                f"{', '.join(PUBLISHED_COEFFICIENTS)})",
                "give `step_cache=tea:coefficients=...`, or use `step_cache=mag`",
            )
        self._polynomial = coefficients or PUBLISHED_COEFFICIENTS[preset.task]

    def select_steps(
        self, params: VideoParams, compute_changes: ComputeChanges | None
    ) -> StepLists | None:
        if compute_changes is None:
            return None
        noise_schedule, embedding_diffs = make_noise_schedule(params), list[float]()
        for expert, first, end in split_by_expert(noise_schedule.experts):
            embedding_diffs += compute_changes(expert, noise_schedule.timesteps[first:end])
        return dict.fromkeys(BRANCHES, self.apply_rule(embedding_diffs))

    def apply_rule(self, changes: Sequence[float]) -> StepMask:
        """Skips a step while the sum of the estimates is below the threshold.

        Args:
            changes: For each step, mean |e - e_prev| / mean |e_prev| of the time embedding; the
                first one counts as computed.
        """
        computed, total = [True], 0.0
        for change in changes[1:]:
            total += reduce(lambda value, c: value * change + c, self._polynomial, 0.0)
            computed.append(total >= self.parameters["threshold"])
            total = 0.0 if computed[-1] else total
        computed[-1] = True
        return tuple(computed)


def compute_embedding_changes(
    weights: Mapping[str, Tensor], timesteps: Sequence[float]
) -> list[float]:
    """Computes mean |e - e_prev| / mean |e_prev| of each timestep's embedding e, 0 for the first.

    Args:
        weights: The two layers of the network's `time_embedding`, float32, under their names.
        timesteps: The model's timestep in each step.
    """
    import torch
    import torch.nn.functional as F

    from wan.modules.model import sinusoidal_embedding_1d

    in_weight, in_bias, out_weight, out_bias = (
        weights[f"time_embedding.{layer}.{name}"] for layer in (0, 2) for name in ("weight", "bias")
    )
    features = sinusoidal_embedding_1d(in_weight.shape[1], torch.tensor(timesteps)).float()
    hidden = F.silu(F.linear(features, in_weight, in_bias))
    e = F.linear(hidden, out_weight, out_bias)
    size = e.abs().mean(-1)[:-1]
    return [0.0, *((e[1:] - e[:-1]).abs().mean(-1) / size).tolist()]
