"""A cache of residuals: a skipped step adds the residual of an earlier step.

Legend: B batch, L this rank's tokens, C channels.

With x_i the residual stream after block i, MagCache and TeaCache cache R = x_N - x_0 and skip all
blocks. ParaAttention's First Block Cache computes the first block, caches R = x_N - x_1, and skips
the other blocks if x_1 - x_0 has changed little since the last step that computed all of them. The
policy `steps` skips the same blocks. Cached tensors have the dtype of the matrix products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from wan.cache.policy import Cache, Policy
from wan.kernels.base import StepInfo
from wan.modules.interfaces import RunBlocks
from wan.settings.schedule import Grid

Agree = Callable[[Tensor, float], bool]
"""all_agree(sums, threshold): whether sums[0] < threshold * sums[1], summed in float32 over all
ranks that share a video; all of them get the same result."""


def alone(sums: Tensor, threshold: float) -> bool:
    """Implements `AllAgree` for one process; it synchronizes with the device once."""
    change, size = sums.tolist()
    return bool(change < threshold * size)


@dataclass
class _Kept:
    """The cached tensors of one expert, guidance branch and sample.

    Attributes:
        first_change: x_1 - x_0 of the last step that computed all blocks.
        residual: R of that step.
        slope: The change of R per step.
        step: Index of that step.
    """

    expert: str
    grid: Grid
    first: Tensor | None = None
    residual: Tensor | None = None
    slope: Tensor | None = None
    step: int = 0


class ResidualCache(Cache):
    """Caches the residual of skippable blocks, and adds it in steps that skip them."""

    def __init__(self, policy: Policy, together: bool = False, agree: Agree | None = None) -> None:
        super().__init__(policy, together)
        self._agree, self._first = agree or alone, policy.first
        self._order = policy.settings.step_cache_order
        self._threshold = policy.settings.threshold if policy.decides else None
        self._kept: dict[tuple[str, int], _Kept] = {}

    def kept_bytes(self) -> int:
        found = [x for kept in self._kept.values() for x in (kept.first, kept.residual, kept.slope)]
        return sum(x.nbytes for x in found if x is not None)

    def end(self) -> None:
        super().end()
        self._kept.clear()

    def __call__(
        self,
        x_BLC: Tensor,
        blocks: RunBlocks,
        step: StepInfo | None,
        valid: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """Returns the residual stream after all blocks.

        Args:
            x_BLC: The stream before the first block, float32; it is updated in place.
            step: None: everything is computed.
            num_valid: This rank's tokens without padding.
            dtype: Of cached tensors.
        """
        if not self.listed or step is None or torch.is_grad_enabled():
            return blocks(x_BLC, 0, None)
        for key, one in list(self._kept.items()):  # frees those of other experts and grids
            if (one.expert, one.grid) != (step.expert, step.grid):
                del self._kept[key]
        kept = self._kept.setdefault((step.branch, step.sample), _Kept(step.expert, step.grid))
        reuses = kept.residual is not None and not self.listed[step.branch][step.index]
        before = None if self._threshold is None else x_BLC.clone()
        if self._first:
            x_BLC = blocks(x_BLC, 0, self._first)
        sums = None
        if self._threshold is not None and before is not None:
            first = torch.sub(x_BLC, before, out=before).to(dtype)
            before = None
            if reuses:
                assert kept.first is not None
                sums = change(first, kept.first, valid)
                reuses = self._agree(sums, self._threshold)
            kept.first = kept.first if reuses else first

        def distance() -> float | None:  # of all ranks: `AllAgree` sums in place
            changed, size = (0.0, 0.0) if sums is None else sums.tolist()
            return changed / size if size else None

        facts = {"first": self._first, "distance": distance}
        self.note(step.branch, step.index, not reuses, **facts)
        if reuses and kept.residual is not None:
            x_BLC.add_(kept.residual)
            if kept.slope is not None:
                x_BLC.add_(kept.slope, alpha=step.index - kept.step)
            return x_BLC
        last = kept.residual if self._order else None
        kept.residual = None
        before = x_BLC.clone()
        x_BLC = blocks(x_BLC, self._first, None)
        kept.residual = torch.sub(x_BLC, before, out=before).to(dtype)
        if last is not None:
            kept.slope = kept.residual.sub(last).div_(step.index - kept.step)
        kept.step = step.index
        return x_BLC


def change(first: Tensor, kept: Tensor, valid: int) -> Tensor:
    """Sums |current - previous| and |previous| over tokens without padding: float32 [2]."""
    was = kept[:, :valid]
    change = torch.linalg.vector_norm(first[:, :valid] - was, 1, dtype=torch.float32)
    return torch.stack((change, torch.linalg.vector_norm(was, 1, dtype=torch.float32)))
