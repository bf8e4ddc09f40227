"""EasyCache (arXiv:2507.02860): skips whole steps while the velocity is predicted to change little.

The velocity v of the conditional branch changes about k times as much as its input x, with k from
the last two computed steps. The relative changes of a velocity that this predicts are summed up
over the steps since the last computed one. A skipped step takes each branch's v - x of that step.

Legend: Z latent channels, f h w latent frames/height/width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wan.cache.policy import BRANCHES, AllAgree, Cache, ComputeChanges, Policy, StepLists
from wan.settings.errors import InputError
from wan.tasks.base import VideoParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from wan.kernels.forward_context import StepInfo

_NUM_FIRST_STEPS = 10  # of the authors


class EasyPolicy(Policy):
    """Lists the first ten steps and the last one; the change of the latents decides the others."""

    skips = "network"
    decides_per_step = True

    def check_params(self, params: VideoParams) -> tuple[str, ...]:
        notices, num_steps = super().check_params(params), params.num_forwards
        if num_steps <= _NUM_FIRST_STEPS + 1:
            raise InputError(
                "`step_cache`",
                "easy",
                f"always computes the first {_NUM_FIRST_STEPS} steps and the last one, and there "
                f"are {num_steps}",
                "drop it, or give more `sample_steps`",
            )
        return notices

    def select_steps(
        self, params: VideoParams, compute_changes: ComputeChanges | None
    ) -> StepLists:
        last = params.num_forwards - 1
        steps = (s < _NUM_FIRST_STEPS or s == last for s in range(params.num_forwards))
        return dict.fromkeys(BRANCHES, tuple(steps))

    def make_cache(self, sync_branches: bool = False, all_agree: AllAgree | None = None) -> Cache:
        return EasyCache(self, sync_branches)


class EasyCache(Cache):
    """Decides before a step whether it is skipped; the ranks need no exchange for it.

    All ranks have the whole latents and the velocities of both branches, so that all decide alike.
    """

    def __init__(self, policy: Policy, sync_branches: bool = False) -> None:
        super().__init__(policy, sync_branches)
        self._threshold = policy.parameters["threshold"]
        self._start_expert("")

    def _start_expert(self, expert: str) -> None:
        self._expert, self._error, self._rate = expert, 0.0, 0.0
        self._differences: tuple[Tensor, ...] = ()
        self._previous: Tensor | None = None  # latents of the step before
        self._computed: tuple[Tensor, Tensor] | None = None  # latents, velocity of cond

    def clear(self) -> None:
        super().clear()
        self._start_expert("")

    def cached_bytes(self) -> int:
        return sum(x.nbytes for x in (*self._differences, *(self._computed or ())))

    def __call__(
        self,
        step: StepInfo,
        latents_Zfhw: Tensor,
        num_fixed_frames: int,
        compute: Callable[[], tuple[Tensor, ...]],
    ) -> tuple[Tensor, ...]:
        """Returns the velocities of cond and, with guidance, of uncond.

        Args:
            step: The step of both branches.
            latents_Zfhw: The solver's latents.
            num_fixed_frames: First latent frames that do not change, which are not measured.
            compute: Computes the velocities.
        """

        def measure(x_Zfhw: Tensor) -> float:
            return float(x_Zfhw[:, num_fixed_frames:].abs().mean())

        if step.expert != self._expert:
            self._start_expert(step.expert)
        if self._rate and self._previous is not None and self._computed is not None:
            change = measure(latents_Zfhw - self._previous)
            self._error += self._rate * change / measure(self._computed[1])
        self._previous = latents_Zfhw
        is_reused = (
            self._rate > 0
            and self._error < self._threshold
            and not self.step_lists["cond"][step.index]
        )
        velocities = (
            tuple(latents_Zfhw + difference for difference in self._differences)
            if is_reused
            else compute()
        )
        for branch in BRANCHES[: len(velocities)]:
            self.record_decision(branch, step.index, not is_reused)
        if is_reused:
            return velocities
        if self._computed is not None:
            input_change = measure(latents_Zfhw - self._computed[0])
            output_change = measure(velocities[0] - self._computed[1])
            self._rate = output_change / input_change if input_change else 0.0
        self._error, self._computed = 0.0, (latents_Zfhw, velocities[0])
        self._differences = tuple(velocity - latents_Zfhw for velocity in velocities)
        return velocities
