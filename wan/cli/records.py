"""Settings that come from files: an earlier run's record and a checkpoint's defaults.

A flag wins over the record of an earlier run, that over a variable that stands for a flag, that
over a recipe, that over the checkpoint's generation_config.json, that over the task's preset.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from wan.checkpoint.files import read_json, safetensors_metadata
from wan.cli import env
from wan.pipeline.setup import Setup
from wan.pipeline.video import latents_shape
from wan.settings import recipes
from wan.settings.attention import Attention
from wan.settings.command import Output
from wan.settings.errors import InputError
from wan.settings.execution import Execution
from wan.settings.flags import FLAGS, read
from wan.settings.request import Request
from wan.settings.step_cache import given, is_read
from wan.settings.values import path as read_path

Values = Mapping[str, Any]
"""Checked settings under their flags' names, as `wan.settings.flags.read` returns them."""
PATHS = [name for name, flag in FLAGS.items() if flag.read is read_path]
"""Absolute in records; may differ between ranks."""


def layered(flags: Values) -> dict[str, Any]:
    """The given flags over an earlier run's record over variables.

    A switch that a flag turns off, or another step cache, takes back what is said below beside it.
    """
    below = {**env.aliases(), **_recorded(flags)}
    if "recipe" in flags:  # it is asked for anew, and sets what the earlier run had set
        below = {name: value for name, value in below.items() if name not in recipes.SETS}
    values = recipes.under(flags, below)
    for name in below.keys() & values.keys() - flags.keys():
        needs = FLAGS[name].needs
        if (needs is not None and not values.get(needs)) or not is_read(name, values):
            del values[name]
    return values


def _recorded(flags: Values) -> dict[str, Any]:
    """Settings of the earlier run that --from_json repeats or --decode_latents continues."""
    if "from_json" in flags and "decode_latents" in flags:
        raise InputError("--from_json and --decode_latents exclude each other; give one of them.")
    if "plan" in flags and "decode_latents" in flags:
        raise InputError("--plan is about denoising, --decode_latents only decodes; drop one.")
    if "from_json" in flags:
        path = flags["from_json"]
        settings = read_json(path).get("settings")
        if isinstance(settings, dict):  # the repeat gets a name of its own: nothing is overwritten
            settings = {key: value for key, value in settings.items() if key != "save_file"}
    elif "decode_latents" in flags:
        for name in flags:
            if not FLAGS[name].decoding:
                raise InputError(
                    f"--{name} has no effect with --decode_latents, which only decodes; drop it."
                )
        path = flags["decode_latents"]
        latents_shape(path)
        settings = safetensors_metadata(path, "settings")
    else:
        return {}
    if not isinstance(settings, dict):
        raise InputError(f"{path} is not a record of generate.py (no settings in it).")
    for name in settings:
        if name in FLAGS and not FLAGS[name].record:
            raise InputError(f"{path}: {name} is not part of a record; remove it.")
    return read(settings, f"{path}: {{}}")


def generation_config(folder: Path) -> dict[str, Any]:
    """Sampling defaults that the checkpoint brings in its generation_config.json."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    raw = read_json(path)
    allowed = [name for name, flag in FLAGS.items() if flag.checkpoint]
    for key in raw:
        if key not in allowed:
            raise InputError(f"{path} sets {key!r}; a checkpoint may set {', '.join(allowed)}.")
    return read(raw, f"{path}: {{}}")


def record(values: Values, setup: Setup, request: Request, output: Output) -> dict[str, Any]:
    """All settings under their flags' names, enough to repeat the video."""
    found: dict[str, Any] = {**_named(setup.execution), **_named(setup.attention)}
    found |= given(setup.cache) | {"step_cache": setup.cache.step_cache}
    found |= {**values, **_named(request), **_named(output)}  # latents keep how they were made
    found |= {name: str(Path(found[name]).absolute()) for name in PATHS if found.get(name)}
    return {
        name: found[name]
        for name, flag in FLAGS.items()
        if flag.record
        and found.get(name) is not None
        and (flag.needs is None or found.get(flag.needs))
    }


def _named(part: Execution | Attention | Request | Output) -> dict[str, Any]:
    return {field.name: getattr(part, field.name) for field in fields(part)}
