"""Reads the steps and the guidance of a diffusers pipeline while it calls its networks."""

from __future__ import annotations

from typing import Any

import diffusers
from diffusers.guiders.guider_utils import BaseGuidance

from wan.settings.errors import InputError

_MODULAR = diffusers.WanModularPipeline
PIPELINES: tuple[Any, ...] = (
    diffusers.WanPipeline,
    diffusers.WanImageToVideoPipeline,
    diffusers.WanVideoToVideoPipeline,
    diffusers.WanVACEPipeline,
    diffusers.WanAnimatePipeline,
    _MODULAR,
)
"""The supported classes; subclasses of the modular class are those of Wan2.1 and Wan2.2."""
ANIMATE2_PIPELINES: tuple[Any, ...] = tuple(
    getattr(diffusers, name)
    for name in ("WanAnimate2ModularPipeline", "WanAnimate2DistilledModularPipeline")
    if hasattr(diffusers, name)
)


def make_denoise_loop(pipe: Any) -> DenoiseLoop:
    """Returns the reader of a pipeline of `PIPELINES`."""
    return ModularLoop(pipe) if isinstance(pipe, _MODULAR) else DenoiseLoop(pipe)


class DenoiseLoop:
    """The loop of a pipeline that calls its networks in `cache_context`, or cond before uncond."""

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe
        self._cond_timestep: Any = None  # of the last call without a context

    @property
    def is_running(self) -> bool:
        return getattr(self.pipe, "current_timestep", None) is not None

    @property
    def timesteps(self) -> list[float]:
        """The timesteps of the video; the last ones of the scheduler if it begins with a video."""
        all_timesteps: list[float] = self.pipe.scheduler.timesteps.tolist()
        return all_timesteps[self._first_step :]

    @property
    def _first_step(self) -> int:
        return len(self.pipe.scheduler.timesteps) - self.pipe.num_timesteps

    @property
    def begins_with_noise(self) -> bool:
        return self._first_step == 0

    def find_step(self, expert: str, context: str | None) -> tuple[int, int, str]:
        """Returns the step of a call of a network, the number of steps, and the branch.

        context: The name in `cache_context`; None outside of it.
        """
        index = self.pipe.scheduler.step_index  # None before the first step
        index = 0 if index is None else index - self._first_step
        return index, self.pipe.num_timesteps, context or self._find_branch()

    def _find_branch(self) -> str:
        timestep = self.pipe.current_timestep  # another tensor in each step
        is_second = timestep is self._cond_timestep and self.has_guidance
        self._cond_timestep = None if is_second else timestep
        return "uncond" if is_second else "cond"

    @property
    def has_guidance(self) -> bool:
        """Whether the current step also calls the uncond branch."""
        return bool(self.pipe.do_classifier_free_guidance)

    @property
    def guidance_scale(self) -> float:
        return self.pipe.guidance_scale if self.has_guidance else 1

    def check(self) -> None:
        """Refuses what changes the calls of the networks."""

    def ends_at(self, index: int, branch: str) -> bool:
        """Whether a call is the last of a video whose end the pipeline does not report."""
        return False


class ModularLoop(DenoiseLoop):
    """The loop of a modular pipeline, whose guiders have the steps."""

    _guider: Any = None

    @property
    def is_running(self) -> bool:
        return any(guider._step is not None for guider in self._guiders.values())

    @property
    def _guiders(self) -> dict[str, Any]:
        names = {"dit": "guider", "high_noise": "guider", "low_noise": "guider_2"}
        guiders = {expert: getattr(self.pipe, name, None) for expert, name in names.items()}
        return {expert: guider for expert, guider in guiders.items() if guider is not None}

    @property
    def _first_step(self) -> int:
        return 0

    def find_step(self, expert: str, context: str | None) -> tuple[int, int, str]:
        self._guider = guider = self._guiders[expert]
        # diffusers' tangential guider has no is_conditional.
        is_conditional = getattr(guider, "is_conditional", guider._count_prepared == 1)
        branch = "cond" if is_conditional else "uncond"
        return guider._step, len(self.pipe.scheduler.timesteps), branch

    @property
    def has_guidance(self) -> bool:
        return bool(self._guider.num_conditions > 1)

    @property
    def guidance_scale(self) -> float:
        return self._guider.guidance_scale if self.has_guidance else 1

    def check(self) -> None:
        for guider in self._guiders.values():
            if type(guider).prepare_models is not BaseGuidance.prepare_models:
                raise InputError(
                    f"{type(guider).__name__} changes the network between its calls; use a guider "
                    "that combines two predictions, such as ClassifierFreeGuidance."
                )

    def ends_at(self, index: int, branch: str) -> bool:
        is_last_step = index == len(self.pipe.scheduler.timesteps) - 1
        return is_last_step and branch == ("uncond" if self.has_guidance else "cond")
