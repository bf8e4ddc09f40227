"""Resolves a command line to a run: merges layers of settings and checks output paths.

Layers, the first one wins: flags, the record of an earlier run, environment variables, a recipe,
the checkpoint's generation_config.json, the task's preset.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path, PureWindowsPath
from typing import Any

from wan.app import make_run
from wan.app.make_run import InspectFolder, Values
from wan.app.output import (
    check_run_outputs,
    check_trace_options,
    check_video_path,
    refuse_unusable_paths,
)
from wan.app.run import Run
from wan.checkpoint import layout
from wan.checkpoint.headers import read_json, read_safetensors_metadata
from wan.media.video_writer import read_latents_shape
from wan.pipeline import memory_estimate
from wan.settings import recipes
from wan.settings.errors import InputError, name_settings
from wan.settings.flags import FLAGS, check_needed_settings, read_settings
from wan.settings.step_cache import is_parameter_used
from wan.utils import env
from wan.utils.files import iterate_numbered_paths


def resolve_command_line(
    user_settings: Values,
    make_demo: Callable[[str, Path], None],
    plan: bool = False,
    inspect_folder: InspectFolder = layout.inspect_checkpoint,
    require_inputs: bool = True,
) -> Run:
    """Resolves flags to a checked run.

    Args:
        user_settings: The flags, from `wan.app.flag_parser.parse_flags`.
        make_demo, plan, inspect_folder, require_inputs: As for `wan.app.make_run.resolve_run`.

    Raises:
        InputError: A setting is invalid, or settings do not fit together.
    """
    with name_settings(env.make_flag_naming()), refuse_unusable_paths():
        values = merge_layers(user_settings)
        check_needed_settings(
            {name: value for name, value in values.items() if FLAGS[name].needs != "plan"}
        )
        if "save_file" in values and not plan:
            check_video_path(values["save_file"])
        checked_run = make_run.resolve_run(values, make_demo, plan, inspect_folder, require_inputs)
        # Only rank 0 runs the language model.
        if checked_run.prompt_extension is not None and env.rank() == 0:
            from wan.app import prompt_extend

            prompt_extend.check_prompt_extension(
                checked_run.prompt_extension, checked_run.inputs.image is not None
            )
        if plan:
            checked_run.setup.check_plan()
        elif checked_run.decode_latents is None:
            memory_estimate.check_memory(
                checked_run.setup, checked_run.params, env.local_world_size()
            )
        else:  # an image's aspect ratio follows from the latents
            _, _, height, width = read_latents_shape(checked_run.decode_latents)
            _, stride_h, stride_w = checked_run.params.preset.vae_stride
            params = replace(checked_run.params, size=(width * stride_w, height * stride_h))
            memory_estimate.check_memory(
                checked_run.setup, params, env.local_world_size(), "decoding"
            )
        if "save_file" in values and not plan:
            check_run_outputs(checked_run)
        check_trace_options(
            checked_run.output, checked_run.setup.execution.compile, checked_run.params.sample_steps
        )
        return checked_run


def merge_layers(flags: Values) -> dict[str, Any]:
    """Returns the flags, merged over an earlier run's record and environment variables.

    If a flag turns a switch off, or names another step cache, the dependent settings of the lower
    layers are dropped.
    """
    lower = {**env.read_variable_settings(), **_read_recorded_settings(flags)}
    if "recipe" in flags:  # it sets them again
        lower = {
            name: value for name, value in lower.items() if name not in recipes.RECIPE_SETTINGS
        }
    values = recipes.merge_defaults(flags, lower)
    for name in lower.keys() & values.keys() - flags.keys():
        needs = FLAGS[name].needs
        if (needs is not None and not values.get(needs)) or not is_parameter_used(name, values):
            del values[name]
    return values


def _read_recorded_settings(flags: Values) -> dict[str, Any]:
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
            candidate_paths = iterate_numbered_paths((path.parent / name).with_suffix(".mp4"))
            free_path = next(
                n for n in candidate_paths if not (n.exists() or n.with_suffix(".json").exists())
            )
            settings = settings | {"save_file": str(free_path)}
    else:
        return {}
    if not isinstance(settings, dict):
        raise InputError(f"{path} is not a record of generate.py (no settings in it).")
    for name in settings:
        if name in FLAGS and not FLAGS[name].record:
            raise InputError(f"{path}: {name}", why="is not part of a record", remedy="remove it")
    return read_settings(settings, f"{path}: {{}}")
