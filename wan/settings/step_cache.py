"""Step caches: which steps compute all blocks of the network, and which reuse what is kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from wan.settings.errors import InputError
from wan.settings.execution import Execution
from wan.settings.fields import loading
from wan.settings.parallel import Parallel
from wan.settings.presets import TRAIN_TIMESTEPS, Preset
from wan.settings.request import Request
from wan.settings.values import Reader, choice, integer, listed, path, real, shown, switch

POLICIES = ("none", "first_block", "mag", "tea", "attention", "cfg")
FEWEST_STEPS = 8


def _policy(name: str, raw: Any) -> str:
    if isinstance(raw, str) and raw.startswith("steps:"):
        listed(name, raw.partition(":")[2])
        return raw
    if raw not in POLICIES:
        raise InputError(
            f"{name} is {shown(raw)}; it must be {', '.join(POLICIES)}, or steps:LIST."
        )
    return str(raw)


def _coefficients(name: str, raw: Any) -> tuple[float, ...]:
    parts = raw.split(",") if isinstance(raw, str) else raw
    try:
        found = tuple(float(part) for part in parts)
    except (TypeError, ValueError):
        found = ()
    if not found or any(abs(value) == float("inf") or value != value for value in found):
        raise InputError(
            f"{name} is {shown(raw)}; give numbers with commas between them, highest power first."
        )
    return found


policy = Reader(_policy)
"""A name of POLICIES, or `steps:` and a list."""
coefficients = Reader(_coefficients)
"""Numbers with commas between them, or a list."""
_STEP = integer(0, TRAIN_TIMESTEPS)


@dataclass(frozen=True)
class StepCache:
    """A policy and its parameters.

    Attributes:
        step_cache: One of POLICIES, or "steps:" and a list of the steps that are computed.
        step_cache_threshold: What a policy compares with; None: the policy's own (THRESHOLDS).
        step_cache_warmup: Steps at the start of each expert that are always computed, as is its
            last one; 0 leaves that to the policy's own rule.
        step_cache_max_skip: Most steps in a row that `mag` skips.
        step_cache_retention: Share of an expert's steps that `mag` computes at its start.
        step_cache_order: 0 adds the kept residual as it is, 1 extrapolates it linearly.
        step_cache_curve: File of a curve for `mag`; None: the checkpoint's or the published one.
        step_cache_coefficients: Of `tea`'s polynomial, highest power first; None: published ones.
        step_cache_force: Also with few steps.
        use_attentioncache: The Ascend adaptation's name for the policy "attention".
        attentioncache_ratio: Has no effect, as there.
        attentioncache_interval: Every how many steps attention is computed.
        start_step: Attention is computed up to this step, from 0.
        end_step: Attention is computed behind this step; None: as many steps before the end as the
            adaptation's 37 of 40.
    """

    step_cache: str = loading(
        "none", policy, f"{', '.join(POLICIES)}, or steps:LIST", diffusers="policy"
    )
    step_cache_threshold: float | None = loading(
        None, real(0, 100), "what first_block, mag, tea compare with", diffusers="threshold"
    )
    step_cache_warmup: int = loading(
        1, _STEP, "steps of each expert that are computed first (1)", diffusers="warmup"
    )
    step_cache_max_skip: int = loading(
        2, _STEP, "most steps in a row that mag skips (2)", diffusers="max_skip"
    )
    step_cache_retention: float = loading(
        0.2, real(0, 1), "share of steps that mag computes first (0.2)", diffusers="retention"
    )
    step_cache_order: int = loading(
        0, choice(0, 1), "1: extrapolate what is kept (default 0)", diffusers="order"
    )
    step_cache_curve: Path | None = loading(
        None, path, "of mag; default: the checkpoint's or published", diffusers="curve"
    )
    step_cache_coefficients: tuple[float, ...] | None = loading(
        None, coefficients, "of tea, highest power first", diffusers="coefficients"
    )
    step_cache_force: bool = loading(
        False, switch, "also with fewer than 8 steps", diffusers="force"
    )
    use_attentioncache: bool = loading(
        False,
        switch,
        "--step_cache attention, as in the Ascend fork",
        diffusers="use_attentioncache",
    )
    attentioncache_ratio: float = loading(
        1.2, real(0, 1000), "has no effect, as in the Ascend fork", diffusers="attentioncache_ratio"
    )
    attentioncache_interval: int = loading(
        4,
        integer(1, TRAIN_TIMESTEPS),
        "steps between two (4)",
        diffusers="attentioncache_interval",
    )
    start_step: int = loading(
        12, _STEP, "attention is computed up to this step (12)", diffusers="start_step"
    )
    end_step: int | None = loading(
        None, _STEP, "attention is computed behind this step", diffusers="end_step"
    )

    @property
    def policy(self) -> str:
        """The policy's name; "steps" for a list."""
        return "attention" if self.use_attentioncache else self.step_cache.partition(":")[0]

    @property
    def steps(self) -> frozenset[int]:
        """The steps that are computed, of the policy "steps"."""
        return frozenset(listed("--step_cache", self.step_cache.partition(":")[2]))

    @property
    def threshold(self) -> float:
        """What the policy compares with."""
        given = self.step_cache_threshold
        return THRESHOLDS[self.policy] if given is None else given


# first_block: ParaAttention's examples (0.06 to 0.12) and cache-dit's default; mag: its authors'
# for Wan2.2, with max_skip 2 and retention 0.2; tea: its authors' for Wan2.1 T2V.
THRESHOLDS = {"first_block": 0.08, "mag": 0.04, "tea": 0.2}


def is_read(name: str, values: Mapping[str, Any]) -> bool:
    """Whether a setting has an effect beside the others; of other subjects, True."""
    names = {field.name for field in fields(StepCache)}
    cache = StepCache(**{key: value for key, value in values.items() if key in names})
    return name not in READS or cache.policy in READS[name]


# Parameter -> the policies that read it.
READS = {
    "step_cache_threshold": ("first_block", "mag", "tea"),
    "step_cache_warmup": ("first_block", "mag", "tea"),
    "step_cache_max_skip": ("mag",),
    "step_cache_retention": ("mag",),
    "step_cache_order": ("first_block", "mag", "tea", "steps"),
    "step_cache_curve": ("mag",),
    "step_cache_coefficients": ("tea",),
    "attentioncache_ratio": ("attention",),
    "attentioncache_interval": ("attention",),
    "start_step": ("attention",),
    "end_step": ("attention",),
}
_DEFAULT = asdict(StepCache())


def given(cache: StepCache) -> dict[str, Any]:
    """The parameters that are not as by default."""
    return {name: value for name, value in asdict(cache).items() if value != _DEFAULT[name]}


def check(cache: StepCache, parallel: Parallel, execution: Execution) -> None:
    """InputError for what contradicts."""
    if cache.use_attentioncache and cache.step_cache not in ("none", "attention"):
        raise InputError(
            f"--use_attentioncache is --step_cache attention, and --step_cache {cache.step_cache} "
            "is another policy; drop one of them."
        )
    for name, policies in READS.items():
        if name in given(cache) and cache.policy not in policies:
            raise InputError(
                f"--{name} has no effect on --step_cache {cache.policy}; it belongs to "
                f"{', '.join(policies)}: drop it."
            )
    if cache.policy == "cfg" and parallel.cfg_size == 2:
        raise InputError(
            "--step_cache cfg leaves out the unconditional branch, for which --cfg_size 2 has half "
            "of the ranks; drop one of them."
        )
    if cache.policy == "attention" and execution.compile:
        raise InputError(
            "--compile does not work with --step_cache attention, which skips a part of a block; "
            "drop one of them."
        )


def check_request(cache: StepCache, request: Request) -> None:
    """InputError for what does not go with a request's steps or guidance."""
    steps = request.sample_steps
    if cache.policy == "none":
        return
    if steps < FEWEST_STEPS and not cache.step_cache_force:
        raise InputError(
            f"--step_cache {cache.policy} with {steps} steps: so few are too far apart for one to "
            "stand for another; drop it, or add --step_cache_force."
        )
    if cache.policy == "steps":
        late = [step for step in cache.steps if step >= steps]
        if late:
            raise InputError(
                f"--step_cache steps: names step {max(late)}, but there are {steps} "
                f"(--sample_steps): 0 to {steps - 1}."
            )
    if cache.policy == "mag":
        _check_curve(request)
    if cache.policy == "cfg" and not request.guided:
        raise InputError(
            "--step_cache cfg rebuilds the unconditional branch, which --sample_guide_scale 1 does "
            "not compute; drop one of them."
        )
    if cache.policy == "attention":
        last = end_step(cache, steps)
        if not cache.start_step < last:
            raise InputError(
                f"--start_step {cache.start_step} is not before --end_step {last} of {steps} "
                "steps, so no attention is kept; choose others."
            )


def _check_curve(request: Request) -> None:
    """InputError for levels that no curve of MagCache was made for."""
    own = {"timesteps": request.timesteps, "boundary_step": request.boundary_step}
    rcm = request.sample_solver == "rcm"
    others = [f"--{name}" for name, value in own.items() if value is not None]
    if others or rcm:
        raise InputError(
            "--step_cache mag holds for the steps that --sample_shift makes, not for "
            f"{others[0] if others else 'those of rcm'}; use first_block, or drop one of them."
        )


def end_step(cache: StepCache, steps: int) -> int:
    """Behind which step `attention` computes again: 3 before the end, as 37 of the usual 40."""
    return steps - 3 if cache.end_step is None else min(cache.end_step, steps - 1)


# (task, with an image) -> coefficients of TeaCache's polynomial in the time embedding e.
TEA = {
    "t2v-14B": (-5784.54975374, 5449.50911966, -1811.16591783, 256.27178429, -13.02252404),
    "t2v-1.3B": (2396.76752, -1311.10545, 201.331979, -8.29855975, 0.137887774),
    "ti2v-5B": (157472.669, -115702.395, 31076.1669, -3831.16651, 221.608777, -4.81179567),
}


def tea_coefficients(cache: StepCache, preset: Preset) -> tuple[float, ...]:
    """The given ones, else the published ones of the task; InputError where there are none."""
    if cache.step_cache_coefficients is not None:
        return cache.step_cache_coefficients
    if preset.task not in TEA:
        raise InputError(
            f"--step_cache tea has no published coefficients for {preset.task} "
            f"(there are for {', '.join(TEA)}); give --step_cache_coefficients, or use mag."
        )
    return TEA[preset.task]
