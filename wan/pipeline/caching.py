"""The step cache of a run: what its policy makes of a request, before the run where it can.

Torch is needed by `StepCaches` only, which the pipeline has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wan.cache import curves, lists
from wan.cache.curves import BRANCHES, Curve
from wan.cache.lists import Computed
from wan.settings import step_cache, timesteps
from wan.settings.errors import InputError
from wan.settings.presets import TRAIN_TIMESTEPS, Preset
from wan.settings.request import Request
from wan.settings.step_cache import StepCache

if TYPE_CHECKING:
    from wan.cache.attention import AttentionCache
    from wan.cache.guidance import GuidanceCache
    from wan.cache.residual import Agree, ResidualCache

Lists = dict[str, Computed]
"""Guidance branch -> whether each step computes all that the policy could leave out."""
Changes = Callable[[str, Sequence[float]], Sequence[float]]
"""changes(expert, timesteps): of each step, how much its time embedding differs from the last."""


def find_curve(cache: StepCache, folder: Path | None, preset: Preset) -> Curve | None:
    """The curve that `mag` takes: the given one or the checkpoint's; None: the published one.

    Raises:
        InputError: There is none, or it was made for another task.
    """
    if cache.policy != "mag":
        return None
    own = None if folder is None else folder / curves.FILE
    if cache.step_cache_curve is not None:
        curve = curves.load(cache.step_cache_curve)
    elif own is not None and own.is_file():
        curve = curves.load(own)
    elif curves.published(preset.task, with_image=False) is None:
        raise InputError(
            f"--step_cache mag has no published curve for {preset.task}; make one with "
            "tools/calibrate_mag.py and give it with --step_cache_curve, or use first_block."
        )
    else:
        return None
    if curve.task != preset.task:
        raise InputError(
            f"{curve.origin} was made for {curve.task}, not for {preset.task}; give another "
            "--step_cache_curve."
        )
    return curve


def notices(cache: StepCache, curve: Curve | None, request: Request) -> tuple[str, ...]:
    """Of a request; InputError for what does not go with it."""
    step_cache.check_request(cache, request)
    if cache.policy == "tea":
        step_cache.tea_coefficients(cache, request.preset)
    static(cache, curve, request, False)
    if cache.policy != "mag":
        return ()
    taken, found = curve or _published(request), []
    if curve is None:
        found.append(
            f"{taken.origin} serves --step_cache mag; it was made for the official weights."
        )
    if taken.steps != request.sample_steps:
        found.append(
            f"{taken.origin} was made with {taken.steps} steps; each of the "
            f"{request.sample_steps} takes the nearest of them."
        )
    return tuple(found)


def _published(request: Request) -> Curve:
    found = curves.published(request.preset.task, request.image_size is not None)
    assert found is not None, "find_curve has looked"
    return found


def static(
    cache: StepCache,
    curve: Curve | None,
    request: Request,
    together: bool,
    changes: Changes | None = None,
) -> Lists | None:
    """What is computed in each step; None where that is not known before the run.

    Of First Block Cache: what is computed whatever it finds.

    Args:
        cache: The policy.
        curve: Of `mag`, as `find_curve` says.
        request: The video.
        together: The guidance branches must agree, since other ranks compute each.
        changes: Of `tea`; known where the networks are.
    """
    experts, policy = timesteps.schedule(request).experts, cache.policy
    if policy == "none" or (policy == "tea" and changes is None):
        return None
    paced = policy in ("first_block", "mag", "tea")  # the others say all themselves
    always = lists.forced(experts, cache.step_cache_warmup if paced else 0)
    found = {}
    for branch in BRANCHES:
        own = _own(cache, curve, request, experts, branch, changes)
        found[branch] = tuple(a or b for a, b in zip(always, own, strict=True))
    if together:
        both = tuple(map(any, zip(*found.values(), strict=True)))
        found = dict.fromkeys(BRANCHES, both)
    return found


def _own(
    cache: StepCache,
    curve: Curve | None,
    request: Request,
    experts: tuple[str, ...],
    branch: str,
    changes: Changes | None,
) -> Computed:
    """What the policy itself computes of a guidance branch."""
    steps = len(experts)
    match cache.policy:
        case "steps":
            return tuple(step in cache.steps for step in range(steps))
        case "mag":
            fitted = _fitted(curve or _published(request), request, experts)
            return lists.mag(
                fitted.ratios[branch],
                experts,
                branch,
                request.preset.kind,
                cache.threshold,
                cache.step_cache_max_skip,
                cache.step_cache_retention,
            )
        case "tea":
            assert changes is not None
            polynomial = step_cache.tea_coefficients(cache, request.preset)
            return lists.tea(_changes(request, experts, changes), polynomial, cache.threshold)
        case "attention":
            last = step_cache.end_step(cache, steps)
            return lists.attention(steps, cache.attentioncache_interval, cache.start_step, last)
        case "cfg" if branch == "uncond":
            width, height = request.video_size
            return lists.cfg(experts, width * height >= 1280 * 704)
        case "cfg":
            return (True,) * steps
    return (False,) * steps  # First Block Cache looks at the data


def _fitted(curve: Curve, request: Request, experts: tuple[str, ...]) -> Curve:
    there = timesteps.schedule(request, curve.steps).high_noise_steps
    here = experts.count("high_noise")
    return curve.fitted(request.sample_shift, (here, there), len(experts))


def _changes(request: Request, experts: tuple[str, ...], changes: Changes) -> list[float]:
    """Of all steps; each expert's first has none."""
    times = timesteps.schedule(request).timesteps
    found: list[float] = []
    for phase in lists.phases(experts):
        found += changes(phase.expert, times[phase.first : phase.last])
    return found


def describe(cache: StepCache, computed: Lists | None, guided: bool) -> str:
    """One line for a plan. computed: what `static` says. guided: both branches are computed."""
    if cache.policy == "first_block":
        return f"Step cache first_block: decided in the run, by threshold {cache.threshold:g}"
    if computed is None:
        return f"Step cache {cache.policy}: known when the networks' time embeddings are read"
    branches = BRANCHES if guided else BRANCHES[:1]
    parts, total, done = [], 0, 0
    for branch in branches:
        row = computed[branch]
        total, done = total + len(row), done + sum(row)
        parts.append(f"{branch} computes {sum(row)} of {len(row)} steps ({_ranges(row)})")
    if cache.policy == "attention":
        gain = "the other steps leave self-attention out"
    else:
        gain = f"at most {total / done:.2f} times as fast"
    return f"Step cache {cache.policy}: {'; '.join(parts)}; {gain}"


def _ranges(row: Computed) -> str:
    """The computed steps, as `steps:` takes them."""
    found = []
    for computed, group in groupby(enumerate(row), key=lambda item: item[1]):
        places = [place for place, _ in group]
        if computed:
            found.append(f"{places[0]}-{places[-1]}" if len(places) > 1 else str(places[0]))
    return ",".join(found)


class StepCaches:
    """What is kept in a run, for all networks of a pipeline.

    residual: skips blocks. attention: skips self-attention. guidance: skips the unconditional
    branch. At most one of them is there, as the policy says.
    """

    def __init__(
        self,
        cache: StepCache,
        curve: Curve | None,
        together: bool,
        residual: ResidualCache | None = None,
    ) -> None:
        """together: as in `static`."""
        self.cache, self.curve, self.together = cache, curve, together
        self.residual = residual
        self.attention: AttentionCache | None = None
        self.guidance: GuidanceCache | None = None
        self.changes: Changes | None = None  # of `tea`; the builder knows the networks
        self._steps = 0

    @classmethod
    def of(
        cls, cache: StepCache, curve: Curve | None, together: bool, agree: Agree | None
    ) -> StepCaches:
        """What the policy needs. agree: how ranks decide; None: one process."""
        from wan.cache.attention import AttentionCache
        from wan.cache.guidance import GuidanceCache
        from wan.cache.residual import ResidualCache, alone

        policy, found = cache.policy, cls(cache, curve, together)
        if policy in ("first_block", "mag", "tea", "steps"):
            found.residual = ResidualCache(agree or alone)
        elif policy == "attention":
            found.attention = AttentionCache()
        elif policy == "cfg":
            found.guidance = GuidanceCache()
        return found

    @property
    def _active(self) -> ResidualCache | AttentionCache | GuidanceCache | None:
        return self.residual or self.attention or self.guidance

    def begin(self, request: Request) -> None:
        """A run begins: nothing is kept from another."""
        self._steps = request.sample_steps
        computed = static(self.cache, self.curve, request, self.together, self.changes)
        if self._active is None:
            return
        assert computed is not None
        if self.residual is not None:
            threshold = self.cache.threshold if self.cache.policy == "first_block" else None
            self.residual.begin(self._plan(computed, threshold))
        elif self.attention is not None:
            self.attention.begin(computed)
        elif self.guidance is not None:
            self.guidance.begin(computed["uncond"])

    def rehearse(self) -> None:
        """For a plan: every step is computed, and what it would keep is kept."""
        if self.residual is not None:
            everything = dict.fromkeys(BRANCHES, (True,) * TRAIN_TIMESTEPS)
            threshold = 0.0 if self.cache.policy == "first_block" else None
            self.residual.begin(self._plan(everything, threshold))
        elif self.attention is not None:
            first = (True, *(False,) * TRAIN_TIMESTEPS)
            self.attention.begin(dict.fromkeys(BRANCHES, first))

    def _plan(self, computed: Lists, threshold: float | None) -> lists.Plan:
        first = 1 if self.cache.policy in ("first_block", "steps") else 0
        return lists.Plan(computed, threshold, self.cache.step_cache_order, first)

    def kept_bytes(self) -> int:
        """Of what is kept beside self-attention's outputs."""
        return 0 if self.residual is None else self.residual.kept_bytes()

    def end(self) -> None:
        """Frees what is kept."""
        if self.residual is not None:
            self.residual.clear()
        elif self.attention is not None:
            self.attention.clear()

    def skipped(self) -> int:
        """Steps of this run so far in which a branch left something out."""
        skipped = {} if self._active is None else self._active.skipped
        return max(map(len, skipped.values()), default=0)

    def record(self) -> dict[str, Any] | None:
        """For the JSON record: the policy, and which steps each branch of this rank computed."""
        if self._active is None:
            return None
        computed = self._active.computed
        if self.together and "cond" in computed:  # the other half of the ranks does the same
            computed = dict.fromkeys(BRANCHES, computed["cond"])
        return {"policy": self.cache.policy, "computed": computed}

    def summary(self) -> str | None:
        """One line on what was skipped."""
        if self._active is None:
            return None
        parts = [
            f"{branch} {len(steps)} of {self._steps}"
            for branch, steps in self._active.skipped.items()
        ]
        what = {"attention": "steps without self-attention", "cfg": "steps without a branch"}
        name = what.get(self.cache.policy, "steps skipped")
        return f"Step cache {self.cache.policy}: {name}: {', '.join(parts) or 'none'}."
