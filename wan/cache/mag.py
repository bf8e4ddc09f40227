"""MagCache: skips a step while a calibrated curve predicts a small change of the residual.

ratio[i] of a guidance branch is mean |R_i| / |R_(i-1)| over tokens, where R_i is the sum that all
blocks add to the residual stream in step i (arXiv:2506.09045); ratio[0] is 1. A curve is valid for
the task, shift and boundary of its calibration.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wan.cache.policy import BRANCHES, ComputeChanges, StepLists, StepMask
from wan.cache.residual import ResidualPolicy
from wan.checkpoint.formats.headers import read_json
from wan.settings.errors import InputError
from wan.settings.noise_schedule import make_noise_schedule
from wan.settings.noise_tables import OFFICIAL_TABLE
from wan.settings.presets import Preset
from wan.settings.solvers import SOLVERS
from wan.settings.step_cache import StepCache
from wan.tasks.base import VideoParams
from wan.utils.files import has_file, make_json_kind

CURVE_FILE = "mag_curve.json"
"""File name of the curve in a checkpoint folder."""
CURVE_KIND = make_json_kind(
    "a curve of tools/calibrate_mag.py", "task", "sample_shift", "steps", "ratios"
)
_PUBLISHED = Path(__file__).with_name("magcache_curves.json")
_REMEDY = "make a curve with tools/calibrate_mag.py and give it with `step_cache=mag:curve=FILE`"


@dataclass(frozen=True)
class Curve:
    """A curve and the settings of its calibration run.

    Attributes:
        sample_shift: The shift of the noise schedule.
        steps: Number of sampling steps.
        high_noise_steps: Steps of the high-noise expert; 0 for a single network.
        ratios: Guidance branch -> a ratio for each step.
        origin: File or name of the curve, for messages.
    """

    task: str
    sample_shift: float
    steps: int
    high_noise_steps: int
    ratios: dict[str, tuple[float, ...]]
    origin: str = ""

    def save(self, path: Path) -> None:
        """Writes the JSON that `read_curve` reads."""
        record = {key: value for key, value in asdict(self).items() if key != "origin"}
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    def resample(self, params: VideoParams) -> dict[str, tuple[float, ...]]:
        """Resamples the ratios to the steps of a run: the nearest step of the same expert.

        Raises:
            InputError: The run has another shift or boundary.
        """
        params = params.with_all_steps
        steps, shift = params.sample_steps, params.sample_shift
        high_noise_steps = make_noise_schedule(params).high_noise_steps
        curve_high_noise_steps = make_noise_schedule(params, self.steps).high_noise_steps
        if shift != self.sample_shift:
            raise InputError(
                self.origin,
                why=f"holds for `sample_shift={self.sample_shift:g}`, not {shift:g}",
                remedy=f"use that shift, or {_REMEDY}",
            )
        if curve_high_noise_steps != self.high_noise_steps:
            raise InputError(
                self.origin,
                why=f"was made with {self.high_noise_steps} of {self.steps} steps by the "
                f"high-noise expert; here it would take {curve_high_noise_steps}: "
                "the boundary differs",
                remedy=_REMEDY,
            )
        if steps == self.steps:
            return self.ratios
        experts = (
            (0, high_noise_steps, 0, curve_high_noise_steps),
            (high_noise_steps, steps, curve_high_noise_steps, self.steps),
        )
        index = [
            _find_nearest_step(step, *expert) for expert in experts for step in range(*expert[:2])
        ]
        return {branch: tuple(row[i] for i in index) for branch, row in self.ratios.items()}


def find_other_schedule(params: VideoParams) -> str | None:
    """Returns the setting that replaces the schedule for which curves hold; None if none does."""
    if params.timesteps is not None:
        return "`timesteps`"
    if params.boundary_step is not None:
        return "`boundary_step`"
    if params.sigmas != OFFICIAL_TABLE:
        return f"`sigmas={params.sigmas}`"
    solver = params.sample_solver
    if solver == "rcm" or SOLVERS[solver].forwards_per_step > 1:
        return f"those of `sample_solver={solver}`"
    return None


class Mag(ResidualPolicy):
    """The rule of MagCache's authors for Wan2.2, with a curve of the run's task.

    Attributes:
        curve: Of the parameter curve or of the checkpoint; None: the published curve.
    """

    requires_shift = True

    def __init__(self, settings: StepCache, preset: Preset, folder: Path | None = None) -> None:
        super().__init__(settings, preset, folder)
        self.curve, checkpoint_curve = None, None if folder is None else folder / CURVE_FILE
        if self.parameters["curve"] is not None:
            self.curve = read_curve(self.parameters["curve"])
        elif checkpoint_curve is not None and has_file(checkpoint_curve):
            self.curve = read_curve(checkpoint_curve)
        elif load_published_curve(preset.task, with_image=False) is None:
            raise InputError(
                "`step_cache`",
                "mag",
                f"has no published curve for {preset.task}",
                f"{_REMEDY}, or use `step_cache=first_block`",
            )
        if self.curve is not None and self.curve.task != preset.task:
            raise InputError(
                self.curve.origin,
                why=f"was made for {self.curve.task}, not for {preset.task}",
                remedy="give another one",
            )
        self.content = self.curve and self.curve.ratios

    def check_params(self, params: VideoParams) -> tuple[str, ...]:
        notices = super().check_params(params)
        other_schedule = find_other_schedule(params)
        if other_schedule is not None:
            raise InputError(
                "`step_cache`",
                "mag",
                f"holds for the steps that `sample_shift` makes, not for {other_schedule}",
                "use `step_cache=first_block`, or drop one of them",
            )
        curve = self._get_curve(params)
        curve.resample(params)
        if self.curve is None:
            notices += (
                f"{curve.origin} serves `step_cache=mag`; it was made for the official weights.",
            )
        if curve.steps != params.sample_steps:
            notices += (
                f"{curve.origin} was made with {curve.steps} steps; each of the "
                f"{params.sample_steps} takes the nearest of them.",
            )
        return notices

    def select_steps(
        self, params: VideoParams, compute_changes: ComputeChanges | None
    ) -> StepLists:
        ratios = self._get_curve(params).resample(params)
        experts = make_noise_schedule(params).experts
        return {branch: self.apply_rule(ratios[branch], experts, branch) for branch in BRANCHES}

    def apply_rule(self, ratios: Sequence[float], experts: Sequence[str], branch: str) -> StepMask:
        """Returns which steps one guidance branch computes.

        The error of a skipped step is |1 - product of the ratios since the last computed step|.
        Errors are summed, and a step is skipped while the sum is below the threshold. The first
        steps of each expert are computed, for image-to-video all steps of the high-noise expert.
        The counters are not reset when the expert changes.

        Args:
            ratios: For each step.
            experts: For each step.
            branch: "cond" or "uncond".
        """
        parameters, retention = self.parameters, self.parameters["retention"]
        # The authors count calls, of which a step has two, and truncate some of the bounds.
        num_calls = 2 * len(experts)
        high_calls = 2 * sum(expert == "high_noise" for expert in experts)
        low_noise_start = (num_calls - high_calls) * retention + high_calls

        def is_forced(call: int) -> bool:
            if self.preset.kind == "i2v":
                return call < int(low_noise_start)
            if high_calls:
                return call < int(high_calls * retention) or high_calls <= call <= low_noise_start
            return call < int(num_calls * retention)

        computed, product, error, skips = [], 1.0, 0.0, 0
        for step, ratio in enumerate(ratios):
            is_skipped = False
            if not is_forced(2 * step + (branch == "uncond")):
                product *= ratio
                skips += 1
                error += abs(1 - product)
                is_skipped = error < parameters["threshold"] and skips <= parameters["max_skip"]
                if not is_skipped:
                    product, error, skips = 1.0, 0.0, 0
            computed.append(not is_skipped)
        return tuple(computed)

    def _get_curve(self, params: VideoParams) -> Curve:
        curve = self.curve or load_published_curve(self.preset.task, params.image_size is not None)
        assert curve is not None, "checked in the constructor"
        return curve


def read_curve(path: Path) -> Curve:
    """Reads a curve from a file; raises InputError if the file is none."""
    return _parse_curve(read_json(path), str(path))


def load_published_curve(task: str, with_image: bool) -> Curve | None:
    """Loads the curve that MagCache's authors have published for a task, or None."""
    curves = json.loads(_PUBLISHED.read_text(encoding="utf-8"))
    key = f"{task} ({'image' if with_image else 'text'})" if task == "ti2v-5B" else task
    if key not in curves:
        return None
    curve, ratios = curves[key], {}
    for offset, branch in enumerate(BRANCHES):  # interleaved, from the second step on
        ratios[branch] = [1.0, *curve["ratios"][offset::2]]
    record = {"task": task, "high_noise_steps": 0, **curve, "ratios": ratios}
    return _parse_curve(record, f"The published curve of {key}")


def _parse_curve(record: Any, origin: str) -> Curve:
    try:
        steps = int(record["steps"])
        curve = Curve(
            str(record["task"]),
            float(record["sample_shift"]),
            steps,
            int(record["high_noise_steps"]),
            {name: tuple(map(float, record["ratios"][name])) for name in BRANCHES},
            origin,
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        is_missing = isinstance(error, KeyError) and isinstance(error.args[0], str)
        part = f"it lacks {error.args[0]}" if is_missing else "a value is none of a curve"
        raise InputError(origin, why=f"is no curve of tools/calibrate_mag.py ({part})") from error
    for name, branch_ratios in curve.ratios.items():
        if len(branch_ratios) != steps or not all(0 < ratio < 10 for ratio in branch_ratios):
            raise InputError(origin, why=f"needs {steps} ratios between 0 and 10 for {name}")
    return curve


def _find_nearest_step(step: int, first: int, end: int, curve_first: int, curve_end: int) -> int:
    """Maps a step of [first, end) to the nearest step of [curve_first, curve_end)."""
    if end - first == 1:
        return curve_end - 1
    return curve_first + round((step - first) * (curve_end - 1 - curve_first) / (end - 1 - first))
