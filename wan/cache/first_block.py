"""ParaAttention's First Block Cache, and a fixed list of steps that repeats such a run."""

from __future__ import annotations

from wan.cache.policy import BRANCHES, ComputeChanges, Policy, StepLists
from wan.settings.errors import InputError
from wan.settings.request import VideoParams


class FirstBlock(Policy):
    """Lists no step: the residual of the first block decides in every step."""

    num_first_blocks = 1
    decides_per_step = True

    def compute_steps(
        self, request: VideoParams, compute_changes: ComputeChanges | None
    ) -> StepLists:
        return dict.fromkeys(BRANCHES, (False,) * request.sample_steps)


class ListedSteps(Policy):
    """Computes a given list of steps, such as those computed by a First Block Cache run."""

    num_first_blocks = 1

    def check_request(self, request: VideoParams) -> tuple[str, ...]:
        notices, last = super().check_request(request), max(self.settings.argument)
        if last >= request.sample_steps:
            raise InputError(
                "`step_cache=steps:`",
                why=f"names step {last}, but there are {request.sample_steps} (`sample_steps`)",
                remedy=f"name steps from 0 to {request.sample_steps - 1}",
            )
        return notices

    def compute_steps(
        self, request: VideoParams, compute_changes: ComputeChanges | None
    ) -> StepLists:
        listed = self.settings.argument
        return dict.fromkeys(BRANCHES, tuple(s in listed for s in range(request.sample_steps)))
