"""Recipes of distilled models: how they sample, under the names of the flags that say the same."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wan.settings.errors import InputError
from wan.settings.presets import Preset
from wan.settings.request import Request

_LIGHTX2V: dict[str, Any] = {"sample_solver": "euler", "sample_steps": 4, "sample_shift": 5.0}


@dataclass(frozen=True)
class Recipe:
    """How a distilled model samples, beside that all of them do without guidance.

    Attributes:
        values: Flags and what they are set to.
        tasks: The tasks that it was published for.
        weights: Matches the name of a checkpoint's folder, or of a weight file in it.
        loras: Matches the name of a LoRA file with its two innermost folders.
    """

    values: Mapping[str, Any]
    tasks: tuple[str, ...]
    weights: str | None = None
    loras: str | None = None


RECIPES = {
    # lightx2v/Wan2.2-Lightning: experts by timestep.
    "lightning-4step": Recipe(
        _LIGHTX2V,
        ("t2v-A14B", "i2v-A14B"),
        loras=r"Wan2\.2-Lightning|(T2V|I2V)-A14B-4steps-lora",
    ),
    # lightx2v/Wan2.2-Distill-Models and -Loras: the first two of four steps are high-noise ones.
    "distill-4step": Recipe(
        {**_LIGHTX2V, "boundary_step": 2},
        ("t2v-A14B", "i2v-A14B"),
        r"(?i)wan2\.2_[it]2v_A14b_.*lightx2v_4step|Wan2\.2-Distill-Models",
        r"(?i)wan2\.2_[it]2v_A14b_.*lora.*_(1022|1217)|Wan2\.2-Distill-Loras",
    ),
    # FastVideo/FastWan2.2-TI2V-5B-FullAttn
    "fastwan-3step": Recipe(
        {
            "sample_solver": "dmd",
            "timesteps": (1000.0, 757.0, 522.0),
            "sample_steps": 3,
            "sample_shift": 5.0,  # where the timesteps are taken back
        },
        ("ti2v-5B",),
        r"FastWan2\.2-TI2V-5B",
    ),
    # worstcoder/rcm-Wan, TurboWan: sigma_max by the task
    "rcm-4step": Recipe(
        {"sample_solver": "rcm", "sample_steps": 4},
        ("t2v-1.3B", "t2v-14B", "t2v-A14B", "i2v-A14B"),
        r"TurboWan2\.[12]|rCM[-_]Wan|Wan2\.[12].*rCM",
    ),
}
NAMES = ("auto", "none", *RECIPES)
SETS = (
    *("sample_solver", "sample_steps", "sample_shift", "sample_guide_scale"),
    *("timesteps", "boundary_step", "ode", "sigma_max"),
)
"""What a recipe decides about."""


def choose(
    asked: str, weights: Iterable[Path], loras: Iterable[Path], preset: Preset
) -> tuple[str | None, dict[str, Any]]:
    """The recipe's name, and the settings that it makes; None where there is none.

    Args:
        asked: One of NAMES.
        weights: The checkpoint's folder and files, of which the names count.
        loras: LoRA files, of which the last three names count.
        preset: The task.

    Raises:
        InputError: A recipe that is asked for by name was published for other tasks.
    """
    name: str | None = asked
    if asked == "auto":
        own = [path.name for path in weights]
        added = ["/".join(path.absolute().parts[-3:]) for path in loras]
        name = None
        for key, recipe in RECIPES.items():
            patterns = [(recipe.weights, one) for one in own]
            patterns += [(recipe.loras, one) for one in added]
            found = any(pattern and re.search(pattern, one) for pattern, one in patterns)
            if found and preset.task in recipe.tasks:
                name = key
                break
    if name is None or name == "none":
        return None, {}
    recipe = RECIPES[name]
    if preset.task not in recipe.tasks:
        why = f"is for {', '.join(recipe.tasks)}, not for {preset.task}"
        raise InputError("`recipe`", name, why, "drop it")
    return name, {**recipe.values, "sample_guide_scale": (1.0, 1.0)}


def notices(name: str | None, request: Request) -> tuple[str, ...]:
    """What a recipe has set, and what spoils a distilled model."""
    if name is None:
        return ()
    listed = ",".join(map("{:g}".format, request.timesteps or ()))
    shift = "" if request.sample_solver == "rcm" else f", shift {request.sample_shift:g}"
    grid = f" at {listed}" if listed else shift
    without = "" if request.guided else ", no guidance"
    found = [
        f"Recipe {name}: {request.sample_solver}, {request.sample_steps} steps{grid}{without}; "
        "`recipe=none` takes the checkpoint's own defaults."
    ]
    if request.guided:
        scale = ",".join(map("{:g}".format, request.sample_guide_scale))
        found.append(
            f"`sample_guide_scale={scale}`: guidance blurs what a distilled model makes; use 1."
        )
    return tuple(found)


def under(given: Mapping[str, Any], below: Mapping[str, Any]) -> dict[str, Any]:
    """Both together; what is given wins, and a part of a schedule takes back what is below it.

    So `--sample_steps 8` means eight steps whatever timesteps a recipe or a record lists.
    """
    changed = {name for name, value in given.items() if below.get(name, ...) != value}
    taken_back = set()
    if {"sample_solver", "sample_steps", "sample_shift"} & changed:
        taken_back |= {"timesteps"}
    if {"sample_steps", "timesteps"} & changed:
        taken_back |= {"boundary_step"}
    if "timesteps" in changed:
        taken_back |= {"sample_steps", "sample_shift"}
    if given.get("sample_solver", "rcm") != "rcm":
        taken_back |= {"ode", "sigma_max"}
    return {**{key: value for key, value in below.items() if key not in taken_back}, **given}
