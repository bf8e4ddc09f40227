"""The denoising loop: selects the expert of each step, applies guidance and takes solver steps.

Solver steps are taken in float32 on the latents' device.

Legend: Z latent channels, f h w latent frames/height/width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from wan.cache.policy import Cache
from wan.checkpoint.lora.folder import VideoLoras
from wan.guidance.guider import make_guider, select_skipped_blocks
from wan.guidance.nag import NormalizedAttention
from wan.kernels.forward_context import CrossAttentionGuidance, StepInfo
from wan.pipeline.preview import Preview
from wan.pipeline.scheduler import make_solver
from wan.settings.errors import NotFiniteError
from wan.settings.noise_schedule import make_noise_schedule
from wan.tasks.base import DenoiseInputs, StepCallback, VideoParams
from wan.utils import trace
from wan.utils.log import make_step_bar

Denoiser = Callable[..., list[Tensor]]
"""A network with the arguments of `WanModel.forward`, and those of its task."""


class ExpertSource(Protocol):
    """Provides networks by name; loads and releases them."""

    def get(self, name: str) -> Denoiser: ...

    def prefetch(self, name: str) -> None:
        """Prepares for a later `get` of this network."""


RunBranches = Callable[[Callable[[str], Tensor]], tuple[Tensor, Tensor]]
"""Calls a function with "cond" and with "uncond", and returns both results."""
CombineBranches = Callable[[Tensor, Tensor, float], Tensor]
"""combine(cond, uncond, scale): the velocity of a step; see `wan.guidance.guider.Guider`."""


def run_both_branches(predict_branch: Callable[[str], Tensor]) -> tuple[Tensor, Tensor]:
    """Computes both guidance branches one after the other on this device."""
    return predict_branch("cond"), predict_branch("uncond")


class CancellationPoint(Protocol):
    """Lets a video be cancelled between two steps, or blocks that are decoded, on all ranks."""

    def check(self, num_steps_done: int, num_steps: int) -> None:
        """Raises an error if the video is cancelled.

        Every rank calls this before each step and after the last one.
        """

    def raise_if_cancelled(self) -> None:
        """Raises an error if the video is cancelled; every rank calls this between two blocks."""

    def local_section(self) -> AbstractContextManager[None]:
        """Wraps a part of a step without communication; an error in it reaches all ranks."""


class NeverCancelled:
    """Implements `CancellationPoint`; never cancels."""

    def check(self, num_steps_done: int, num_steps: int) -> None: ...

    def raise_if_cancelled(self) -> None: ...

    def local_section(self) -> AbstractContextManager[None]:
        return nullcontext()


NEVER_CANCELLED = NeverCancelled()


class DenoisingLoop:
    """The denoising loop of a video, which may be paused between two steps.

    Attributes:
        latents: The latents after the last step, [Z,f,h,w].
        loras: LoRAs of this video only.
    """

    def __init__(
        self,
        params: VideoParams,
        inputs: DenoiseInputs,
        callback_on_step_end: StepCallback | None = None,
        preview: Preview | None = None,
        loras: VideoLoras | None = None,
    ) -> None:
        self.loras = loras or {}
        self.params, self.latents = params, inputs.initial_latents
        self._callback_on_step_end, self._preview = callback_on_step_end, preview
        self._inputs = replace(inputs, initial_latents=torch.empty(0))  # only self.latents has them
        self._noise_schedule, self._num_steps_done = make_noise_schedule(params), 0
        self._num_forwards = params.num_forwards
        self._guider = make_guider(params)
        self._attention_guidance = None if params.nag_scale is None else NormalizedAttention(params)
        self._solver, self._timesteps = make_solver(
            params, self._noise_schedule, inputs.sample_noise
        )

    @property
    def remaining_experts(self) -> list[str]:
        """The experts of the remaining steps, in order."""
        return list(dict.fromkeys(self._noise_schedule.experts[self._num_steps_done :]))

    def advance(
        self,
        experts: ExpertSource,
        run_branches: RunBranches | None = None,
        step_cache: Cache | None = None,
        num_experts: int | None = None,
        cancellation_point: CancellationPoint = NEVER_CANCELLED,
        bar: Any = None,
    ) -> Tensor:
        """Runs steps and returns the latents after them.

        Args:
            experts: Provides the networks.
            run_branches: Computes the two guidance branches; None: both are computed here.
            step_cache: Reuses results of earlier steps.
            num_experts: The number of experts whose steps are run; None: all remaining ones.
            cancellation_point: Checked before each step and after the last one.
            bar: The progress bar of these steps; None: a new one.

        Raises:
            NotFiniteError: The latents are NaN or infinite after the first or the last step.
        """
        step_cache = Cache() if step_cache is None else step_cache
        first_expert, *later_experts = self.remaining_experts[:num_experts]
        remaining_steps = self._noise_schedule.experts[self._num_steps_done :]
        stop = self._num_steps_done + sum(
            name in (first_expert, *later_experts) for name in remaining_steps
        )
        num_steps = len(self._noise_schedule.experts)
        network = experts.get(first_expert)
        with torch.no_grad():
            model_kwargs = compute_model_kwargs(network, self._inputs.model_kwargs)
        del network  # it is released before the next expert is loaded
        self._inputs = replace(self._inputs, model_kwargs=model_kwargs)
        for name in later_experts:
            experts.prefetch(name)
        num_remaining = stop - self._num_steps_done
        step_bar = make_step_bar(num_remaining) if bar is None else nullcontext(bar)
        with torch.no_grad(), step_bar as bar:
            bar.unpause()  # its rate excludes loading
            bar.set_postfix_str(first_expert)
            for index in range(self._num_steps_done, stop):
                cancellation_point.check(index, num_steps)
                name = self._noise_schedule.experts[index]
                skipped = step_cache.count_skipped_steps()
                postfix = f"{name}, {skipped} skipped" if skipped else name
                bar.set_postfix_str(postfix, refresh=False)
                self._step(index, experts.get(name), run_branches, step_cache, cancellation_point)
                bar.update()
                if bar.n == 2:  # no estimate after one step, as the first step is slower
                    bar.refresh()
            cancellation_point.check(stop, num_steps)
        if self.remaining_experts:
            return self.latents
        return strip_reference_frames(self.params, self.latents)

    def _check_finite(self, expert: str) -> None:
        if not bool(self.latents.isfinite().all()):
            raise NotFiniteError(
                f"The latents are NaN or infinite after step {self._num_steps_done} of "
                f"{len(self._noise_schedule.experts)} ({expert}), so no video is made; "
                "check the weights and LoRAs for damage, or try another precision.",
                self.latents,
            )

    def _step(
        self,
        index: int,
        model: Denoiser,
        run_branches: RunBranches | None,
        step_cache: Cache,
        cancellation_point: CancellationPoint,
    ) -> None:
        params, inputs = self.params, self._inputs
        expert = self._noise_schedule.experts[index]
        latents = self.latents
        step_index = self._noise_schedule.step_range[index]
        with trace.record_step(step_index, expert):  # excludes loading
            if step_index < self._guider.num_zero_steps:
                guided_velocity = torch.zeros_like(latents)
            else:
                prediction = self._make_prediction(index, model, run_branches, step_cache)
                low_noise_scale, high_noise_scale = params.sample_guide_scale
                scale = high_noise_scale if expert == "high_noise" else low_noise_scale
                guided_velocity = prediction.guide(scale, self._guider.combine)
            with cancellation_point.local_section():
                next_latents = self._solver.step(latents, guided_velocity)
                self.latents = inputs.restore_fixed_frames(next_latents)
                self._num_steps_done = index + 1
                # Only after the first step, to fail early, and after the last one.
                if index in (0, len(self._noise_schedule.experts) - 1):
                    self._check_finite(expert)
                if self._callback_on_step_end is not None:
                    self._callback_on_step_end(self._num_steps_done, self.latents)
        if self._preview is not None and self._preview.is_due(self._num_steps_done):
            clean_latents = latents - self._noise_schedule.sigmas[index] * guided_velocity
            clean_latents = inputs.restore_fixed_frames(clean_latents)
            self._preview.update(strip_reference_frames(params, clean_latents))

    def _make_prediction(
        self, index: int, model: Denoiser, run_branches: RunBranches | None, step_cache: Cache
    ) -> StepPrediction:
        params, inputs, grid, text_guidance = self.params, self._inputs, self.params.grid, None
        step_index = self._noise_schedule.step_range[index]
        t = inputs.make_model_timesteps(self._timesteps[index])
        if self._attention_guidance is not None:
            text_guidance = CrossAttentionGuidance(
                inputs.negative_context, self._attention_guidance
            )
        step = StepInfo(
            step_index,
            self._num_forwards,
            "cond",
            self._noise_schedule.experts[index],
            grid,
            prod(grid),
            skipped_blocks=select_skipped_blocks(params, step_index),
            text_guidance=text_guidance,
        )
        return StepPrediction(model, self.latents, t, inputs, step, run_branches, step_cache)

    def offload(self) -> None:
        """Moves the loop's tensors to the CPU while it is paused."""
        self.to(torch.device("cpu"))

    def to(self, device: torch.device) -> None:
        """Moves the latents, the inputs, and what solver and guider keep between steps."""
        if self.latents.device != device:
            move_tensor = cache(lambda x: x.to(device))  # tensors of both branches are moved once
            self.latents = self.latents.to(device)
            self._inputs = replace(
                self._inputs, **_apply_to_tensors(vars(self._inputs), move_tensor)
            )
            self._solver.to(device)
            self._guider.to(device)


def compute_model_kwargs(
    network: Any, model_kwargs: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Calls the functions in `DenoiseInputs.model_kwargs`, each once, with the network."""
    compute = cache(lambda function: function(network))
    return {
        branch: {name: compute(x) if callable(x) else x for name, x in kwargs.items()}
        for branch, kwargs in model_kwargs.items()
    }


def _apply_to_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Applies a function to the tensors in dictionaries and lists; other values are kept."""
    if isinstance(value, Mapping):
        return {name: _apply_to_tensors(item, function) for name, item in value.items()}
    if isinstance(value, list):
        return [_apply_to_tensors(item, function) for item in value]
    return function(value) if isinstance(value, Tensor) else value


def strip_reference_frames(params: VideoParams, latents_Zfhw: Tensor) -> Tensor:
    """Removes the latent frames of VACE's reference images, which precede the video's."""
    if not params.num_reference_images:
        return latents_Zfhw
    return latents_Zfhw[:, params.num_reference_images :].contiguous()


def merge_branch_kwargs(
    cond_kwargs: Mapping[str, Any], uncond_kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Merges the keywords of two calls of a network into those of one call with two samples."""

    def merge(name: str, value: Any) -> Any:
        if name != "clip_fea" and isinstance(value, Tensor | StepInfo):  # samples share clip_fea
            return [value, uncond_kwargs[name]]
        is_tensor_list = isinstance(value, list) and all(isinstance(x, Tensor) for x in value)
        return [*value, *uncond_kwargs[name]] if is_tensor_list else value

    return {name: merge(name, value) for name, value in cond_kwargs.items()}


@dataclass(frozen=True)
class StepPrediction:
    """Predicts the velocities of one step, or takes those of an earlier step.

    Attributes:
        model: The expert of the step.
        latents: [Z,f,h,w].
        t: Timesteps, [1] or one for each token.
        step: The step of both branches.
        run_branches: Computes both guidance branches; None: they are computed on this device.
        step_cache: Reuses results of earlier steps.
    """

    model: Denoiser
    latents: Tensor
    t: Tensor
    inputs: DenoiseInputs
    step: StepInfo
    run_branches: RunBranches | None = None
    step_cache: Cache = field(default_factory=Cache)

    def guide(self, scale: float, combine: CombineBranches) -> Tensor:
        """Returns the guided velocity, float32 [Z,f,h,w]; at scale 1 only cond is computed."""
        compute = self._compute_cond if scale == 1 else self.compute_branches
        velocity_cache = self.step_cache.get_if_skips("network")
        if velocity_cache is None:
            velocities = compute()
        else:
            num_fixed_frames = self.inputs.num_fixed_frames
            velocities = velocity_cache(self.step, self.latents, num_fixed_frames, compute)
        if scale == 1:
            return velocities[0]
        cond, uncond = velocities
        return combine(cond, uncond, scale)

    def _compute_cond(self) -> tuple[Tensor, ...]:
        return (self.predict_velocity("cond"),)

    def compute_branches(self) -> tuple[Tensor, ...]:
        """Computes the velocities of cond and uncond."""
        run_branches = self.run_branches or self._run_here
        guidance_cache = self.step_cache.get_if_skips("uncond")
        if guidance_cache is not None:
            run_branches = partial(guidance_cache, self.step.index, run_branches)
        return run_branches(self.predict_velocity)

    def _run_here(self, predict_branch: Callable[[str], Tensor]) -> tuple[Tensor, Tensor]:
        """Computes both guidance branches on this device, in lockstep if the network can."""
        if not getattr(self.model, "runs_in_lockstep", lambda _: False)(self.step.valid_len):
            return run_both_branches(predict_branch)
        model_kwargs = merge_branch_kwargs(*map(self._make_branch_kwargs, ("cond", "uncond")))
        cond, uncond = self.model([self.latents] * 2, self.t, **model_kwargs)
        return cond, uncond

    def predict_velocity(self, branch: str) -> Tensor:
        """Predicts the velocity of the guidance branch "cond" or "uncond", float32 [Z,f,h,w]."""
        with trace.span("branch", branch=branch):
            return self.model([self.latents], self.t, **self._make_branch_kwargs(branch))[0]

    def _make_branch_kwargs(self, branch: str) -> dict[str, Any]:
        """Makes the keywords of the network for one guidance branch."""
        inputs = self.inputs
        model_kwargs: dict[str, Any] = {
            **inputs.model_kwargs.get(branch, {}),
            "context": [inputs.context if branch == "cond" else inputs.negative_context],
            "seq_len": self.step.valid_len,
            "step": self.step.for_branch(branch),
        }
        if inputs.y is not None:
            model_kwargs["y"] = [inputs.y]
        if inputs.clip_fea is not None:
            model_kwargs["clip_fea"] = inputs.clip_fea
        return model_kwargs
