"""The denoising loop: experts by timestep, guidance, solver steps.

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

from wan import trace
from wan.cache.policy import Cache
from wan.kernels.base import StepInfo
from wan.log import progress
from wan.pipeline.solvers import Draw, make_solver
from wan.settings.errors import NotFiniteError
from wan.settings.request import Request
from wan.settings.timesteps import schedule


class Denoiser(Protocol):
    """The signature of `WanModel.forward`; other networks take further keywords."""

    def __call__(
        self,
        x: list[Tensor],
        t: Tensor,
        context: list[Tensor],
        seq_len: int,
        y: list[Tensor] | None = None,
        *,
        clip_fea: Tensor | None = None,
        step: StepInfo | None = None,
        **more: Any,
    ) -> list[Tensor]: ...


class ExpertSource(Protocol):
    """Provides networks by name; loads and releases them."""

    def get(self, name: str) -> Denoiser: ...

    def prefetch(self, name: str) -> None:
        """Prepares for a later `get` of this network."""


@dataclass(frozen=True)
class Conditions:
    """The inputs of the loop that are the same in all steps.

    Attributes:
        initial_latents: float32 [Z,f,h,w].
        context: Text embeddings of the prompt, [length, text_dim].
        negative_context: Text embeddings of the negative prompt, [length, text_dim].
        y: i2v's condition, concatenated to the channels of the latents, [20,f,h,w].
        clip_fea: CLIP features of the images, for Wan2.1's image models.
        sample_noise: Samples more noise, for stochastic solvers.
        expand_timestep: Converts a timestep t for the model: [1], or one for each token.
        fix_latents: Overwrites fixed frames of the latents, such as ti2v's first frame.
        model_kwargs: Branch -> further keywords of the network.
    """

    start: Tensor
    context: Tensor
    negative_context: Tensor
    y: Tensor | None = None
    clip_fea: Tensor | None = None
    draw: Draw | None = None
    timesteps: Callable[[Tensor], Tensor] = lambda t: t.reshape(1)
    impose: Callable[[Tensor], Tensor] = lambda latents: latents
    given: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


Branches = Callable[[Callable[[str], Tensor]], tuple[Tensor, Tensor]]
"""Calls a function with "cond" and with "uncond", and returns both results."""


def both_here(branch: Callable[[str], Tensor]) -> tuple[Tensor, Tensor]:
    """Computes both guidance branches one after the other on this device."""
    return branch("cond"), branch("uncond")


Stepped = Callable[[int, Tensor], None]
"""Called with the number of steps done and the latents after them."""


class Boundary(Protocol):
    """Lets a video be cancelled between two steps, on all ranks at once."""

    def reached(self, done: int, total: int) -> None:
        """Raises an error if the video is cancelled.

        Every rank calls this before each step and after the last one.
        """

    def apart(self) -> AbstractContextManager[None]:
        """Wraps a part of a step without communication between ranks."""


class Unended:
    """Implements `CancellationPoint`; never cancels."""

    def reached(self, done: int, total: int) -> None: ...

    def apart(self) -> AbstractContextManager[None]:
        return nullcontext()


UNENDED = Unended()


class Denoising:
    """The denoising loop of a video, which may be paused between two steps.

    Attributes:
        latents: The latents after the last step, [Z,f,h,w].
    """

    def __init__(
        self, request: Request, conditions: Conditions, stepped: Stepped | None = None
    ) -> None:
        self.request, self.latents = request, conditions.start
        self._stepped = stepped
        self._conditions = replace(conditions, start=torch.empty(0))  # held once, as self.latents
        self._plan, self._done = schedule(request), 0
        self._solver, self._timesteps = make_solver(request, self._plan, conditions.draw)

    @property
    def experts(self) -> list[str]:
        """The experts of the remaining steps, in order."""
        return list(dict.fromkeys(self._plan.experts[self._done :]))

    def advance(
        self,
        experts: ExpertSource,
        branches: Branches = both_here,
        caches: Cache | None = None,
        phases: int | None = None,
        boundary: Boundary = UNENDED,
    ) -> Tensor:
        """Runs steps and returns the latents after them.

        Args:
            experts: Provides the networks.
            run_branches: Computes the two guidance branches.
            step_cache: Reuses results of earlier steps.
            num_experts: The number of experts whose steps are run; None: all remaining ones.
            cancellation_point: Checked before each step and after the last one.

        Raises:
            NotFiniteError: The latents are NaN or infinite after the first or the last step.
        """
        first, *others = self.experts[:phases]
        left = self._plan.experts[self._done :]
        last = self._done + sum(name in (first, *others) for name in left)
        total = len(self._plan.experts)
        experts.get(first)  # before the bar, so that its rate excludes loading
        for name in others:
            experts.prefetch(name)
        with torch.no_grad(), progress(last - self._done, "sampling", "step") as bar:
            for index in range(self._done, last):
                boundary.reached(index, total)
                name = self._plan.experts[index]
                skipped = 0 if caches is None else caches.count_skipped_steps()
                said = f"{name}, {skipped} skipped" if skipped else name
                bar.set_postfix_str(said, refresh=False)
                self._step(index, experts.get(name), branches, caches, boundary)
                bar.update()
                if bar.n == 2:  # the first step is slower, so its estimate is not shown
                    bar.refresh()
            boundary.reached(last, total)
        return self.latents if self.experts else own(self.request, self.latents)

    def _check_finite(self, expert: str) -> None:
        if not bool(self.latents.isfinite().all()):
            raise NotFiniteError(
                f"The latents are NaN or infinite after step {self._done} of "
                f"{len(self._plan.experts)} ({expert}), so no video is made; see whether weights "
                "or a LoRA are damaged, or try another precision.",
                self.latents,
            )

    def _step(
        self,
        index: int,
        model: Denoiser,
        branches: Branches,
        caches: Cache | None,
        boundary: Boundary,
    ) -> None:
        request, conditions = self.request, self._conditions
        name, (low, high) = self._plan.experts[index], request.sample_guide_scale
        timestep, grid = self._timesteps[index], request.grid
        step = StepInfo(index, request.sample_steps, "cond", name, grid, prod(grid))
        branch = partial(
            velocity, model, self.latents, conditions.timesteps(timestep), conditions, step
        )
        guidance = None if caches is None else caches.get_if_skips("uncond")
        with trace.step(index, name):  # excludes loading
            guided = guide(
                branch,
                high if name == "high_noise" else low,
                branches if guidance is None else partial(guidance, index, branches),
            )
            with boundary.apart():
                made = self._solver.step(guided, timestep.float(), self.latents, return_dict=False)
                self.latents = conditions.impose(made[0])
                self._done = index + 1
                if index in (0, len(self._plan.experts) - 1):  # early, and after all steps
                    self._check_finite(name)
                if self._stepped is not None:
                    self._stepped(self._done, self.latents)

    def rest(self) -> None:
        """Moves the loop's tensors to the CPU while it is paused."""
        self.to(torch.device("cpu"))

    def to(self, device: torch.device) -> None:
        """Moves the text embeddings and all tensors of the latents' shape to a device."""
        if self.latents.device == device:
            return
        shape = self.latents.shape

        def moved(value: Any) -> Any:
            if isinstance(value, list):
                return [moved(one) for one in value]
            is_latents = isinstance(value, Tensor) and value.shape == shape
            return value.to(device) if is_latents else value

        vars(self._solver).update({n: moved(value) for n, value in vars(self._solver).items()})
        kept = ("context", "negative_context", "y", "clip_fea")
        given = {name: getattr(self._conditions, name) for name in kept}
        self.latents = self.latents.to(device)
        there = {name: x.to(device) for name, x in given.items() if x is not None}
        move = cache(lambda x: x.to(device))  # tensors of both branches are moved once
        branches = {
            branch: {
                name: [*map(move, value)] if _are_tensors(value) else value
                for name, value in more.items()
            }
            for branch, more in self._conditions.given.items()
        }
        self._conditions = replace(self._conditions, **there, given=branches)


def _are_tensors(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, Tensor) for one in value)


def own(request: Request, latents_Zfhw: Tensor) -> Tensor:
    """Removes the latent frames of VACE's reference images, which precede the video's."""
    if not request.references:
        return latents_Zfhw
    return latents_Zfhw[:, request.references :].contiguous()


def velocity(
    model: Denoiser, latents: Tensor, t: Tensor, conditions: Conditions, step: StepInfo, branch: str
) -> Tensor:
    """Predicts the velocity of one guidance branch, float32 [Z,f,h,w].

    Args:
        model: The expert of the step.
        latents: [Z,f,h,w].
        t: Timesteps, [1] or one for each token.
        step: The step; its branch is replaced by `branch`.
        branch: "cond" or "uncond".
    """
    context = conditions.context if branch == "cond" else conditions.negative_context
    more: dict[str, Any] = {
        **conditions.given.get(branch, {}),
        "step": replace(step, branch=branch),
    }
    if conditions.y is not None:
        more["y"] = [conditions.y]
    if conditions.clip_fea is not None:
        more["clip_fea"] = conditions.clip_fea
    with trace.span("branch", branch=branch):
        return model([latents], t, context=[context], seq_len=step.valid_len, **more)[0]


def guide(branch: Callable[[str], Tensor], scale: float, branches: Branches = both_here) -> Tensor:
    """Returns uncond + scale * (cond - uncond); at scale 1 only cond is computed."""
    if scale == 1:
        return branch("cond")
    cond, uncond = branches(branch)
    return uncond + scale * (cond - uncond)
