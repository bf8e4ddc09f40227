"""Recipes: the published sampling settings of distilled models and of SVI, as values of flags.

Distilled models need few steps; SVI 2.0 Pro generates long videos, also with a few-step recipe.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wan.settings.errors import InputError
from wan.settings.presets import Preset
from wan.settings.video_options import VideoSettings

_LIGHTX2V: dict[str, Any] = {"sample_solver": "euler", "sample_steps": 4, "sample_shift": 5.0}


@dataclass(frozen=True)
class Recipe:
    """Sampling settings of a published model; guidance is off unless `values` sets it.

    Attributes:
        values: Flag -> value.
        tasks: Tasks for which the model was published.
        weight_pattern: Pattern of the name of a checkpoint folder or of a weight file in it.
        lora_pattern: Pattern of a LoRA file's name with its two innermost folders.
        is_combinable: Whether it can be combined with a few-step recipe, whose values then win.
    """

    values: Mapping[str, Any]
    tasks: tuple[str, ...]
    weight_pattern: str | None = None
    lora_pattern: str | None = None
    is_combinable: bool = False


RECIPES = {
    # lightx2v/Wan2.2-Lightning: experts by timestep.
    "lightning-4step": Recipe(
        _LIGHTX2V,
        ("t2v-A14B", "i2v-A14B"),
        lora_pattern=r"Wan2\.2-Lightning|(T2V|I2V)-A14B-4steps-lora",
    ),
    # lightx2v/Wan2.2-Distill-Models and -Loras: the first two of four steps are high-noise steps.
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
            "sample_shift": 5.0,  # in effect where a user replaces the timesteps
        },
        ("ti2v-5B",),
        r"FastWan2\.2-TI2V-5B",
    ),
    # worstcoder/rcm-Wan, TurboWan: sigma_max depends on the task
    "rcm-4step": Recipe(
        {"sample_solver": "rcm", "sample_steps": 4},
        ("t2v-1.3B", "t2v-14B", "t2v-A14B", "i2v-A14B"),
        r"TurboWan2\.[12]|rCM[-_]Wan|Wan2\.[12].*rCM",
    ),
    # Wan-AI/Wan2.2-Animate-2-14B-Distilled-Diffusers; its config.json has no log_scale.
    "animate2-10step": Recipe(
        {"sample_solver": "dpm++", "sample_steps": 10, "sample_shift": 5.0, "log_scale": -1.3},
        ("animate2-14B",),
        r"(?i)animate[-_]?2.*distill",
    ),
    # Efficient-Large-Model/LongLive-1.3B: its window and sink
    "longlive": Recipe(
        {"local_attn_size": 12, "sink_size": 3},
        ("causal-1.3B",),
        r"(?i)longlive",
    ),
    # vita-video-gen/svi-model: as in its authors' command line
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
        lora_pattern=r"(?i)SVI[_-](?=.*Wan2\.2-I2V-A14B)(?=.*[_-]pro[_.-])",
        is_combinable=True,
    ),
}
_OTHER_SVI = re.compile(r"(?i)^SVI[_-]")
RECIPE_NAMES = ("auto", "none", *RECIPES)
RECIPE_SETTINGS = (
    *("sample_solver", "sample_steps", "sample_shift", "sample_guide_scale"),
    *("sigmas", "timesteps", "boundary_step", "ode", "sigma_max"),
    *("chain", "log_scale", "local_attn_size", "sink_size"),
)
"""Flags that a recipe may set."""


def choose_recipes(
    recipe_name: str, weights: Iterable[Path], loras: Iterable[Path], preset: Preset
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Chooses recipes by file names, and returns their names and settings; earlier names win.

    Args:
        recipe_name: One of RECIPE_NAMES.
        weights: Paths of the checkpoint folder and its files.
        loras: Paths of LoRA files.
        preset: Task.

    Raises:
        InputError: The named recipe was published for other tasks.
    """
    names: tuple[str, ...] = ()
    if recipe_name == "auto":
        weight_names = [path.name for path in weights]
        lora_names = ["/".join(path.absolute().parts[-3:]) for path in loras]
        files = (weight_names, lora_names, preset)
        matching = [key for key, recipe in RECIPES.items() if _matches_files(recipe, *files)]
        few_step = [key for key in matching if not RECIPES[key].is_combinable]
        names = (*few_step[:1], *(key for key in matching if RECIPES[key].is_combinable))
    elif recipe_name != "none":
        names = (recipe_name,)
    settings: dict[str, Any] = {}
    for name in reversed(names):
        recipe = RECIPES[name]
        if preset.task not in recipe.tasks:
            why = f"is for {', '.join(recipe.tasks)}, not for {preset.task}"
            raise InputError("`recipe`", name, why, "drop it")
        settings |= {"sample_guide_scale": (1.0, 1.0), **recipe.values}
    return names, settings


def _matches_files(
    recipe: Recipe, weight_names: list[str], lora_names: list[str], preset: Preset
) -> bool:
    patterns = [(recipe.weight_pattern, name) for name in weight_names] + [
        (recipe.lora_pattern, name) for name in lora_names
    ]
    has_match = any(pattern and re.search(pattern, name) for pattern, name in patterns)
    return has_match and preset.task in recipe.tasks


def check_svi_loras(clip_transition: str | None, loras: Iterable[Path]) -> None:
    """Refuses LoRAs of other versions of SVI, whose clips start from other latents.

    Raises:
        InputError: A file has the name of such a LoRA.
    """
    svi = RECIPES["svi-2-pro"].lora_pattern or ""
    for path in loras if clip_transition is not None else ():
        if _OTHER_SVI.match(path.name) and not re.search(svi, path.name):
            raise InputError(
                "`lora`",
                path.name,
                "is not SVI 2.0 Pro for Wan2.2's i2v-A14B, the only version that `chain` supports",
                "give both SVI_Wan2.2-I2V-A14B_..._v2.0_pro.safetensors",
            )


def make_recipe_notices(
    names: Sequence[str], params: VideoSettings, has_loras: bool
) -> tuple[str, ...]:
    """Describes the settings of the recipes, and warns of settings that lower their quality.

    Args:
        names: Names of the recipes.
        has_loras: Whether any LoRA is loaded.
    """
    messages = list(_make_clip_notices(names, params, has_loras))
    if not names:
        return tuple(messages)
    timesteps_text = ",".join(map("{:g}".format, params.timesteps or ()))
    shift = "" if params.sample_solver == "rcm" else f", shift {params.sample_shift:g}"
    grid = f" at {timesteps_text}" if timesteps_text else shift
    scale = ",".join(map("{:g}".format, dict.fromkeys(params.sample_guide_scale)))
    guidance = f", guidance {scale}" if params.uses_guidance else ", no guidance"
    messages.insert(
        0,
        f"Recipe {' with '.join(reversed(names))}: {params.sample_solver}, "
        f"{params.sample_steps} steps{grid}{guidance}; `recipe=none` takes the checkpoint's own "
        "defaults.",
    )
    if params.uses_guidance and any(not RECIPES[name].is_combinable for name in names):
        messages.append(
            f"`sample_guide_scale={scale}`: guidance blurs the videos of a distilled model; use 1."
        )
    return tuple(messages)


def _make_clip_notices(
    names: Sequence[str], params: VideoSettings, has_loras: bool
) -> Iterator[str]:
    if params.chain == "frame" and (params.num_clip or 0) > 1:
        yield (
            "Each clip begins with the last frame of the previous clip, so that the video drifts "
            "after two to four clips; SVI 2.0 Pro's LoRA pair was trained to prevent this "
            "(docs/long_videos.md)."
        )
    if params.chain == "latent" and not has_loras:
        yield "`chain=latent` needs a network trained for it; without its LoRA clips fall apart."
    if "svi-2-pro" in names and params.frame_num != 81:
        longer = ", and loses color in longer ones" if params.frame_num > 81 else ""
        yield (
            f"`frame_num={params.frame_num}`: SVI 2.0 Pro was trained on clips of 81 frames"
            f"{longer}."
        )
