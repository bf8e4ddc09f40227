"""ParaAttention's First Block Cache, and a fixed list of steps that repeats such a run."""

from __future__ import annotations

from wan.cache.policy import BRANCHES, ComputeChanges, StepLists
from wan.cache.residual import ResidualPolicy
from wan.settings.errors import InputError
from wan.tasks.base import VideoParams


class FirstBlock(ResidualPolicy):
    """Lists no step: the residual of the first block decides in every step."""

    num_first_blocks = 1
    decides_per_step = True

    def select_steps(
        self, params: VideoParams, compute_changes: ComputeChanges | None
    ) -> StepLists:
        return dict.fromkeys(BRANCHES, (False,) * params.num_forwards)


class ListedSteps(ResidualPolicy):
    """Computes a given list of steps, such as those computed by a First Block Cache run."""

    num_first_blocks = 1

    def check_params(self, params: VideoParams) -> tuple[str, ...]:
        notices, last = super().check_params(params), max(self.parameters["list"])
        if last >= params.num_forwards:
            raise InputError(
                "`step_cache=steps:`",
                why=f"names step {last}, but there are {params.num_forwards} (from `sample_steps`)",
                remedy=f"name steps from 0 to {params.num_forwards - 1}, or give more "
                "`sample_steps`",
            )
        return notices

    def select_steps(
        self, params: VideoParams, compute_changes: ComputeChanges | None
    ) -> StepLists:
        listed = self.parameters["list"]
        return dict.fromkeys(BRANCHES, tuple(s in listed for s in range(params.num_forwards)))
