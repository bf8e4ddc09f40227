"""The settings in a record, and in a checkpoint's generation_config.json."""

from __future__ import annotations

from pathlib import Path, PureWindowsPath
from typing import Any

from wan.app.run import PATH_SETTINGS
from wan.checkpoint.headers import read_json, read_safetensors_metadata
from wan.media.video_writer import read_latents_shape
from wan.pipeline.setup import Setup
from wan.settings import recipes, step_cache
from wan.settings.command import Output
from wan.settings.errors import InputError
from wan.settings.flags import FLAGS, read_settings
from wan.settings.layers import merge_settings
from wan.settings.rules import Values
from wan.settings.step_cache import is_parameter_used
from wan.tasks.base import VideoParams
from wan.utils import env
from wan.utils.files import has_file, iterate_numbered_paths


def merge_layers(flags: Values) -> dict[str, Any]:
    """Returns the flags, merged over an earlier run's record and environment variables."""
    record, variables = _read_recorded_settings(flags), env.read_variable_settings()
    if "recipe" in flags:  # it sets them again
        record = {
            name: value for name, value in record.items() if name not in recipes.RECIPE_SETTINGS
        }
    variables = {name: value for name, value in variables.items() if name not in record}
    values = {**variables, **merge_settings(flags, record)}
    for name in values.keys() - flags.keys():
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


def record_settings(
    values: Values, setup: Setup, params: VideoParams, output: Output
) -> dict[str, Any]:
    """Returns all settings that are needed to repeat the video, by flag name."""
    settings: dict[str, Any] = {**vars(setup.execution), **vars(setup.attention)}
    settings |= step_cache.get_changed_parameters(setup.cache)
    settings["step_cache"] = setup.cache.step_cache
    # With `decode_latents`, the settings of denoising are in `values`, but not in `setup`.
    settings |= {**values, **vars(params), **vars(output)}
    if params.infer_frames is not None:
        del settings["frame_num"]  # derived from infer_frames
    if not settings.get("video_lora"):
        settings.pop("lora_folder", None)  # a repetition does not need it
    paths = [name for name in PATH_SETTINGS if settings.get(name)]
    settings |= {name: str(Path(settings[name]).absolute()) for name in paths}
    return {
        name: settings[name]
        for name, flag in FLAGS.items()
        if flag.record
        and settings.get(name) is not None
        and (flag.needs is None or settings.get(flag.needs))
    }


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Reads the sampling defaults in a checkpoint's generation_config.json, if it has one."""
    path = folder / "generation_config.json"
    if not has_file(path):
        return {}
    raw, allowed = read_json(path), [name for name, flag in FLAGS.items() if flag.checkpoint]
    for key in raw:
        if key not in allowed:
            why = f"sets {key!r}, but a checkpoint may set {', '.join(allowed)}"
            raise InputError(str(path), why=why, remedy="remove it")
    return read_settings(raw, f"{path}: {{}}")
