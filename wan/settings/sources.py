"""Where settings come from besides flags: earlier runs' records and the checkpoint itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wan.settings import env
from wan.settings.errors import InputError
from wan.settings.files import read_json, safetensors_header, safetensors_metadata
from wan.settings.flags import FLAGS, read
from wan.settings.presets import Preset

_FROM_CHECKPOINT = (
    "size",
    "frame_num",
    "sample_solver",
    "sample_steps",
    "sample_shift",
    "sample_guide_scale",
    "fps",
    "prompt",
    "negative_prompt",
)
_DEMOS = Path(__file__).resolve().parents[2] / "examples" / "demo"  # trained, in the repository
_WHILE_DECODING = (
    "decode_latents",
    "ckpt_dir",
    "save_file",
    "fps",
    "device",
    "vae_tiling",
    "offload_model",
)


def recorded(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the earlier run that --from_json repeats or --decode_latents continues."""
    if "from_json" in flags and "decode_latents" in flags:
        raise InputError("--from_json and --decode_latents exclude each other; give one of them.")
    if "from_json" in flags:
        path = Path(flags["from_json"])
        settings = read_json(path).get("settings")
        if isinstance(settings, dict):  # the repeat gets a name of its own: nothing is overwritten
            settings = {key: value for key, value in settings.items() if key != "save_file"}
    elif "decode_latents" in flags:
        for name in flags:
            if name not in _WHILE_DECODING:
                raise InputError(
                    f"--{name} has no effect with --decode_latents, which only decodes; drop it."
                )
        path = Path(flags["decode_latents"])
        _latents(path)
        settings = safetensors_metadata(path, "settings")
    else:
        return {}
    if not isinstance(settings, dict):
        raise InputError(f"{path} is not a record of generate.py (no settings in it).")
    for name in settings:
        if name in FLAGS and not FLAGS[name].record:
            raise InputError(f"{path}: {name} is not part of a record; remove it.")
    return read(settings, f"{path}: {{}}")


def _latents(path: Path) -> tuple[int, ...]:
    found = safetensors_header(path).get("latents")
    if found is None or len(found.shape) != 4:
        raise InputError(f"{path} holds no latents of generate.py; give a .latents.safetensors.")
    return found.shape


def check_latents(path: Path, preset: Preset) -> None:
    """The latents must be those of the task's VAE."""
    channels = _latents(path)[0]
    if channels != preset.latent_channels:
        raise InputError(
            f"{path} has {channels} channels, the {preset.vae} VAE of this task decodes "
            f"{preset.latent_channels}; give the --ckpt_dir the latents were made with."
        )


def checkpoint_folder(values: Mapping[str, Any], preset: Preset) -> tuple[Path, bool]:
    """The checkpoint folder, and whether it is the demo's."""
    if "ckpt_dir" in values:
        return Path(os.path.expanduser(values["ckpt_dir"])), False
    official = Path(preset.folder)
    if official.is_dir():
        return official, False
    trained = _DEMOS / preset.task
    return trained if trained.is_dir() else env.cache_dir() / f"demo-{preset.task}-v1", True


def demo_notice(folder: Path, preset: Preset) -> str:
    """What to expect of the demo checkpoint in `folder`."""
    if folder.parent == _DEMOS:
        expect = f"It draws plain shapes that move; {_DEMOS / 'README.md'} lists its words."
    else:
        expect = "Its weights are random, so the video is noise; it shows that everything runs."
    return f"No --ckpt_dir and no ./{preset.folder}: using the demo checkpoint {folder}. {expect}"


def generation_config(folder: Path) -> dict[str, Any]:
    """Sampling defaults that the checkpoint brings in its generation_config.json."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    raw = read_json(path)
    for key in raw:
        if key not in _FROM_CHECKPOINT:
            raise InputError(
                f"{path} sets {key!r}; a checkpoint may set {', '.join(_FROM_CHECKPOINT)}."
            )
    return read(raw, f"{path}: {{}}")
