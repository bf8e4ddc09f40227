"""FasterCache's CFG cache: approximates the unconditional branch by the conditional one.

Legend: Z latent channels, f h w latent frames/height/width.

The difference of the branches is small and changes slowly. A step that computes both caches the
difference of their spectra; a step that computes only cond adds it to cond's spectrum. High
frequencies get a larger weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from wan.cache.policy import AllAgree, Cache, ComputeChanges, Policy, StepLists
from wan.settings.errors import InputError
from wan.settings.noise_schedule import make_noise_schedule
from wan.tasks.base import VideoParams

if TYPE_CHECKING:
    from torch import Tensor

_PERIOD = 5
_LOW_WEIGHT, _HIGH_WEIGHT = 1.0, 1.2


class GuidancePolicy(Policy):
    """MaxDiffusion's rule: four of five late steps compute only the conditional branch."""

    skips = "uncond"

    def check_params(self, params: VideoParams) -> tuple[str, ...]:
        notices = super().check_params(params)
        if not params.uses_guidance:
            raise InputError(
                "`step_cache`",
                "cfg",
                "rebuilds the unconditional branch, which `sample_guide_scale=1` does not compute",
                "drop one of them",
            )
        return notices

    def select_steps(
        self, params: VideoParams, compute_changes: ComputeChanges | None
    ) -> StepLists:
        """Skips steps of the low-noise expert or of a single network.

        They lie between a third of the steps and the last step; for 720p and more, between a third
        and nine tenths of the steps.
        """
        experts, num_steps = make_noise_schedule(params).experts, params.num_forwards
        width, height = params.video_size
        first = num_steps // 3
        last = int(0.9 * num_steps) if width * height >= 1280 * 704 else num_steps - 1
        computed, num_skipped = list[bool](), 0
        for step, expert in enumerate(experts):
            has_started = step > 0 and experts[step - 1] == expert and expert != "high_noise"
            is_skipped = has_started and first <= step < last and num_skipped < _PERIOD - 1
            computed.append(not is_skipped)
            num_skipped = num_skipped + 1 if is_skipped else 0
        return {"cond": (True,) * num_steps, "uncond": tuple(computed)}

    def make_cache(self, sync_branches: bool = False, all_agree: AllAgree | None = None) -> Cache:
        return GuidanceCache(self, sync_branches)


class GuidanceCache(Cache):
    """Caches the weighted difference of the two branches' spectra."""

    def __init__(self, policy: Policy, sync_branches: bool = False) -> None:
        super().__init__(policy, sync_branches)
        self._difference: Tensor | None = None

    def clear(self) -> None:
        super().clear()
        self._difference = None

    def __call__(
        self,
        step: int,
        compute_branches: Callable[[Callable[[str], Tensor]], tuple[Tensor, Tensor]],
        compute_branch: Callable[[str], Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Returns the results of both guidance branches in a step, float32 [Z,f,h,w] each.

        Args:
            compute_branches: Calls compute_branch for both branches.
            compute_branch: Computes the branch "cond" or "uncond".
        """
        import torch

        is_computed = self.step_lists["uncond"][step]
        self.computed_indices.setdefault("cond", []).append(step)
        self.record_decision("uncond", step, is_computed)
        if is_computed:
            cond, uncond = compute_branches(compute_branch)
            self._difference = torch.fft.rfft2(uncond - cond) * _make_frequency_weights(cond)
            return cond, uncond
        assert self._difference is not None
        cond = compute_branch("cond")
        return cond, cond + torch.fft.irfft2(self._difference, s=cond.shape[-2:])


def _make_frequency_weights(x_Zfhw: Tensor) -> Tensor:
    """Makes weights of the frequencies along h and w; low ones are below a quarter of the rate."""
    import torch

    h, w = x_Zfhw.shape[-2:]
    along_h = torch.fft.fftfreq(h, device=x_Zfhw.device).abs()[:, None]
    along_w = torch.fft.rfftfreq(w, device=x_Zfhw.device).abs()[None]
    return torch.where((along_h < 0.25) & (along_w < 0.25), _LOW_WEIGHT, _HIGH_WEIGHT)
