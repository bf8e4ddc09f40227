"""The base classes of step cache policies and of step caches.

A policy is a class in a module of this package and a row of `wan.settings.step_cache.POLICIES`. It
checks a video and lists its steps before the run, without torch; its cache needs torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from wan import trace
from wan.settings.errors import InputError
from wan.settings.presets import TRAIN_TIMESTEPS, Preset
from wan.settings.request import Request
from wan.settings.step_cache import POLICIES, StepCache
from wan.settings.timesteps import schedule

if TYPE_CHECKING:
    from wan.cache.residual import Agree

BRANCHES = ("cond", "uncond")
FEWEST_STEPS = 8
Skips = Literal["blocks", "attention", "uncond"]
"""The part of a step that a cache skips: blocks, self-attention, or the uncond branch."""
Computed = tuple[bool, ...]
"""For each step, whether the part that the policy may skip is computed."""
Lists = dict[str, Computed]
"""Guidance branch -> its computed steps."""
Changes = Callable[[str, Sequence[float]], Sequence[float]]
"""compute_changes(expert, timesteps): relative change of the time embedding in each step."""


class Policy(ABC):
    """Decides which steps of a run are computed; the constructor checks its parameters.

    Attributes:
        num_first_blocks: Leading blocks that every step computes.
        decides_per_step: A step that is not listed is computed nevertheless if the residual of the
            first blocks has changed by more than the threshold.
        requires_shift: Valid only for the noise schedule of `sample_shift`.
        content: Data, not settings, that must be equal on all ranks; None: no data.
    """

    skips: ClassVar[Skips] = "blocks"
    first: ClassVar[int] = 0
    decides: ClassVar[bool] = False
    by_shift: ClassVar[bool] = False
    content: Any = None

    def __init__(self, settings: StepCache, preset: Preset, folder: Path | None = None) -> None:
        """Refuses parameters that do not fit the task or the checkpoint folder."""
        self.settings, self.preset = settings, preset

    @abstractmethod
    def own(self, request: Request, changes: Changes | None) -> Lists | None:
        """Returns the steps that the policy's rule computes; None if it needs `compute_changes`."""

    def check(self, request: Request) -> tuple[str, ...]:
        """Returns notices about a video; refuses it if its steps or guidance do not fit."""
        if request.sample_steps < FEWEST_STEPS and not self.settings.step_cache_force:
            raise InputError(
                "`step_cache`",
                self.settings.policy,
                f"with {request.sample_steps} steps: so few are too far apart for one to replace "
                "another",
                "drop it, or add `step_cache_force`",
            )
        return ()

    def lists(
        self, request: Request, together: bool = False, changes: Changes | None = None
    ) -> Lists | None:
        """Returns the steps that a run computes: those of the policy's rule and forced ones.

        The first step of each expert has nothing to reuse. `step_cache_warmup` forces further first
        steps, and the last step, of each expert.

        Args:
            sync_branches: Both guidance branches compute the same steps, because different ranks
                compute them.
            compute_changes: Of the loaded networks; some policies return None without it.
        """
        own = self.own(request, changes)
        if own is None:
            return None
        paced = "step_cache_warmup" in POLICIES[self.settings.policy].reads
        always = forced(schedule(request).experts, self.settings.step_cache_warmup if paced else 0)
        found = {name: tuple(map(any, zip(always, own[name], strict=True))) for name in BRANCHES}
        if together:
            found = dict.fromkeys(BRANCHES, tuple(map(any, zip(*found.values(), strict=True))))
        return found

    def describe(self, request: Request, together: bool) -> str:
        """Describes the computed steps in one line, for a plan; arguments as for `list_steps`."""
        lists, name = self.lists(request, together), self.settings.policy
        if self.decides:
            threshold = self.settings.threshold
            return f"Step cache {name}: decided in the run, by threshold {threshold:g}"
        if lists is None:
            return f"Step cache {name}: known when the networks' time embeddings are read"
        rows = {branch: lists[branch] for branch in BRANCHES[: 1 + request.guided]}
        branches = [
            f"{branch} computes {sum(row)} of {len(row)} steps ({_ranges(row)})"
            for branch, row in rows.items()
        ]
        factor = sum(map(len, rows.values())) / sum(map(sum, rows.values()))
        gain = f"at most {factor:.2f} times as fast"
        if self.skips == "attention":
            gain = "the other steps leave self-attention out"
        return f"Step cache {name}: {'; '.join(branches)}; {gain}"

    def cache(self, together: bool = False, agree: Agree | None = None) -> Cache:
        """Makes the cache of this policy.

        Args:
            sync_branches: As for `list_steps`.
            all_agree: Decides for all ranks of a video; None: there is one process.
        """
        from wan.cache.residual import ResidualCache

        return ResidualCache(self, together, agree)


def make(settings: StepCache, preset: Preset, folder: Path | None = None) -> Policy | None:
    """Makes the policy of the settings; arguments and errors as for `Policy`."""
    row = POLICIES.get(settings.policy)
    return None if row is None else resolve_name(row.make)(settings, preset, folder)


def phases(experts: Sequence[str]) -> list[tuple[str, int, int]]:
    """Splits the steps into (expert, first step, end)."""
    found, first = [], 0
    for expert, group in groupby(experts):
        end = first + len(list(group))
        found.append((expert, first, end))
        first = end
    return found


def forced(experts: Sequence[str], warmup: int) -> Computed:
    """Lists the steps that are computed under every policy; see `Policy.list_steps`."""
    always = [False] * len(experts)
    for _, first, end in phases(experts):
        count = min(max(warmup, 1), end - first)
        always[first : first + count] = [True] * count
        always[end - 1] |= warmup > 0
    return tuple(always)


def _ranges(row: Computed) -> str:
    """Formats the computed steps as an argument of the policy `steps`."""
    found = []
    for computed, group in groupby(range(len(row)), key=row.__getitem__):
        first, *others = group
        if computed:
            found.append(f"{first}-{others[-1]}" if others else str(first))
    return ",".join(found)


class Cache:
    """The step cache of a pipeline. This base class has no policy and caches nothing.

    Attributes:
        policy: None: every step is computed.
        compute_changes: See `Policy.compute_steps`; set by the owner of the networks.
        step_lists: The policy's lists; empty outside of a run, where everything is computed.
        computed: Guidance branch -> computed steps of this run.
        skipped: Guidance branch -> skipped steps of this run.
    """

    rehearsed: ClassVar[Computed] = (True,) * TRAIN_TIMESTEPS
    """Computed steps of a simulated run, which caches as much as a real one."""

    def __init__(self, policy: Policy | None = None, together: bool = False) -> None:
        """Takes the arguments of `Policy.make_cache`."""
        self.policy, self._together = policy, together
        self.changes: Changes | None = None
        self.listed: Lists = {}
        self.computed: dict[str, list[int]] = {}
        self.skipped: dict[str, list[int]] = {}
        self._steps = 0

    def at(self, place: Skips) -> Any:
        """Returns this cache if it skips this part of a step, else None."""
        return self if self.policy is not None and self.policy.skips == place else None

    def start(self, request: Request) -> None:
        """Lists the steps of a video and starts its run."""
        self._steps = request.sample_steps
        if self.policy is not None:
            lists = self.policy.lists(request, self._together, self.changes)
            assert lists is not None, "compute_changes is set"
            self.begin(lists)

    def begin(self, lists: Lists) -> None:
        """Starts a run with these lists, with an empty cache."""
        self.end()
        self.listed, self.computed, self.skipped = lists, {}, {}

    def end(self) -> None:
        """Frees the cached tensors."""
        self.listed = {}

    def kept_bytes(self) -> int:
        """Counts the bytes of cached tensors that belong to no layer."""
        return 0

    def note(self, branch: str, step: int, computes: bool, **facts: object) -> None:
        """Records a decision once per step for the record, and at each call for a trace."""
        steps = (self.computed if computes else self.skipped).setdefault(branch, [])
        if step not in steps:
            steps.append(step)
        decision = "computed" if computes else "skipped"
        trace.mark("cache", what=self.policy and self.policy.skips, decision=decision, **facts)

    def skipped_steps(self) -> int:
        """Counts the steps of this run in which a branch was skipped so far."""
        return max(map(len, self.skipped.values()), default=0)

    def record(self) -> dict[str, Any] | None:
        """Returns the policy and the steps that each branch computed, for the JSON record."""
        if self.policy is None:
            return None
        computed = self.computed
        if self._together and "cond" in computed:  # the other ranks compute the same steps
            computed = dict.fromkeys(BRANCHES, computed["cond"])
        return {"policy": self.policy.settings.policy, "computed": computed}

    def summary(self) -> str | None:
        """Summarizes the skipped steps in one line."""
        if self.policy is None:
            return None
        skipped = [f"{name} {len(steps)} of {self._steps}" for name, steps in self.skipped.items()]
        what = {
            "blocks": "steps skipped",
            "attention": "steps without self-attention",
            "uncond": "steps without a branch",
        }[self.policy.skips]
        name = self.policy.settings.policy
        return f"Step cache {name}: {what}: {', '.join(skipped) or 'none'}."
