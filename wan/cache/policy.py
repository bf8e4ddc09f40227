"""What a step cache policy is, and the caches of a pipeline's runs.

A policy is one class in a file beside this one and one row of `wan.settings.step_cache.POLICIES`.
What it checks and lists is known before the run and needs no torch; the cache that it makes does.
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
"""What a cache leaves out of a step: blocks, self-attention, or the unconditional branch."""
Computed = tuple[bool, ...]
"""For each step, whether it computes what the policy could leave out."""
Lists = dict[str, Computed]
"""Guidance branch -> its list."""
Changes = Callable[[str, Sequence[float]], Sequence[float]]
"""changes(expert, timesteps): of each step, how much its time embedding differs from the last."""


class Policy(ABC):
    """Decides which steps of a run are computed; what it is told is checked when it is made.

    Attributes:
        skips: What it leaves out.
        first: How many blocks, from the first one on, are computed in every step.
        decides: A step that the list leaves out is computed all the same where the residual of the
            first blocks has changed by more than the threshold.
        by_shift: It holds only for the noise levels that `sample_shift` makes.
        settings: Its parameters.
        preset: The task.
        content: What has to be equal on all ranks and is no setting; None: nothing.
    """

    skips: ClassVar[Skips] = "blocks"
    first: ClassVar[int] = 0
    decides: ClassVar[bool] = False
    by_shift: ClassVar[bool] = False
    content: Any = None

    def __init__(self, settings: StepCache, preset: Preset, folder: Path | None = None) -> None:
        """Refuses parameters that do not go with the task or the checkpoint's folder."""
        self.settings, self.preset = settings, preset

    @abstractmethod
    def own(self, request: Request, changes: Changes | None) -> Lists | None:
        """Returns the lists by the policy's own rule; None where it needs `changes` of networks."""

    def check(self, request: Request) -> tuple[str, ...]:
        """Returns notices about a video, and refuses one whose steps or guidance do not fit."""
        if request.sample_steps < FEWEST_STEPS and not self.settings.step_cache_force:
            raise InputError(
                "`step_cache`",
                self.settings.policy,
                f"with {request.sample_steps} steps: so few are too far apart for one to stand for "
                "another",
                "drop it, or add `step_cache_force`",
            )
        return ()

    def lists(
        self, request: Request, together: bool = False, changes: Changes | None = None
    ) -> Lists | None:
        """Returns what a run computes: what the policy's rule says, and what is always computed.

        The first step of each expert has nothing to reuse. `step_cache_warmup` adds steps to it,
        and the last step of each expert.

        Args:
            request: The video.
            together: The guidance branches must agree, since other ranks compute each.
            changes: Of the loaded networks; without it, the lists of some policies are None.
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
        """Says in one line what a plan promises. The arguments are those of `lists`."""
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
        """Makes what is kept in runs.

        Args:
            together: As in `lists`.
            agree: How the ranks of a video take a decision; None: they are one process.
        """
        from wan.cache.residual import ResidualCache

        return ResidualCache(self, together, agree)


def make(settings: StepCache, preset: Preset, folder: Path | None = None) -> Policy | None:
    """Makes the policy that the settings ask for, with the arguments and errors of `Policy`."""
    row = POLICIES.get(settings.policy)
    return None if row is None else resolve_name(row.make)(settings, preset, folder)


def phases(experts: Sequence[str]) -> list[tuple[str, int, int]]:
    """Returns each expert with its first step and the end of its steps."""
    found, first = [], 0
    for expert, group in groupby(experts):
        end = first + len(list(group))
        found.append((expert, first, end))
        first = end
    return found


def forced(experts: Sequence[str], warmup: int) -> Computed:
    """Returns the steps that are computed whatever a policy says; see `Policy.lists`."""
    always = [False] * len(experts)
    for _, first, end in phases(experts):
        count = min(max(warmup, 1), end - first)
        always[first : first + count] = [True] * count
        always[end - 1] |= warmup > 0
    return tuple(always)


def _ranges(row: Computed) -> str:
    """Writes the computed steps as the policy `steps` takes them."""
    found = []
    for computed, group in groupby(range(len(row)), key=row.__getitem__):
        first, *others = group
        if computed:
            found.append(f"{first}-{others[-1]}" if others else str(first))
    return ",".join(found)


class Cache:
    """What is kept in the runs of a pipeline. This base class keeps nothing, without a policy.

    Attributes:
        policy: What decides; None: every step is computed.
        changes: See `Policy.own`; set where the networks are known.
        listed: The policy's lists; empty outside of a run, where everything is computed.
        computed: Guidance branch -> steps of this run that were computed.
        skipped: Guidance branch -> steps of this run that were not.
    """

    rehearsed: ClassVar[Computed] = (True,) * TRAIN_TIMESTEPS
    """The list of a plan's steps, which keep what a run would keep."""

    def __init__(self, policy: Policy | None = None, together: bool = False) -> None:
        """Takes the arguments of `Policy.cache`."""
        self.policy, self._together = policy, together
        self.changes: Changes | None = None
        self.listed: Lists = {}
        self.computed: dict[str, list[int]] = {}
        self.skipped: dict[str, list[int]] = {}
        self._steps = 0

    def at(self, place: Skips) -> Any:
        """Returns this cache if it is called at this place, else None."""
        return self if self.policy is not None and self.policy.skips == place else None

    def start(self, request: Request) -> None:
        """Begins a video."""
        self._steps = request.sample_steps
        if self.policy is not None:
            lists = self.policy.lists(request, self._together, self.changes)
            assert lists is not None, "the networks are known"
            self.begin(lists)

    def begin(self, lists: Lists) -> None:
        """Begins a run with these lists; nothing is kept from the run before."""
        self.end()
        self.listed, self.computed, self.skipped = lists, {}, {}

    def end(self) -> None:
        """Frees what is kept."""
        self.listed = {}

    def kept_bytes(self) -> int:
        """Returns the bytes of what is kept and belongs to no layer."""
        return 0

    def note(self, branch: str, step: int, computes: bool, **facts: object) -> None:
        """Notes a decision for the record, once a step, and for a trace, at each call."""
        steps = (self.computed if computes else self.skipped).setdefault(branch, [])
        if step not in steps:
            steps.append(step)
        decision = "computed" if computes else "skipped"
        trace.mark("cache", what=self.policy and self.policy.skips, decision=decision, **facts)

    def skipped_steps(self) -> int:
        """Counts the steps of this run so far in which a branch left something out."""
        return max(map(len, self.skipped.values()), default=0)

    def record(self) -> dict[str, Any] | None:
        """Returns the policy and the steps that each branch computed, for the JSON record."""
        if self.policy is None:
            return None
        computed = self.computed
        if self._together and "cond" in computed:  # the other half of the ranks does the same
            computed = dict.fromkeys(BRANCHES, computed["cond"])
        return {"policy": self.policy.settings.policy, "computed": computed}

    def summary(self) -> str | None:
        """Says in one line what was skipped."""
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
