"""Parses the fields of a request: per-video settings, and their names in other video APIs."""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wan.pipeline import driving
from wan.pipeline.sources import MAX_REFERENCE_IMAGES
from wan.run import PATH_SETTINGS, Run
from wan.settings.errors import FlagNaming, InputError
from wan.settings.flags import FLAG_ALIASES, FLAGS, check_exclusive_settings, read_settings
from wan.settings.values import format_value, integer, real

NAMES = {
    "num_frames": "frame_num",
    "num_inference_steps": "sample_steps",
    "flow_shift": "sample_shift",
    "seed": "base_seed",
    "input_reference": "image",
    **FLAG_ALIASES,
}
"""Field name of OpenAI's, vllm-omni's or MLPerf's API -> setting."""
FOLDER = "src_root_path"
"""Setting whose value is a folder of uploaded files."""
PICTURES = "src_ref_images"
"""Setting whose value is one or several uploaded files."""
UPLOADS = ("image", "last_image", "audio", "pose_video", "src_video", "src_mask", PICTURES)
"""Settings whose values are uploaded files."""
_IN_FOLDER = {Path(name).stem: f"{FOLDER}/{name}" for name in driving.FILES}
_GUIDANCE = ("guidance_high", "guidance_low")
_OWN = (
    *("model", "seconds", "boundary_ratio", "priority"),
    *("guidance_scale", "guidance_scale_2", *_GUIDANCE),
)
_PROMPT_MAY_BE_LEFT_OUT = {"s2v": ("image", "audio"), "animate": (FOLDER,)}
"""Kind of task -> files with which a prompt is optional; official code has a default prompt."""
_LEFT_OUT = {
    "latent_path": "requests cannot name files of the server; give a seed",
    "save_file": "the video is fetched from /v1/videos/{id}/content",
}
_DATA_URL = re.compile(r"data:[\w.+/-]+;base64,", re.ASCII)


@dataclass(frozen=True)
class Asked:
    """Parsed fields of a request.

    Attributes:
        settings: Setting -> raw value, without uploaded files.
        files: Setting, or SETTING/NAME for several files, -> content of an uploaded file.
        priority: Jobs of higher priority run first.
        names: Setting -> field name of the request.
    """

    settings: dict[str, Any]
    files: dict[str, bytes] = field(default_factory=dict)
    priority: int = 0
    names: dict[str, str] = field(default_factory=dict)

    @property
    def words(self) -> FlagNaming:
        """Names of the settings in refusals."""
        return words(self.names)


def words(names: Mapping[str, str]) -> FlagNaming:
    """Returns the naming of settings for refusals, given the field name of each setting."""
    return FlagNaming(lambda name, value: name if value is None else f"{name} {value}", names)


def asked(body: Mapping[str, Any], run: Run, model: str) -> Asked:
    """Parses the fields of a request.

    Args:
        body: Field -> text, number, JSON value, the bytes of an uploaded file, or a list of these.
        run: The run that the ranks were started with.
        model: The name of the loaded model.

    Raises:
        InputError: A field is unknown, given twice, or does not fit the loaded model.
    """
    settings: dict[str, Any] = {}
    files: dict[str, bytes] = {}
    names: dict[str, str] = {}
    own: dict[str, Any] = {}
    in_folder = _IN_FOLDER if run.setup.preset.kind == "animate" else {}
    for key, value in body.items():
        key, value = _part(key, value)
        of_clips = key == "prompt" and isinstance(value, list)
        name = "clip_prompts" if of_clips else NAMES.get(key, key)
        if key in _LEFT_OUT:
            raise InputError(key, why="is not allowed", remedy=_LEFT_OUT[key])
        if name in names:
            why = f"means the same as {names[name]}"
            raise InputError(key, why=why, remedy="give one of them")
        if key in _OWN:
            own[key] = value
        elif name == PICTURES and isinstance(value, list):
            if len(value) > MAX_REFERENCE_IMAGES:  # before any picture is decoded
                why = f"has {len(value)} pictures, and at most {MAX_REFERENCE_IMAGES} are allowed"
                raise InputError(key, why=why, remedy="choose some of them")
            for index, one in enumerate(value):
                files[f"{PICTURES}/{index:03}"] = _content(*_part(key, one))
        elif name in UPLOADS or name in in_folder:
            files[in_folder.get(name, name)] = _content(key, value)
        elif name not in FLAGS or (name in PATH_SETTINGS and not _is_running(name, value, run)):
            raise InputError(key, why="is not a known field", remedy="remove it")
        elif not FLAGS[name].line:
            if not _is_running(name, value, run):
                why = "can only be set when the service starts"
                raise InputError(key, format_value(value), why, "leave it out")
        else:
            single = name == "clip_prompts" and isinstance(value, str)
            settings[name] = [value] if single else value
        names[name] = key
    try:
        _check_prompts(settings, files, run.setup.preset.kind)
        priority = _own(own, settings, run, model)
        if "size" in settings:
            settings["size"] = str(settings["size"]).replace("x", "*")
        check_exclusive_settings(read_settings(settings))
    except InputError as error:
        error.naming = words(names)
        raise
    return Asked(settings, files, priority, names)


def check_prompt(text: Any) -> None:
    """Refuses a prompt without a visible character."""
    if not any(c.isprintable() and not c.isspace() for c in str("" if text is None else text)):
        raise InputError("prompt", why="has no visible text", remedy="describe the video")


def _check_prompts(settings: Mapping[str, Any], files: Mapping[str, bytes], kind: str) -> None:
    """Refuses a request without a prompt; the command line would use an example prompt."""
    if settings.get("clip_prompts"):
        prompts = settings["clip_prompts"]
    elif "prompt" in settings:
        prompts = [settings["prompt"]]
    else:
        given = {name.partition("/")[0] for name in files}
        if kind in _PROMPT_MAY_BE_LEFT_OUT and given.issuperset(_PROMPT_MAY_BE_LEFT_OUT[kind]):
            return
        raise InputError("prompt", why="is missing", remedy="describe the video")
    for prompt in prompts if isinstance(prompts, list) else [prompts]:
        check_prompt(prompt)


def _part(key: str, value: Any) -> tuple[str, Any]:
    """Unwraps a field NAME[image_url], or a value {"image_url": ...}."""
    of_form = re.fullmatch(r"(\w+)\[image_url\]", key)
    if of_form is not None:
        return of_form[1], value
    if isinstance(value, Mapping) and {*value} == {"image_url"}:
        return key, value["image_url"]
    return key, value


def _content(key: str, value: Any) -> bytes:
    """Returns the content of an uploaded file or of a data URL."""
    if isinstance(value, bytes):
        return value
    start = _DATA_URL.match(value) if isinstance(value, str) else None
    if start is None:
        raise InputError(key, why="must be an uploaded file or a base64 data URL")
    try:
        return base64.b64decode(value[start.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        why = f"is no valid base64 ({error})"
        raise InputError(key, why=why, remedy="encode it again") from error


def _is_running(name: str, value: Any, run: Run) -> bool:
    """Returns whether the running service has this value of a setting."""
    setup = run.setup
    parts = (setup.execution, setup.attention, setup.parallel, setup.cache, run.output)
    runs = {n: v for part in parts for n, v in vars(part).items()} | run.settings
    if name not in FLAGS or name not in runs:
        return False
    same = FLAGS[name].reader(f"`{name}`", value)
    return json.dumps(same, default=str) == json.dumps(runs[name], default=str)


def _own(own: Mapping[str, Any], settings: dict[str, Any], run: Run, model: str) -> int:
    """Converts API fields to settings, in place; returns the priority."""
    if own.get("model", model) != model:
        raise InputError("model", format_value(own["model"]), f"is not loaded; {model} is")
    if "boundary_ratio" in own:
        runs = run.params.boundary
        if real(0, 1)("boundary_ratio", own["boundary_ratio"]) != runs:
            why = (
                "is set by the checkpoint"
                if runs is None
                else f"differs from that of this service, {runs}"
            )
            raise InputError(
                "boundary_ratio", format_value(own["boundary_ratio"]), why, "leave it out"
            )
    if "seconds" in own:
        if run.params.has_clips:
            why = "is set by the audio, the pose video, or clips and num_frames"
            raise InputError("seconds", why=why, remedy="leave it out")
        seconds = real(0, 3600, exclude_min=True)("seconds", own["seconds"])
        fps = FLAGS["fps"].reader("fps", settings["fps"]) if "fps" in settings else run.output.fps
        frames = 4 * max(math.floor((seconds * fps - 1) / 4 + 0.5), 0) + 1
        given = settings.setdefault("frame_num", frames)
        if FLAGS["frame_num"].reader("num_frames", given) != frames:
            why = f"and num_frames {given} differ: these seconds are {frames} frames"
            raise InputError("seconds", format_value(own["seconds"]), why, "give one of them")
    _read_guidance(own, settings, run)
    return int(integer(-100, 100)("priority", own.get("priority", 0)))


def _read_guidance(own: Mapping[str, Any], settings: dict[str, Any], run: Run) -> None:
    """Converts the guidance scales of the experts to `sample_guide_scale` LOW,HIGH, in place."""
    experts = [name for name in _GUIDANCE if name in own]
    if experts:
        for other in ("guidance_scale", "guidance_scale_2", "sample_guide_scale"):
            if other in own or other in settings:
                why = f"means the same as {other}"
                raise InputError(experts[0], why=why, remedy="give one of them")
        if run.params.boundary is None:
            why = f"is for models with two experts, and {run.setup.preset.task} has one network"
            raise InputError(experts[0], why=why, remedy="give guidance_scale")
        low, high = run.params.sample_guide_scale
        high, low = (
            real(0, 100, exclude_min=True)(name, own.get(name, default))
            for name, default in zip(_GUIDANCE, (high, low), strict=True)
        )
        settings["sample_guide_scale"] = f"{low},{high}"
        return
    scales = [
        real(0, 1000)(name, own[name])
        for name in ("guidance_scale_2", "guidance_scale")
        if name in own
    ]
    if scales:
        if "sample_guide_scale" in settings:
            why = "means the same as guidance_scale"
            raise InputError("`sample_guide_scale`", None, why, "give one of them")
        if "guidance_scale" not in own:
            why = "is only for the low-noise expert"
            raise InputError("guidance_scale_2", why=why, remedy="add guidance_scale")
        settings["sample_guide_scale"] = ",".join(f"{scale:g}" for scale in scales)
