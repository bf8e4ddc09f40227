"""The layers of settings in files: a record, and a checkpoint's generation_config.json."""

from __future__ import annotations

from collections import ChainMap
from pathlib import Path, PureWindowsPath
from typing import Any

from wan.app.run import PATH_SETTINGS
from wan.checkpoint.headers import read_json, read_safetensors_metadata
from wan.media.video_writer import read_latents_shape
from wan.pipeline.setup import Setup
from wan.settings import step_cache
from wan.settings.command import Output
from wan.settings.errors import InputError, make_file_naming
from wan.settings.flags import FLAGS
from wan.settings.layers import Layer, read_layer
from wan.settings.rules import Values
from wan.tasks.base import VideoParams
from wan.utils import env
from wan.utils.files import has_file, iterate_numbered_paths


def read_lower_layers(*layers: Layer) -> tuple[Layer, ...]:
    """Reads the layers below those of the user: an earlier run's record, and variables.

    The record is that of the run that `from_json` repeats, or whose latents are decoded.

    Raises:
        InputError: A file is no record, or flags have no effect with it.
    """
    variables = env.read_variables()
    flags = ChainMap(*(dict(layer.values) for layer in layers))
    if "from_json" in flags and "decode_latents" in flags:
        raise InputError("`from_json`", why="excludes `decode_latents`", remedy="give one of them")
    if "plan" in flags and "decode_latents" in flags:
        why = "is about denoising, and `decode_latents` only decodes"
        raise InputError("`plan`", why=why, remedy="drop one of them")
    if "from_json" in flags:  # a new name: nothing is overwritten
        record = _read_record(flags["from_json"], read_json(flags["from_json"]).get("settings"))
        return record.drop(["save_file"]), variables
    if "decode_latents" not in flags:
        return (variables,)
    for name in flags:
        if not FLAGS[name].decoding:
            why = "has no effect with `decode_latents`, which only decodes"
            raise InputError(f"`{name}`", why=why, remedy="drop it")
    path = flags["decode_latents"]
    read_latents_shape(path)
    record = _read_record(path, read_safetensors_metadata(path, "settings"))
    # The recorded name, but in the folder of the latents.
    name = PureWindowsPath(str(record.values.get("save_file", ""))).name or path.stem
    candidate_paths = iterate_numbered_paths((path.parent / name).with_suffix(".mp4"))
    free_path = next(
        n for n in candidate_paths if not (n.exists() or n.with_suffix(".json").exists())
    )
    return record.add({"save_file": free_path}), variables


def _read_record(path: Path, settings: Any) -> Layer:
    if not isinstance(settings, dict):
        raise InputError(f"{path} is not a record of generate.py (no settings in it).")
    for name in settings:
        if name in FLAGS and not FLAGS[name].record:
            raise InputError(f"{path}: {name}", why="is not part of a record", remedy="remove it")
    return read_layer(settings, str(path), make_file_naming(path), "record")


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


def read_generation_config(folder: Path | None) -> Layer:
    """Reads the sampling defaults in a checkpoint's generation_config.json, if it has one."""
    path = Path() if folder is None else folder / "generation_config.json"
    if folder is None or not has_file(path):
        return Layer("the checkpoint", make_file_naming(path), {}, "default")
    raw, allowed = read_json(path), [name for name, flag in FLAGS.items() if flag.checkpoint]
    for key in raw:
        if key not in allowed:
            why = f"sets {key!r}, but a checkpoint may set {', '.join(allowed)}"
            raise InputError(str(path), why=why, remedy="remove it")
    return read_layer(raw, str(path), make_file_naming(path), "default")
