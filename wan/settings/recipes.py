"""Recipes of models that sample in their own way, under the names of the flags that say the same.

Distilled models take few steps; SVI 2.0 Pro makes long videos, also together with one of those.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wan.settings.errors import InputError
from wan.settings.presets import Preset
from wan.settings.request import Request

_LIGHTX2V: dict[str, Any] = {"sample_solver": "euler", "sample_steps": 4, "sample_shift": 5.0}


@dataclass(frozen=True)
class Recipe:
    """How a model samples; without guidance, unless its values say otherwise.

    Attributes:
        values: Flags and what they are set to.
        tasks: The tasks that it was published for.
        weights: Matches the name of a checkpoint's folder, or of a weight file in it.
        loras: Matches the name of a LoRA file with its two innermost folders.
        beside: It goes below a recipe of few steps, where files of both are there.
    """

    values: Mapping[str, Any]
    tasks: tuple[str, ...]
    weights: str | None = None
    loras: str | None = None
    beside: bool = False


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
    # vita-video-gen/svi-model: what its authors' command line sets
    "svi-2-pro": Recipe(
        {
            "sample_solver": "euler",
            "sample_steps": 50,
            "sample_shift": 5.0,
            "sample_guide_scale": (4.0, 4.0),
            "boundary": 0.875,
            "frame_num": 81,
            "fps": 15.0,
            "chain": "latent",
        },
        ("i2v-A14B",),
        loras=r"(?i)SVI[_-](?=.*Wan2\.2-I2V-A14B)(?=.*[_-]pro[_.-])",
        beside=True,
    ),
}
_OTHER_SVI = re.compile(r"(?i)^SVI[_-]")
NAMES = ("auto", "none", *RECIPES)
SETS = (
    *("sample_solver", "sample_steps", "sample_shift", "sample_guide_scale"),
    *("timesteps", "boundary_step", "ode", "sigma_max"),
    "chain",
)
"""What a recipe decides about."""


def choose(
    asked: str, weights: Iterable[Path], loras: Iterable[Path], preset: Preset
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The recipes' names, and the settings that they make; the earlier name wins.

    Args:
        asked: One of NAMES.
        weights: The checkpoint's folder and files, of which the names count.
        loras: LoRA files, of which the last three names count.
        preset: The task.

    Raises:
        InputError: A recipe that is asked for by name was published for other tasks.
    """
    names: tuple[str, ...] = ()
    if asked == "auto":
        own = [path.name for path in weights]
        added = ["/".join(path.absolute().parts[-3:]) for path in loras]
        fitting = [key for key, one in RECIPES.items() if _is_meant(one, own, added, preset)]
        few = [key for key in fitting if not RECIPES[key].beside]
        names = (*few[:1], *(key for key in fitting if RECIPES[key].beside))
    elif asked != "none":
        names = (asked,)
    found: dict[str, Any] = {}
    for name in reversed(names):
        recipe = RECIPES[name]
        if preset.task not in recipe.tasks:
            why = f"is for {', '.join(recipe.tasks)}, not for {preset.task}"
            raise InputError("`recipe`", name, why, "drop it")
        found |= {"sample_guide_scale": (1.0, 1.0), **recipe.values}
    return names, found


def _is_meant(recipe: Recipe, own: list[str], added: list[str], preset: Preset) -> bool:
    patterns = [(recipe.weights, one) for one in own] + [(recipe.loras, one) for one in added]
    found = any(pattern and re.search(pattern, one) for pattern, one in patterns)
    return found and preset.task in recipe.tasks


def check_chain(chain: str | None, loras: Iterable[Path]) -> None:
    """Refuses LoRAs of other versions of SVI, whose clips begin with something else.

    Raises:
        InputError: A file's name is that of such a LoRA.
    """
    svi = RECIPES["svi-2-pro"].loras or ""
    for path in loras if chain is not None else ():
        if _OTHER_SVI.match(path.name) and not re.search(svi, path.name):
            raise InputError(
                "`lora`",
                path.name,
                "is not SVI 2.0 Pro for Wan2.2's i2v-A14B, whose clips alone can be chained here",
                "give both SVI_Wan2.2-I2V-A14B_..._v2.0_pro.safetensors",
            )


def notices(names: Sequence[str], request: Request, loras: bool) -> tuple[str, ...]:
    """What recipes have set, and what spoils a distilled model or a long video.

    Args:
        names: The recipes.
        request: The video.
        loras: Whether there is any LoRA.
    """
    found = list(_about_clips(names, request, loras))
    if not names:
        return tuple(found)
    listed = ",".join(map("{:g}".format, request.timesteps or ()))
    shift = "" if request.sample_solver == "rcm" else f", shift {request.sample_shift:g}"
    grid = f" at {listed}" if listed else shift
    scale = ",".join(map("{:g}".format, dict.fromkeys(request.sample_guide_scale)))
    guidance = f", guidance {scale}" if request.guided else ", no guidance"
    found.insert(
        0,
        f"Recipe {' with '.join(reversed(names))}: {request.sample_solver}, "
        f"{request.sample_steps} steps{grid}{guidance}; `recipe=none` takes the checkpoint's own "
        "defaults.",
    )
    if request.guided and any(not RECIPES[name].beside for name in names):
        found.append(
            f"`sample_guide_scale={scale}`: guidance blurs what a distilled model makes; use 1."
        )
    return tuple(found)


def _about_clips(names: Sequence[str], request: Request, loras: bool) -> Iterator[str]:
    if request.chain == "frame" and (request.num_clip or 0) > 1:
        yield (
            "Each clip begins with the last frame of the one before, which drifts after two to "
            "four clips; SVI 2.0 Pro's LoRA pair was trained against it (docs/long_videos.md)."
        )
    if request.chain == "latent" and not loras:
        yield "`chain=latent` needs a network trained for it; without its LoRA clips fall apart."
    if "svi-2-pro" in names and request.frame_num != 81:
        longer = ", and loses colour in longer ones" if request.frame_num > 81 else ""
        yield (
            f"`frame_num={request.frame_num}`: SVI 2.0 Pro was trained on clips of 81 frames"
            f"{longer}."
        )


def under(given: Mapping[str, Any], below: Mapping[str, Any]) -> dict[str, Any]:
    """Both together; what is given wins, and a part of a schedule takes back what is below it.

    So `--sample_steps 8` means eight steps whatever timesteps a recipe or a record lists, and
    `--prompt` one prompt whatever prompts of clips a record has.
    """
    changed = {name for name, value in given.items() if below.get(name, ...) != value}
    taken_back = set()
    if {"sample_solver", "sample_steps", "sample_shift"} & changed:
        taken_back |= {"timesteps"}
    if {"sample_steps", "timesteps"} & changed:
        taken_back |= {"boundary_step"}
    if "timesteps" in changed:
        taken_back |= {"sample_steps", "sample_shift"}
    if "prompt" in changed:
        taken_back |= {"clip_prompts"}
    if given.get("sample_solver", "rcm") != "rcm":
        taken_back |= {"ode", "sigma_max"}
    return {**{key: value for key, value in below.items() if key not in taken_back}, **given}
