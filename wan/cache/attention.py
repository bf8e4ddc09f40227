"""MindIE-SD's attention cache: reuses the self-attention outputs of an earlier step.

Legend: B batch, L this rank's tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from wan.cache.policy import BRANCHES, AllAgree, Cache, ComputeChanges, Policy, StepLists
from wan.settings.errors import InputError
from wan.settings.presets import TRAIN_TIMESTEPS
from wan.tasks.base import VideoParams

if TYPE_CHECKING:
    from torch import Tensor

    from wan.kernels.forward_context import StepInfo


class AttentionPolicy(Policy):
    """Computes self-attention up to start_step, after end_step, and at intervals in between."""

    skips = "attention"

    def check_params(self, params: VideoParams) -> tuple[str, ...]:
        notices, start = super().check_params(params), self.settings.start_step
        end = self._last_skippable_step(params)
        if start >= end:
            raise InputError(
                "`start_step`",
                start,
                f"is not before `end_step={end}` of {params.num_forwards} steps, so no attention "
                "is kept",
                "choose others, or give more `sample_steps`",
            )
        return notices

    def select_steps(
        self, params: VideoParams, compute_changes: ComputeChanges | None
    ) -> StepLists:
        start, end = self.settings.start_step, self._last_skippable_step(params)
        interval = self.settings.attentioncache_interval
        computed = tuple(
            not start < step <= end or (step - start) % interval == 0
            for step in range(params.num_forwards)
        )
        return dict.fromkeys(BRANCHES, computed)

    def _last_skippable_step(self, params: VideoParams) -> int:
        """Returns the last step that may be skipped, by default 37 of the usual 40."""
        end_step, num_steps = self.settings.end_step, params.num_forwards
        return num_steps - 3 if end_step is None else min(end_step, num_steps - 1)

    def make_cache(self, sync_branches: bool = False, all_agree: AllAgree | None = None) -> Cache:
        return AttentionCache(self, sync_branches)


class AttentionCache(Cache):
    """Caches the self-attention output of each layer, guidance branch and sample."""

    memory_plan_steps = (True, *(False,) * TRAIN_TIMESTEPS)

    def __init__(self, policy: Policy, sync_branches: bool = False) -> None:
        super().__init__(policy, sync_branches)
        self._outputs: dict[tuple[str, int, int], Tensor] = {}

    def clear(self) -> None:
        super().clear()
        self._outputs.clear()

    def __call__(self, attend: Callable[[], Tensor], step: StepInfo | None, layer: int) -> Tensor:
        """Returns attend(), [B,L,C], or its result of an earlier step."""
        import torch

        if step is None or not self.step_lists or torch.is_grad_enabled():
            return attend()
        key, computed = (step.branch, step.sample, layer), self.step_lists[step.branch]
        self.record_decision(step.branch, step.index, computed[step.index])
        if not computed[step.index]:
            return self._outputs[key]
        self._outputs.pop(key, None)
        out_BLC = attend()
        if step.index + 1 < len(computed) and not computed[step.index + 1]:
            self._outputs[key] = out_BLC
        return out_BLC
