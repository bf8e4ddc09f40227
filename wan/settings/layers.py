"""Layers of settings: which settings of a lower layer a higher layer replaces.

`docs/cli.md` lists the layers in their order. Every front end merges its layers here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from wan.settings import rules
from wan.settings.flags import FLAGS
from wan.settings.guidance import GUIDERS
from wan.settings.recipes import RECIPE_SETTINGS, RECIPES

Settings = Mapping[str, Any]
_SUPERSEDED = {
    "sample_solver": ("timesteps",),
    "sample_steps": ("timesteps", "boundary_step"),
    "sample_shift": ("timesteps",),
    "sigmas": ("timesteps",),
    "sigma_max": ("timesteps",),
    "timesteps": ("sample_steps", "sample_shift", "sigmas", "sigma_max", "boundary_step"),
    "prompt": ("clip_prompts",),
    "clip_prompts": ("prompt", "num_clip", "use_prompt_extend"),
    "use_prompt_extend": ("clip_prompts",),
    "dit": ("dit_high_noise", "dit_low_noise"),
    "dit_high_noise": ("dit",),
    "dit_low_noise": ("dit",),
    "attention_algo": ("attention_backend",),
    "attention_backend": ("attention_algo",),
}
"""Setting -> the settings of lower layers that it replaces where it differs from theirs."""
_SKIP_LAYER_SETTINGS = ("slg_blocks", "slg_start", "slg_stop")


def merge_settings(higher: Settings, lower: Settings) -> dict[str, Any]:
    """Merges two layers of a user's settings, as `merge_defaults` does.

    A recipe that the higher one names counts as the settings of that recipe.
    """
    recipe, selected = RECIPES.get(higher.get("recipe", "")), dict[str, Any]()
    if recipe is not None:
        selected = {n: recipe.values[n] for n in RECIPE_SETTINGS if n in recipe.values}
        selected = {"sample_guide_scale": (1.0, 1.0), **selected}
        lower = merge_defaults(selected, lower)
        lower = {name: value for name, value in lower.items() if name not in selected}
    if {**selected, **higher}.get("sample_solver") == "rcm":
        lower = {name: value for name, value in lower.items() if name != "sample_shift"}
    return merge_defaults(higher, lower)


def merge_defaults(higher: Settings, lower: Settings) -> dict[str, Any]:
    """Merges settings over others, and drops the others that they supersede.

    `--sample_steps 8` supersedes the timesteps of a record, recipe or shared command line. With a
    setting, those that need it are dropped.

    Raises:
        InputError: A setting of the higher layer has no effect with one of the lower layer.
    """
    stale = {*_list_superseded(higher, lower)}
    merged = {**{name: value for name, value in lower.items() if name not in stale}, **higher}
    for name in merged.keys() - higher.keys():
        needs = FLAGS[name].needs if name in FLAGS else None
        if needs is not None and lower.get(needs) and not merged.get(needs):
            del merged[name]
    if "sample_solver" not in higher and "sample_shift" in higher:
        rules.check_rules((rules.SHIFT_OF_RCM_RULE,), merged)
    return merged


def _list_superseded(higher: Settings, lower: Settings) -> Iterator[str]:
    """Lists the names of the settings that a higher layer supersedes in a lower one."""
    changed = {  # images in memory may be arrays, which are not compared
        name for name in higher if name not in lower or lower[name] != higher[name]
    }
    for name in changed & _SUPERSEDED.keys():
        if higher[name] is not False:
            yield from _SUPERSEDED[name]
    if "sample_solver" in higher:
        yield from ("sigmas",) if higher["sample_solver"] == "rcm" else ("ode", "sigma_max")
    if "step_cache" in higher:
        yield "use_attentioncache"
    if higher.get("use_attentioncache"):
        yield "step_cache"
    if "guider" in higher:
        other_rows = (row for name, row in GUIDERS.items() if name != higher["guider"])
        yield from (parameter for row in other_rows for parameter in row.parameters)
    if {*higher.get("sample_guide_scale", ())} == {1.0}:  # only one guidance branch is computed
        yield from ("guider", *_SKIP_LAYER_SETTINGS)
        yield from (parameter for row in GUIDERS.values() for parameter in row.parameters)
    task = higher.get("task", lower.get("task", "t2v-A14B"))
    if task in FLAGS["strength"].tasks:  # both give the latents that denoising starts from
        yield from ("fixed_latents",) if "src_video" in changed else ()
        yield from ("src_video",) if "fixed_latents" in changed else ()
