"""Parses the fields of a request: per-video settings, and their names in other video APIs."""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from wan.app.run import PATH_SETTINGS, Run
from wan.settings.errors import FlagNaming, InputError
from wan.settings.fields import list_options
from wan.settings.flags import FLAG_ALIASES, FLAGS, check_exclusive_settings, read_settings
from wan.settings.values import format_value, integer, read_image_files, read_path, real
from wan.settings.video_options import INPUT_OPTIONS, MAX_REFERENCE_IMAGES

FIELD_TO_SETTING = {
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
UPLOADS = tuple(
    name
    for group in INPUT_OPTIONS
    for name, flag in list_options(group).items()
    if flag.reader in (read_path, read_image_files) and name != FOLDER
)
"""Settings whose values are uploaded files."""
_GUIDANCE = ("guidance_high", "guidance_low")
_API_FIELDS = (
    *("model", "seconds", "boundary_ratio", "priority"),
    *("guidance_scale", "guidance_scale_2", *_GUIDANCE),
)
_REFUSED_FIELDS = {
    "latent_path": "requests cannot name files of the server; give a seed",
    "save_file": "the video is fetched from /v1/videos/{id}/content",
}
_DATA_URL = re.compile(r"data:[\w.+/-]+;base64,", re.ASCII)


@dataclass(frozen=True)
class ParsedRequest:
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
    def naming(self) -> FlagNaming:
        """Names of the settings in refusals."""
        return make_field_naming(self.names)


def make_field_naming(names: Mapping[str, str]) -> FlagNaming:
    """Returns the naming of settings for refusals, given the field name of each setting."""
    return FlagNaming(lambda name, value: name if value is None else f"{name} {value}", names)


def parse_request(body: Mapping[str, Any], run: Run, model: str) -> ParsedRequest:
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
    api_fields: dict[str, Any] = {}
    task = run.params.task
    folder_files = {key: f"{FOLDER}/{name}" for key, name in task.upload_names.items()}
    for key, value in body.items():
        key, value = _unwrap_image_url(key, value)
        has_clip_prompts = key == "prompt" and isinstance(value, list)
        name = "clip_prompts" if has_clip_prompts else FIELD_TO_SETTING.get(key, key)
        if key in _REFUSED_FIELDS:
            raise InputError(key, why="is not allowed", remedy=_REFUSED_FIELDS[key])
        if name in names:
            why = f"means the same as {names[name]}"
            raise InputError(key, why=why, remedy="give one of them")
        if key in _API_FIELDS:
            api_fields[key] = value
        elif name == PICTURES and isinstance(value, list):
            if len(value) > MAX_REFERENCE_IMAGES:  # before any picture is decoded
                why = f"has {len(value)} pictures, and at most {MAX_REFERENCE_IMAGES} are allowed"
                raise InputError(key, why=why, remedy="choose some of them")
            for index, picture in enumerate(value):
                files[f"{PICTURES}/{index:03}"] = _decode_upload(*_unwrap_image_url(key, picture))
        elif name in UPLOADS or name in folder_files:
            files[folder_files.get(name, name)] = _decode_upload(key, value)
        elif name not in FLAGS or (
            name in PATH_SETTINGS and not _equals_current_value(name, value, run)
        ):
            raise InputError(key, why="is not a known field", remedy="remove it")
        elif not FLAGS[name].line:
            if not _equals_current_value(name, value, run):
                why = "can only be set when the service starts"
                raise InputError(key, format_value(value), why, "leave it out")
        else:
            is_single_prompt = name == "clip_prompts" and isinstance(value, str)
            settings[name] = [value] if is_single_prompt else value
        names[name] = key
    try:
        _check_prompts(settings, files, task.uploads_without_prompt)
        priority = _apply_api_fields(api_fields, settings, run, model)
        if "size" in settings:
            settings["size"] = str(settings["size"]).replace("x", "*")
        check_exclusive_settings(read_settings(settings))
    except InputError as error:
        error.naming = make_field_naming(names)
        raise
    return ParsedRequest(settings, files, priority, names)


def check_prompt(text: Any) -> None:
    """Refuses a prompt without a visible character."""
    if not any(c.isprintable() and not c.isspace() for c in str("" if text is None else text)):
        raise InputError("prompt", why="has no visible text", remedy="describe the video")


def _check_prompts(
    settings: Mapping[str, Any], files: Mapping[str, bytes], sufficient: Collection[str]
) -> None:
    """Refuses a request without a prompt; the command line would use an example prompt."""
    if settings.get("clip_prompts"):
        prompts = settings["clip_prompts"]
    elif "prompt" in settings:
        prompts = [settings["prompt"]]
    else:
        uploads = {name.partition("/")[0] for name in files}
        if sufficient and uploads.issuperset(sufficient):
            return
        raise InputError("prompt", why="is missing", remedy="describe the video")
    for prompt in prompts if isinstance(prompts, list) else [prompts]:
        check_prompt(prompt)


def _unwrap_image_url(key: str, value: Any) -> tuple[str, Any]:
    """Unwraps a field NAME[image_url], or a value {"image_url": ...}."""
    match = re.fullmatch(r"(\w+)\[image_url\]", key)
    if match is not None:
        return match[1], value
    if isinstance(value, Mapping) and {*value} == {"image_url"}:
        return key, value["image_url"]
    return key, value


def _decode_upload(key: str, value: Any) -> bytes:
    """Returns the content of an uploaded file or of a data URL."""
    if isinstance(value, bytes):
        return value
    prefix = _DATA_URL.match(value) if isinstance(value, str) else None
    if prefix is None:
        raise InputError(key, why="must be an uploaded file or a base64 data URL")
    try:
        return base64.b64decode(value[prefix.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        why = f"is no valid base64 ({error})"
        raise InputError(key, why=why, remedy="encode it again") from error


def _equals_current_value(name: str, value: Any, run: Run) -> bool:
    """Returns whether the running service has this value of a setting."""
    setup = run.setup
    groups = (setup.execution, setup.attention, setup.parallel, setup.cache, run.output)
    current = {n: v for part in groups for n, v in vars(part).items()} | run.settings
    if name not in FLAGS or name not in current:
        return False
    requested = FLAGS[name].reader(f"`{name}`", value)
    return json.dumps(requested, default=str) == json.dumps(current[name], default=str)


def _apply_api_fields(
    api_fields: Mapping[str, Any], settings: dict[str, Any], run: Run, model: str
) -> int:
    """Converts API fields to settings, in place; returns the priority."""
    if api_fields.get("model", model) != model:
        raise InputError("model", format_value(api_fields["model"]), f"is not loaded; {model} is")
    if "boundary_ratio" in api_fields:
        boundary = run.params.boundary
        if real(0, 1)("boundary_ratio", api_fields["boundary_ratio"]) != boundary:
            why = (
                "is set by the checkpoint"
                if boundary is None
                else f"differs from that of this service, {boundary}"
            )
            raise InputError(
                "boundary_ratio", format_value(api_fields["boundary_ratio"]), why, "leave it out"
            )
    if "seconds" in api_fields:
        if run.params.has_clips:
            why = "is set by the audio, the pose video, or clips and num_frames"
            raise InputError("seconds", why=why, remedy="leave it out")
        seconds = real(0, 3600, exclude_min=True)("seconds", api_fields["seconds"])
        fps = FLAGS["fps"].reader("fps", settings["fps"]) if "fps" in settings else run.output.fps
        frames = 4 * max(math.floor((seconds * fps - 1) / 4 + 0.5), 0) + 1
        frame_num = settings.setdefault("frame_num", frames)
        if FLAGS["frame_num"].reader("num_frames", frame_num) != frames:
            why = f"and num_frames {frame_num} differ: these seconds are {frames} frames"
            raise InputError(
                "seconds", format_value(api_fields["seconds"]), why, "give one of them"
            )
    _apply_guidance_fields(api_fields, settings, run)
    return int(integer(-100, 100)("priority", api_fields.get("priority", 0)))


def _apply_guidance_fields(
    api_fields: Mapping[str, Any], settings: dict[str, Any], run: Run
) -> None:
    """Converts the guidance scales of the experts to `sample_guide_scale` LOW,HIGH, in place."""
    experts = [name for name in _GUIDANCE if name in api_fields]
    if experts:
        for other in ("guidance_scale", "guidance_scale_2", "sample_guide_scale"):
            if other in api_fields or other in settings:
                why = f"means the same as {other}"
                raise InputError(experts[0], why=why, remedy="give one of them")
        if run.params.boundary is None:
            why = f"is for models with two experts, and {run.setup.preset.task} has one network"
            raise InputError(experts[0], why=why, remedy="give guidance_scale")
        low, high = run.params.sample_guide_scale
        high, low = (
            real(0, 100, exclude_min=True)(name, api_fields.get(name, default))
            for name, default in zip(_GUIDANCE, (high, low), strict=True)
        )
        settings["sample_guide_scale"] = f"{low},{high}"
        return
    scales = [
        real(0, 1000)(name, api_fields[name])
        for name in ("guidance_scale_2", "guidance_scale")
        if name in api_fields
    ]
    if scales:
        if "sample_guide_scale" in settings:
            why = "means the same as guidance_scale"
            raise InputError("`sample_guide_scale`", None, why, "give one of them")
        if "guidance_scale" not in api_fields:
            why = "is only for the low-noise expert"
            raise InputError("guidance_scale_2", why=why, remedy="add guidance_scale")
        settings["sample_guide_scale"] = ",".join(f"{scale:g}" for scale in scales)
