"""The cache of a forward's residual: a step that is skipped adds what an earlier one added.

Legend: B batch, L this rank's tokens, C channels.

With x_i the residual stream behind block i, MagCache and TeaCache keep R = x_N - x_0 and skip all
blocks; First Block Cache (ParaAttention's) computes the first block, keeps R = x_N - x_1, and skips
the rest where x_1 - x_0 has changed little since the last step that computed all. A list of steps
does as First Block Cache, and so repeats its runs. Kept tensors are in the dtype of the matrix
products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from wan import trace
from wan.cache.lists import Plan
from wan.kernels.base import Grid, StepInfo

Blocks = Callable[[Tensor, int, int | None], Tensor]
"""blocks(x_BLC, first, last): x, updated in place, behind the blocks first to last (excluded)."""
Agree = Callable[[Tensor, float], bool]
"""agree(sums, threshold): whether sums[0] < threshold * sums[1], the float32 sums of all ranks; the
same answer on all ranks that share a video."""


def alone(sums: Tensor, threshold: float) -> bool:
    """`Agree` of one process. Reads from the device, once."""
    change, size = sums.tolist()
    return bool(change < threshold * size)


@dataclass
class _State:
    """Of one expert, guidance branch and sample."""

    expert: str
    grid: Grid
    first: Tensor | None = None  # x_1 - x_0 of the last step that computed all
    residual: Tensor | None = None
    slope: Tensor | None = None  # its change from step to step
    step: int = 0  # that computed all last


class ResidualCache:
    """Implements `wan.modules.interfaces.StepCache`.

    agree: how the ranks decide. Attributes computed, skipped: branch -> steps of this run that
    computed all blocks, and those that did not.
    """

    def __init__(self, agree: Agree = alone) -> None:
        self._agree = agree
        self._plan: Plan | None = None
        self._states: dict[tuple[str, int], _State] = {}
        self.computed: dict[str, list[int]] = {}
        self.skipped: dict[str, list[int]] = {}

    def begin(self, plan: Plan) -> None:
        """A run begins: nothing is kept from the one before."""
        self.clear()
        self._plan, self.computed, self.skipped = plan, {}, {}

    def kept_bytes(self) -> int:
        """Of all kept tensors."""
        states = self._states.values()
        kept = [x for state in states for x in (state.first, state.residual, state.slope)]
        return sum(x.nbytes for x in kept if x is not None)

    def clear(self) -> None:
        """Frees what is kept; until a run begins, everything is computed."""
        self._plan = None
        self._states.clear()

    def __call__(
        self,
        x_BLC: Tensor,
        blocks: Blocks,
        step: StepInfo | None,
        valid: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """The residual stream behind all blocks.

        Args:
            x_BLC: Before the first block, float32; updated in place.
            blocks: Computes blocks.
            step: Where in the run this is; None: everything is computed.
            valid: How many of this rank's tokens are real.
            dtype: What is kept in.
        """
        if self._plan is None or step is None or torch.is_grad_enabled():
            return blocks(x_BLC, 0, None)
        plan, state = self._plan, self._state(step)
        reuses = state.residual is not None and not plan.computed[step.branch][step.index]
        threshold, before, sums = plan.threshold, None, None
        if threshold is not None:
            before = x_BLC.clone()
        if plan.first:
            x_BLC = blocks(x_BLC, 0, plan.first)
        if threshold is not None and before is not None:
            first = torch.sub(x_BLC, before, out=before).to(dtype)
            before = None
            if reuses:
                sums = change(first, state.first, valid)
                reuses = self._agree(sums, threshold)
            state.first = state.first if reuses else first
        self._note(reuses, sums)
        if reuses:
            return self._reused(x_BLC, state, step)
        x_BLC = self._computed(x_BLC, blocks, plan.first, state, step, dtype)
        self.computed.setdefault(step.branch, []).append(step.index)
        return x_BLC

    def _note(self, reuses: bool, sums: Tensor | None) -> None:
        """The decision, and how much the first block changed, for a trace."""
        assert self._plan is not None

        def distance() -> float | None:  # of all ranks: `Agree` adds them up in place
            change, size = (0.0, 0.0) if sums is None else sums.tolist()
            return change / size if size else None

        decision = "skipped" if reuses else "computed"
        trace.mark(
            "cache", what="blocks", decision=decision, first=self._plan.first, distance=distance
        )

    def _state(self, step: StepInfo) -> _State:
        """Other experts' and other grids' are freed."""
        for key, state in list(self._states.items()):
            if (state.expert, state.grid) != (step.expert, step.grid):
                del self._states[key]
        return self._states.setdefault((step.branch, step.sample), _State(step.expert, step.grid))

    def _computed(
        self,
        x_BLC: Tensor,
        blocks: Blocks,
        first: int,
        state: _State,
        step: StepInfo,
        dtype: torch.dtype,
    ) -> Tensor:
        assert self._plan is not None
        last = state.residual if self._plan.order else None
        state.residual = None
        before = x_BLC.clone()
        x_BLC = blocks(x_BLC, first, None)
        state.residual = torch.sub(x_BLC, before, out=before).to(dtype)
        if last is not None:
            state.slope = state.residual.sub(last).div_(step.index - state.step)
        state.step = step.index
        return x_BLC

    def _reused(self, x_BLC: Tensor, state: _State, step: StepInfo) -> Tensor:
        assert state.residual is not None
        self.skipped.setdefault(step.branch, []).append(step.index)
        x_BLC.add_(state.residual)
        if state.slope is not None:
            x_BLC.add_(state.slope, alpha=step.index - state.step)
        return x_BLC


def change(first: Tensor, kept: Tensor | None, valid: int) -> Tensor:
    """[2] float32: the sums, over real tokens, of how much it changed and of what it was."""
    assert kept is not None
    was = kept[:, :valid]
    change = torch.linalg.vector_norm(first[:, :valid] - was, 1, dtype=torch.float32)
    return torch.stack((change, torch.linalg.vector_norm(was, 1, dtype=torch.float32)))
