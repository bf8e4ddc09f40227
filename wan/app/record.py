"""Reads settings from records and a checkpoint's generation_config.json, and writes records."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from collections import ChainMap
from dataclasses import asdict
from datetime import datetime
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING, Any

from wan.app.output import make_unfinished_paths, write_to_first_path
from wan.app.run import PATH_SETTINGS, Run
from wan.checkpoint.formats.headers import read_json
from wan.checkpoint.formats.safetensors_header import read_safetensors_metadata
from wan.checkpoint.lora.folder import make_video_lora_record
from wan.checkpoint.lora.resolve import make_lora_record
from wan.media.video_writer import read_latents_shape
from wan.pipeline.setup import Setup
from wan.settings import noise_schedule
from wan.settings.command import Output
from wan.settings.errors import InputError, make_file_naming
from wan.settings.flags import FLAGS
from wan.settings.layers import Layer, read_layer
from wan.settings.removed import update_record
from wan.settings.rules import Values
from wan.tasks.base import VideoParams
from wan.utils import env, log, system
from wan.utils.files import RECORD_KIND, has_file, iterate_numbered_paths, write_output
from wan.utils.log import logger
from wan.utils.version import __version__

if TYPE_CHECKING:
    from wan.metering.meter import PowerMeasurement
    from wan.pipeline.pipeline import Pipeline


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
    return record.with_values({"save_file": free_path}), variables


def _read_record(path: Path, settings: Any) -> Layer:
    if not isinstance(settings, dict):
        raise InputError(f"{path} is not a record of generate.py (no settings in it).")
    for name in settings:
        if name in FLAGS and not FLAGS[name].record:
            raise InputError(f"{path}: {name}", why="is not part of a record", remedy="remove it")
    return read_layer(update_record(settings), str(path), make_file_naming(path), "record")


def record_settings(
    values: Values, setup: Setup, params: VideoParams, output: Output
) -> dict[str, Any]:
    """Returns all settings that are needed to repeat the video, by flag name."""
    settings: dict[str, Any] = {**vars(setup.execution), **vars(setup.attention)}
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


def make_mp4_comment(run: Run) -> str:
    """Returns the comment of a video's mp4, JSON of the seed and some settings."""
    preset, seed, settings = run.params.preset, run.params.base_seed, run.settings
    comment = {"wan": __version__, "task": preset.task, "seed": seed}
    comment |= {name: settings[name] for name in _COMMENT_SETTINGS if name in settings}
    return json.dumps(comment, ensure_ascii=False, default=str)


_COMMENT_SETTINGS = ("prompt", "size", "frame_num", "sample_solver", "sample_steps", "sample_shift")
"""Settings in the comment of an mp4; the record has all settings."""


def write_record(
    run: Run, pipeline: Pipeline, size: tuple[int, int, int], power: PowerMeasurement | None
) -> Path | None:
    """Writes the JSON record, to the temporary folder if the video's folder is not writable.

    Args:
        size: Number of frames, height and width of the video.

    Returns:
        The path of the record; None if it could not be written.
    """
    execution, device = run.setup.execution, pipeline.device
    num_frames, height, width = size
    precision = execution.get_precision(device.type)
    packages = run.setup.attention.required_packages
    video_loras = make_video_lora_record(run.inputs.loras)
    host_memory = system.read_peak_memory().to_record()
    record = {
        # The flag converts the DiT to bf16, with any precision.
        "settings": run.settings
        | ({} if execution.convert_model_dtype else {"precision": precision}),
        "sources": {n: source for n, source in run.sources.items() if n in run.settings},
        "seed": run.params.base_seed,
        "inputs": [
            {"setting": file.setting, "file": str(file.path.absolute()), "sha256": file.sha256}
            for file in run.input_files
        ],
        "video": {"frames": num_frames, "width": width, "height": height, "fps": run.output.fps},
        "used": {
            "device": device.name(),
            "precision": precision,
            "dit_precision": execution.get_dit_precision(device.type),
            "kernel": pipeline.kernel_name,
            "vae": pipeline.vae_runner.last_method,
            **asdict(run.setup.parallel),
        },
        **({"boundary": boundary} if (boundary := run.boundary) is not None else {}),
        **_make_steps_record(run.params),
        **({"lora": make_lora_record(run.setup.loras)} if run.setup.loras else {}),
        **({"video_lora": video_loras} if video_loras else {}),
        **({"step_cache": cache} if (cache := pipeline.step_cache.make_record()) else {}),
        "seconds": {name: round(s, 3) for name, s in pipeline.stage_timer.seconds.items()},
        "peak_memory_bytes": {"device": device.peak_memory(), **host_memory},
        **({"power": power.to_record()} if power is not None else {}),
        "versions": {"wan": __version__} | log.collect_versions(device.type, packages),
        "run": {
            "date": datetime.now().astimezone().isoformat(timespec="seconds"),
            "machine": platform.node(),
            "system": platform.platform(),
            "command": shlex.join(sys.argv),
            "commit": log.find_commit(),
        },
    }
    text = json.dumps(record, indent=1, ensure_ascii=False)

    def write(path: Path) -> None:
        with write_output(path, RECORD_KIND) as temporary:
            temporary.write_text(text, encoding="utf-8")

    paths = (run.output.record_path, *make_unfinished_paths(run.output, ".json"))
    return write_to_first_path(paths, write, "record")


def _make_steps_record(params: VideoParams) -> dict[str, Any]:
    """Returns the record's entries about steps that the settings do not list; {} for most videos.

    They are the first step of video to video, and the number of forward passes of a branch.
    """
    if not params.starts_from_source:
        forwards = params.num_forwards
        return {} if forwards == params.sample_steps else {"forwards": forwards}
    schedule = noise_schedule.make_noise_schedule(params)
    steps = {"step": schedule.first_step, "steps": len(schedule.experts)}
    return {"start": {**steps, "sigma": schedule.sigmas[0]}}


def log_video_summary(
    run: Run, pipeline: Pipeline, record_path: Path | None, power: PowerMeasurement | None
) -> None:
    """Logs the times, memory, power, seed and files of a complete video."""
    memory = system.read_peak_memory().summary()
    if (peak := pipeline.device.peak_memory()) is not None:
        memory = f"device {peak / 2**30:.2f} GiB, {memory}"
    times = pipeline.stage_timer.seconds.items()
    stages = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in times)
    logger.info("Seconds: %s. Peak memory: %s.", stages, memory)
    for line in (None if power is None else power.summary(), pipeline.step_cache.summarize()):
        if line is not None:
            logger.info("%s", line)
    logger.info("Seed %d, noise drawn on the %s.", run.params.base_seed, run.params.noise_device)
    logger.info("Video: %s  Record: %s", run.output.save_file, record_path or "none")
