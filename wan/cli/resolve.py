"""Resolves a command line to a run: merges layers of settings and checks output paths.

Layers, the first one wins: flags, the record of an earlier run, environment variables, a recipe,
the checkpoint's generation_config.json, the task's preset.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path, PureWindowsPath
from typing import Any

from wan import env, run
from wan.checkpoint import layout
from wan.checkpoint.files import read_json, read_safetensors_metadata
from wan.cli.output import check_outputs, check_trace, check_video_path, usable_paths
from wan.output_files import numbered
from wan.pipeline import memory
from wan.pipeline.video import read_latents_shape
from wan.run import DescribeFolder, Run, Values
from wan.settings import recipes
from wan.settings.errors import InputError, name_settings
from wan.settings.flags import FLAGS, check_needed_settings, read_settings
from wan.settings.step_cache import is_parameter_used


def resolve(
    given: Values,
    make_demo: Callable[[str, Path], None],
    plan: bool = False,
    describe: DescribeFolder = layout.inspect_checkpoint,
    inputs: bool = True,
) -> Run:
    """Resolves flags to a checked run.

    Args:
        user_settings: The flags, from `wan.cli.flags.parse_flags`.
        make_demo, plan, describe_folder, require_inputs: As for `wan.run.resolve_run`.

    Raises:
        InputError: A setting is invalid, or settings do not fit together.
    """
    with name_settings(env.words()), usable_paths():
        values = layered(given)
        check_needed_settings(
            {name: value for name, value in values.items() if FLAGS[name].needs != "plan"}
        )
        if "save_file" in values and not plan:
            check_video_path(values["save_file"])
        found = run.resolve(values, make_demo, plan, describe, inputs)
        if found.extension is not None and env.rank() == 0:  # rank 0 runs the language model
            from wan.cli import extend_prompt

            extend_prompt.check(found.extension, found.image is not None)
        if plan:
            found.setup.check_plan()
        elif found.decode_latents is None:
            memory.check_memory(found.setup, found.request, env.local_world_size())
        else:  # an image's aspect ratio follows from the latents
            _, _, height, width = read_latents_shape(found.decode_latents)
            _, rows, columns = found.request.preset.vae_stride
            request = replace(found.request, size=(width * columns, height * rows))
            memory.check_memory(found.setup, request, env.local_world_size(), "decoding")
        if "save_file" in values and not plan:
            check_outputs(found)
        check_trace(found.output, found.setup.execution.compile, found.request.sample_steps)
        return found


def layered(flags: Values) -> dict[str, Any]:
    """Returns the flags, merged over an earlier run's record and environment variables.

    If a flag turns a switch off, or names another step cache, the dependent settings of the lower
    layers are dropped.
    """
    below = {**env.aliases(), **_recorded(flags)}
    if "recipe" in flags:  # it sets them again
        below = {
            name: value for name, value in below.items() if name not in recipes.RECIPE_SETTINGS
        }
    values = recipes.merge_defaults(flags, below)
    for name in below.keys() & values.keys() - flags.keys():
        needs = FLAGS[name].needs
        if (needs is not None and not values.get(needs)) or not is_parameter_used(name, values):
            del values[name]
    return values


def _recorded(flags: Values) -> dict[str, Any]:
    """Reads the settings of the run that --from_json repeats or --decode_latents continues."""
    if "from_json" in flags and "decode_latents" in flags:
        raise InputError("`from_json`", why="excludes `decode_latents`", remedy="give one of them")
    if "plan" in flags and "decode_latents" in flags:
        why = "is about denoising, and `decode_latents` only decodes"
        raise InputError("`plan`", why=why, remedy="drop one of them")
    if "from_json" in flags:
        path = flags["from_json"]
        settings = read_json(path).get("settings")
        if isinstance(settings, dict):  # a new name: nothing is overwritten
            settings = {key: value for key, value in settings.items() if key != "save_file"}
    elif "decode_latents" in flags:
        for name in flags:
            if not FLAGS[name].decoding:
                why = "has no effect with `decode_latents`, which only decodes"
                raise InputError(f"`{name}`", why=why, remedy="drop it")
        path = flags["decode_latents"]
        read_latents_shape(path)
        settings = read_safetensors_metadata(path, "settings")
        if isinstance(settings, dict):  # the recorded name, but in the folder of the latents
            name = PureWindowsPath(str(settings.get("save_file", ""))).name or path.stem
            names = numbered((path.parent / name).with_suffix(".mp4"))
            free = next(n for n in names if not (n.exists() or n.with_suffix(".json").exists()))
            settings = settings | {"save_file": str(free)}
    else:
        return {}
    if not isinstance(settings, dict):
        raise InputError(f"{path} is not a record of generate.py (no settings in it).")
    for name in settings:
        if name in FLAGS and not FLAGS[name].record:
            raise InputError(f"{path}: {name}", why="is not part of a record", remedy="remove it")
    return read_settings(settings, f"{path}: {{}}")
