"""The base classes of step cache policies and of step caches.

A policy is a class in a module of this package and a row of `wan.settings.step_cache.POLICIES`. It
checks a video and lists its steps before the run, without torch; its cache needs torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import ne, or_
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from wan.guidance.guider import make_guider, select_skipped_blocks
from wan.settings.errors import InputError
from wan.settings.noise_schedule import make_noise_schedule
from wan.settings.presets import TRAIN_TIMESTEPS, Preset
from wan.settings.step_cache import POLICIES, StepCache
from wan.tasks.base import VideoParams
from wan.utils import trace

if TYPE_CHECKING:
    from torch import Tensor

BRANCHES = ("cond", "uncond")
MIN_STEPS = 8
SkipTarget = Literal["blocks", "attention", "uncond", "network"]
"""The part of a step that a cache skips: blocks, self-attention, the uncond branch, or all."""
StepMask = tuple[bool, ...]
"""For each step: True if the part that the policy may skip is computed."""
StepLists = dict[str, StepMask]
"""Guidance branch -> the mask of its computed steps."""
ComputeChanges = Callable[[str, Sequence[float]], Sequence[float]]
"""compute_changes(expert, timesteps): relative change of the time embedding in each step."""
AllAgree = Callable[["Tensor", float], bool]
"""all_agree(sums, threshold): whether sums[0] < threshold * sums[1], summed in float32 over all
ranks that share a video; all of them get the same result."""


class Policy(ABC):
    """Decides which steps of a run are computed; the constructor checks its parameters.

    Attributes:
        num_first_blocks: Leading blocks that every step computes.
        decides_per_step: The masks are a minimum: a run also computes each step before which the
            residual of the first blocks has changed by more than the threshold.
        requires_shift: Valid only for the noise schedule of `sample_shift`.
        parameters: Parameters of the policy, by name.
        content: Data, not settings, that must be equal on all ranks; None: no data.
    """

    skips: ClassVar[SkipTarget]
    num_first_blocks: ClassVar[int] = 0
    decides_per_step: ClassVar[bool] = False
    requires_shift: ClassVar[bool] = False
    content: Any = None

    def __init__(self, settings: StepCache, preset: Preset, folder: Path | None = None) -> None:
        """Subclasses refuse parameters that do not fit the task or the checkpoint folder."""
        self.settings, self.preset, self.parameters = settings, preset, settings.parameters

    @abstractmethod
    def select_steps(
        self, params: VideoParams, compute_changes: ComputeChanges | None
    ) -> StepLists | None:
        """Returns the steps that the policy's rule selects; None if it needs `compute_changes`."""

    def check_params(self, params: VideoParams) -> tuple[str, ...]:
        """Returns notices about a video; refuses it if its steps or guidance do not fit."""
        num_steps = len(params.step_range)
        if num_steps < MIN_STEPS and not self.parameters["force"]:
            raise InputError(
                "`step_cache`",
                self.settings.policy,
                f"with {num_steps} steps: so few are too far apart for one to replace another",
                "drop it, give more `sample_steps`, or add its parameter force=true",
            )
        return ()

    def list_steps(
        self,
        params: VideoParams,
        sync_branches: bool = False,
        compute_changes: ComputeChanges | None = None,
    ) -> StepLists | None:
        """Returns the steps that a run computes: those of the policy's rule and forced ones.

        The first step of each expert has nothing to reuse. The parameter warmup forces further
        first steps, and the last step, of each expert.

        Args:
            sync_branches: Both guidance branches compute the same steps, because different ranks
                compute them.
            compute_changes: Reads the loaded networks; some policies return None without it.
        """
        # Rules select among all steps; a video that starts from another one has the last of them.
        steps = self.select_steps(params.with_all_steps, compute_changes)
        if steps is None:
            return None
        schedule = make_noise_schedule(params)
        first = max(schedule.first_step, make_guider(params).num_zero_steps)
        left_out, experts = (False,) * first, schedule.experts[first - schedule.first_step :]
        warmup = self.parameters.get("warmup", 0)
        # A step with other skipped blocks than the one before has nothing to reuse.
        skipped_blocks = [select_skipped_blocks(params, first + i) for i in range(len(experts))]
        is_switch = [False, *map(ne, skipped_blocks[1:], skipped_blocks)]
        forced_steps = [*map(or_, list_forced_steps(experts, warmup), is_switch)]
        step_lists = {
            name: left_out + tuple(map(or_, forced_steps, steps[name][first:])) for name in BRANCHES
        }
        if sync_branches:
            step_lists = dict.fromkeys(
                BRANCHES, tuple(map(any, zip(*step_lists.values(), strict=True)))
            )
        return step_lists

    def describe(self, params: VideoParams, sync_branches: bool) -> str:
        """Describes the computed steps in one line, for a plan; arguments as for `list_steps`."""
        step_lists, name = self.list_steps(params, sync_branches), self.settings.policy
        if self.decides_per_step:
            threshold = self.parameters["threshold"]
            return f"Step cache {name}: decided in the run, by threshold {threshold:g}"
        if step_lists is None:
            return f"Step cache {name}: steps depend on the weights and are chosen after loading"
        num_steps = len(params.step_range)
        masks = {branch: step_lists[branch] for branch in BRANCHES[: 1 + params.uses_guidance]}
        branches = [
            f"{branch} computes {sum(mask)} of {num_steps} steps ({_format_steps(mask)})"
            for branch, mask in masks.items()
        ]
        factor = num_steps * len(masks) / sum(map(sum, masks.values()))
        gain = f"at most {factor:.2f} times as fast"
        if self.skips == "attention":
            gain = "the other steps leave self-attention out"
        return f"Step cache {name}: {'; '.join(branches)}; {gain}"

    @abstractmethod
    def make_cache(self, sync_branches: bool = False, all_agree: AllAgree | None = None) -> Cache:
        """Makes the cache of this policy.

        Args:
            sync_branches: As for `list_steps`.
            all_agree: Decides for all ranks of a video; None: there is one process.
        """


def make_policy(settings: StepCache, preset: Preset, folder: Path | None = None) -> Policy | None:
    """Makes the policy of the settings; arguments and errors as for `Policy`."""
    entry = POLICIES.get(settings.policy)
    return None if entry is None else resolve_name(entry.factory)(settings, preset, folder)


def split_by_expert(experts: Sequence[str]) -> list[tuple[str, int, int]]:
    """Splits the steps into (expert, first step, end)."""
    spans, first = [], 0
    for expert, group in groupby(experts):
        end = first + len(list(group))
        spans.append((expert, first, end))
        first = end
    return spans


def list_forced_steps(experts: Sequence[str], warmup: int) -> StepMask:
    """Lists the steps that are computed under every policy; see `Policy.list_steps`."""
    is_forced = [False] * len(experts)
    for _, first, end in split_by_expert(experts):
        num_warmup = min(max(warmup, 1), end - first)
        is_forced[first : first + num_warmup] = [True] * num_warmup
        is_forced[end - 1] |= warmup > 0
    return tuple(is_forced)


def _format_steps(mask: StepMask) -> str:
    """Formats the computed steps as an argument of the policy `steps`."""
    ranges = []
    for computed, group in groupby(range(len(mask)), key=mask.__getitem__):
        first, *later_steps = group
        if computed:
            ranges.append(f"{first}-{later_steps[-1]}" if later_steps else str(first))
    return ",".join(ranges)


class Cache:
    """The step cache of a pipeline. This base class has no policy and caches nothing.

    Attributes:
        policy: None: every step is computed.
        compute_changes: See `Policy.select_steps`; set by the owner of the networks.
        step_lists: The policy's lists; empty between videos, when every step is computed.
        computed_indices: Guidance branch -> computed steps of this video so far.
        skipped_indices: Guidance branch -> skipped steps of this video so far.
    """

    memory_plan_steps: ClassVar[StepMask] = (True,) * TRAIN_TIMESTEPS
    """Mask for the memory planner, with which a forward pass caches as much as a real run."""

    def __init__(self, policy: Policy | None = None, sync_branches: bool = False) -> None:
        """Takes the arguments of `Policy.make_cache`."""
        self.policy, self._sync_branches = policy, sync_branches
        self.compute_changes: ComputeChanges | None = None
        self.step_lists: StepLists = {}
        self.computed_indices: dict[str, list[int]] = {}
        self.skipped_indices: dict[str, list[int]] = {}
        self._num_steps = 0

    def get_if_skips(self, target: SkipTarget) -> Any:
        """Returns this cache if it skips this part of a step, else None."""
        return self if self.policy is not None and self.policy.skips == target else None

    def start_video(self, params: VideoParams) -> None:
        """Lists the steps of a video and starts it with an empty cache."""
        self._num_steps = len(params.step_range)
        if self.policy is not None:
            step_lists = self.policy.list_steps(params, self._sync_branches, self.compute_changes)
            assert step_lists is not None, "compute_changes is not set"
            self.start_run(step_lists)

    def start_run(self, step_lists: StepLists) -> None:
        """Starts a video with these lists and an empty cache."""
        self.clear()
        self.step_lists, self.computed_indices, self.skipped_indices = step_lists, {}, {}

    def clear(self) -> None:
        """Frees the cached tensors."""
        self.step_lists = {}

    def cached_bytes(self) -> int:
        """Counts the bytes of cached tensors that belong to no layer."""
        return 0

    def record_decision(
        self, branch: str, step: int, computes: bool, **trace_fields: object
    ) -> None:
        """Notes whether a branch computes a step; every call also writes a trace marker."""
        steps = (self.computed_indices if computes else self.skipped_indices).setdefault(branch, [])
        if step not in steps:
            steps.append(step)
        decision = "computed" if computes else "skipped"
        trace.record_marker(
            "cache", what=self.policy and self.policy.skips, decision=decision, **trace_fields
        )

    def count_skipped_steps(self) -> int:
        """Returns the number of skipped steps so far, of the branch with more of them."""
        return max(map(len, self.skipped_indices.values()), default=0)

    def make_record(self) -> dict[str, Any] | None:
        """Returns the policy and the steps that each branch computed, for the JSON record."""
        if self.policy is None:
            return None
        computed = self.computed_indices
        if self._sync_branches and "cond" in computed:  # the other ranks compute the same steps
            computed = dict.fromkeys(BRANCHES, computed["cond"])
        return {"policy": self.policy.settings.policy, "computed": computed}

    def summarize(self) -> str | None:
        """Summarizes the skipped steps in one line."""
        if self.policy is None:
            return None
        skipped = [
            f"{name} {len(steps)} of {self._num_steps}"
            for name, steps in self.skipped_indices.items()
        ]
        description = {
            "blocks": "steps skipped",
            "network": "steps skipped",
            "attention": "steps without self-attention",
            "uncond": "steps without a branch",
        }[self.policy.skips]
        name = self.policy.settings.policy
        return f"Step cache {name}: {description}: {', '.join(skipped) or 'none'}."
