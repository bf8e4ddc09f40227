"""MindIE-SD's attention cache: reuses the self-attention outputs of an earlier step.

Legend: B batch, L this rank's tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from wan.cache.policy import BRANCHES, Cache, Changes, Lists, Policy
from wan.settings.errors import InputError
from wan.settings.presets import TRAIN_TIMESTEPS
from wan.settings.request import Request

if TYPE_CHECKING:
    from torch import Tensor

    from wan.cache.residual import Agree
    from wan.kernels.base import StepInfo


class AttentionPolicy(Policy):
    """Computes self-attention up to start_step, after end_step, and at intervals in between."""

    skips = "attention"

    def check(self, request: Request) -> tuple[str, ...]:
        found, start, end = super().check(request), self.settings.start_step, self._end(request)
        if start >= end:
            raise InputError(
                "`start_step`",
                start,
                f"is not before `end_step={end}` of {request.sample_steps} steps, so no attention "
                "is kept",
                "choose others",
            )
        return found

    def own(self, request: Request, changes: Changes | None) -> Lists:
        start, end = self.settings.start_step, self._end(request)
        interval = self.settings.attentioncache_interval
        row = tuple(
            not start < step <= end or (step - start) % interval == 0
            for step in range(request.sample_steps)
        )
        return dict.fromkeys(BRANCHES, row)

    def _end(self, request: Request) -> int:
        """Returns the last step that may be skipped, by default 37 of the usual 40."""
        given, steps = self.settings.end_step, request.sample_steps
        return steps - 3 if given is None else min(given, steps - 1)

    def cache(self, together: bool = False, agree: Agree | None = None) -> Cache:
        return AttentionCache(self, together)


class AttentionCache(Cache):
    """Caches the self-attention output of each layer, guidance branch and sample."""

    rehearsed = (True, *(False,) * TRAIN_TIMESTEPS)

    def __init__(self, policy: Policy, together: bool = False) -> None:
        super().__init__(policy, together)
        self._kept: dict[tuple[str, int, int], Tensor] = {}

    def end(self) -> None:
        super().end()
        self._kept.clear()

    def __call__(self, attend: Callable[[], Tensor], step: StepInfo | None, layer: int) -> Tensor:
        """Returns attend(), [B,L,C], or its result of an earlier step."""
        import torch

        if step is None or not self.listed or torch.is_grad_enabled():
            return attend()
        key, row = (step.branch, step.sample, layer), self.listed[step.branch]
        self.note(step.branch, step.index, row[step.index])
        if not row[step.index]:
            return self._kept[key]
        self._kept.pop(key, None)
        found = attend()
        if step.index + 1 < len(row) and not row[step.index + 1]:
            self._kept[key] = found
        return found
