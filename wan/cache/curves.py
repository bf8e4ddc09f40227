"""Magnitude curves of MagCache: how much a network's residual grows from step to step.

ratio[i] of a guidance branch is mean |R_i| / |R_(i-1)| over tokens, where R_i is what all blocks
together add to the residual stream in step i (arXiv:2506.09045); ratio[0] is 1. A curve holds for
the task, shift and boundary that it was made with.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wan.checkpoint.files import read_json
from wan.settings.errors import InputError

BRANCHES = ("cond", "uncond")
FILE = "mag_curve.json"
"""A checkpoint folder's own."""
_PUBLISHED = Path(__file__).with_name("magcache_curves.json")


@dataclass(frozen=True)
class Curve:
    """A curve and what it holds for.

    Attributes:
        task: Of the checkpoint it was made with.
        sample_shift: Of the noise schedule.
        steps: Sampling steps.
        high_noise_steps: How many of them the high-noise expert takes; 0 for a single network.
        ratios: Branch -> a ratio for each step.
        origin: Where it comes from, for messages.
    """

    task: str
    sample_shift: float
    steps: int
    high_noise_steps: int
    ratios: dict[str, tuple[float, ...]]
    origin: str = ""

    def save(self, path: Path) -> None:
        """As JSON, which `load` reads."""
        record = {key: value for key, value in asdict(self).items() if key != "origin"}
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    def fitted(self, shift: float, high_noise_steps: tuple[int, int], steps: int) -> Curve:
        """The curve for a run's steps: the nearest ones of each branch and of each expert's phase.

        Args:
            shift: The run's.
            high_noise_steps: How many steps the high-noise expert takes of `steps`, and of the
                curve's own number of steps.
            steps: The run's.

        Raises:
            InputError: The curve was made for another shift or boundary.
        """
        here, there = high_noise_steps
        if shift != self.sample_shift:
            raise InputError(
                f"{self.origin} holds for --sample_shift {self.sample_shift:g}, not {shift:g}; use "
                "that shift, or make a curve with tools/calibrate_mag.py (--step_cache_curve)."
            )
        if there != self.high_noise_steps:
            raise InputError(
                f"{self.origin} was made with {self.high_noise_steps} of {self.steps} steps by the "
                f"high-noise expert; here it would take {there}: the boundary differs. Make a "
                "curve with tools/calibrate_mag.py (--step_cache_curve)."
            )
        if steps == self.steps:
            return self
        phases = [(0, here, 0, there), (here, steps, there, self.steps)]
        index = [
            nearest(place, low, high, own_low, own_high)
            for low, high, own_low, own_high in phases
            for place in range(low, high)
        ]
        ratios = {branch: tuple(row[i] for i in index) for branch, row in self.ratios.items()}
        return Curve(self.task, shift, steps, here, ratios, self.origin)


def nearest(place: int, low: int, high: int, own_low: int, own_high: int) -> int:
    """The step of [own_low, own_high) that lies where `place` does in [low, high)."""
    if high - low == 1:
        return own_high - 1
    return own_low + round((place - low) * (own_high - 1 - own_low) / (high - 1 - low))


def load(path: Path) -> Curve:
    """A curve from a file; InputError where it is none."""
    return _curve(read_json(path), str(path))


def published(task: str, with_image: bool) -> Curve | None:
    """The curve that MagCache's authors have published for a task, if there is one."""
    rows = json.loads(_PUBLISHED.read_text(encoding="utf-8"))
    key = f"{task} ({'image' if with_image else 'text'})" if task == "ti2v-5B" else task
    if key not in rows:
        return None
    row, ratios = rows[key], {}
    for place, branch in enumerate(BRANCHES):  # in turn, from the second step on
        ratios[branch] = [1.0, *row["ratios"][place::2]]
    whole = {"task": task, "high_noise_steps": 0, **row, "ratios": ratios}
    return _curve(whole, f"The published curve of {key}")


def _curve(record: Any, origin: str) -> Curve:
    try:
        steps = int(record["steps"])
        ratios = {name: tuple(map(float, record["ratios"][name])) for name in BRANCHES}
        curve = Curve(
            str(record["task"]),
            float(record["sample_shift"]),
            steps,
            int(record["high_noise_steps"]),
            ratios,
            origin,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{origin} is no curve of tools/calibrate_mag.py ({type(error).__name__}: {error})."
        ) from error
    for name, row in ratios.items():
        if len(row) != steps or not all(0 < ratio < 10 for ratio in row):
            raise InputError(f"{origin}: {name} needs {steps} ratios between 0 and 10.")
    return curve
