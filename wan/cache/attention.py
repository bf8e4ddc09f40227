"""Self-attention's outputs of an earlier step, as MindIE-SD's attention cache reuses them.

Legend: B batch, L this rank's tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from wan import trace
from wan.cache.lists import Computed
from wan.kernels.base import StepInfo


class AttentionCache:
    """Implements `wan.modules.interfaces.AttentionCache`.

    Attributes computed, skipped: branch -> steps of this run in which attention was computed, and
    those in which it was not.
    """

    def __init__(self) -> None:
        self._lists: dict[str, Computed] = {}
        self._kept: dict[tuple[str, int, int], Tensor] = {}
        self.computed: dict[str, list[int]] = {}
        self.skipped: dict[str, list[int]] = {}

    def begin(self, lists: dict[str, Computed]) -> None:
        """A run begins. lists: branch -> whether attention is computed in each step."""
        self.clear()
        self._lists, self.computed, self.skipped = lists, {}, {}

    def clear(self) -> None:
        """Frees what is kept; until a run begins, everything is computed."""
        self._lists = {}
        self._kept.clear()

    def __call__(self, attend: Callable[[], Tensor], step: StepInfo | None, layer: int) -> Tensor:
        """What attend() returns, [B,L,C], or what it returned in an earlier step."""
        if step is None or not self._lists or torch.is_grad_enabled():
            return attend()
        key, row = (step.branch, step.sample, layer), self._lists[step.branch]
        steps = (self.computed if row[step.index] else self.skipped).setdefault(step.branch, [])
        if step.index not in steps:  # the first of the layers
            steps.append(step.index)
        decision = "computed" if row[step.index] else "skipped"
        trace.mark("cache", what="attention", decision=decision)
        if not row[step.index]:
            return self._kept[key]
        self._kept.pop(key, None)
        found = attend()
        if step.index + 1 < len(row) and not row[step.index + 1]:
            self._kept[key] = found
        return found
