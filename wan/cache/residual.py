"""A cache of residuals: a skipped step adds the residual of an earlier step.

Legend: B batch, L this rank's tokens, C channels.

With x_i the residual stream after block i, MagCache and TeaCache cache R = x_N - x_0 and skip all
blocks. ParaAttention's First Block Cache computes the first block, caches R = x_N - x_1, and skips
the other blocks if x_1 - x_0 has changed little since the last step that computed all of them. The
policy `steps` skips the same blocks. Cached tensors have the dtype of the matrix products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from wan.cache.policy import BRANCHES, AllAgree, Cache, ComputeChanges, Policy, StepLists
from wan.settings.attention_modes import Grid
from wan.settings.errors import InputError
from wan.tasks.base import VideoParams

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from wan.kernels.forward_context import StepInfo
    from wan.modules.interfaces import IterateBlocks
    from wan.modules.lockstep import BlockIterator


def decide_locally(sums: Tensor, threshold: float) -> bool:
    """Implements `AllAgree` for one process; it synchronizes with the device once."""
    delta, size = sums.tolist()
    return bool(delta < threshold * size)


class ResidualPolicy(Policy):
    """Base class of the policies that skip blocks."""

    skips = "blocks"

    def make_cache(self, sync_branches: bool = False, all_agree: AllAgree | None = None) -> Cache:
        return ResidualCache(self, sync_branches, all_agree)


class FirstBlock(ResidualPolicy):
    """ParaAttention's First Block Cache: the first block's residual decides in every step."""

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


@dataclass
class _CachedResidual:
    """The cached tensors of one expert, guidance branch and sample.

    Attributes:
        first_change: x_1 - x_0 of the last step that computed all blocks.
        residual: R of that step.
        slope: The change of R per step.
        step: Index of that step.
    """

    expert: str
    grid: Grid
    first_change: Tensor | None = None
    residual: Tensor | None = None
    slope: Tensor | None = None
    step: int = 0


class ResidualCache(Cache):
    """Caches the residual of skippable blocks, and adds it in steps that skip them."""

    def __init__(
        self, policy: Policy, sync_branches: bool = False, all_agree: AllAgree | None = None
    ) -> None:
        super().__init__(policy, sync_branches)
        self._all_agree = all_agree or decide_locally
        self._num_first_blocks = policy.num_first_blocks
        self._parameters, self._decides_per_step = policy.parameters, policy.decides_per_step
        self._entries: dict[tuple[str, int], _CachedResidual] = {}

    def cached_bytes(self) -> int:
        tensors = [
            x
            for entry in self._entries.values()
            for x in (entry.first_change, entry.residual, entry.slope)
        ]
        return sum(x.nbytes for x in tensors if x is not None)

    def clear(self) -> None:
        super().clear()
        self._entries.clear()

    def iterate(
        self,
        x_BLC: Tensor,
        blocks: IterateBlocks,
        step: StepInfo | None,
        num_valid: int,
        dtype: torch.dtype,
    ) -> BlockIterator[Tensor]:
        """Computes the residual stream after all blocks.

        Args:
            x_BLC: The stream before the first block, float32; it is updated in place.
            step: None: everything is computed.
            num_valid: This rank's tokens without padding.
            dtype: Of cached tensors.
        """
        import torch

        if not self.step_lists or step is None or torch.is_grad_enabled():
            return (yield from blocks(x_BLC, 0, None))
        new_entry = _CachedResidual(step.expert, step.grid)
        owner = step.expert, step.grid  # entries of others are freed
        self._entries = {k: e for k, e in self._entries.items() if (e.expert, e.grid) == owner}
        entry = self._entries.setdefault((step.branch, step.sample), new_entry)
        is_reused = entry.residual is not None and not self.step_lists[step.branch][step.index]
        x_before = x_BLC.clone() if self._decides_per_step else None
        if self._num_first_blocks:
            x_BLC = yield from blocks(x_BLC, 0, self._num_first_blocks)
        sums = None
        if x_before is not None:
            first_change = torch.sub(x_BLC, x_before, out=x_before).to(dtype)
            x_before = None
            if is_reused:
                assert entry.first_change is not None
                sums = measure_change(first_change, entry.first_change, num_valid)
                is_reused = self._all_agree(sums, self._parameters["threshold"])
            entry.first_change = entry.first_change if is_reused else first_change

        def distance() -> float | None:  # of all ranks: `AllAgree` sums in place
            changed, size = (0.0, 0.0) if sums is None else sums.tolist()
            return changed / size if size else None

        trace_fields = {"first": self._num_first_blocks, "distance": distance}
        self.record_decision(step.branch, step.index, not is_reused, **trace_fields)
        if is_reused and entry.residual is not None:
            x_BLC.add_(entry.residual)
            if entry.slope is not None:
                x_BLC.add_(entry.slope, alpha=step.index - entry.step)
            return x_BLC
        previous_residual = entry.residual if self._parameters["order"] else None
        entry.residual = None
        x_before = x_BLC.clone()
        x_BLC = yield from blocks(x_BLC, self._num_first_blocks, None)
        entry.residual = torch.sub(x_BLC, x_before, out=x_before).to(dtype)
        if previous_residual is not None:
            entry.slope = entry.residual.sub(previous_residual).div_(step.index - entry.step)
        entry.step = step.index
        return x_BLC


def measure_change(current: Tensor, previous: Tensor, num_valid: int) -> Tensor:
    """Sums |current - previous| and |previous| over tokens without padding: float32 [2]."""
    import torch

    reference = previous[:, :num_valid]
    change = torch.linalg.vector_norm(current[:, :num_valid] - reference, 1, dtype=torch.float32)
    return torch.stack((change, torch.linalg.vector_norm(reference, 1, dtype=torch.float32)))
