"""Parses the fields of a request: per-video settings, and their names in other video APIs."""

from __future__ import annotations

import base64
import binascii
import json
import math
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from typing import Any

from wan.app.run import PATH_SETTINGS, Run
from wan.serve.requests.webhook_hosts import read_url
from wan.settings.errors import FlagNaming, InputError
from wan.settings.fields import list_options
from wan.settings.flags import FLAGS, FOREIGN_NAMES
from wan.settings.layers import Layer, read_layer
from wan.settings.removed import refuse_removed
from wan.settings.values import (
    Reader,
    format_value,
    integer,
    join_with_or,
    parse_number,
    read_image_files,
    read_path,
    real,
    split_list,
)
from wan.settings.video_options import INPUT_OPTIONS, MAX_REFERENCE_IMAGES

FIELD_NAMES = {
    "image": "input_reference",
    "frame_num": "num_frames",
    "sample_steps": "num_inference_steps",
    "sample_shift": "flow_shift",
    "base_seed": "seed",
    "video_lora": "lora",
}
"""Setting -> its field in the schema and in answers, where the two differ."""
FOLDER = "src_root_path"
"""Setting whose value is a folder of uploaded files."""
FIELD_TO_SETTING = {
    "num_frames": "frame_num",
    "num_inference_steps": "sample_steps",
    "flow_shift": "sample_shift",
    "seed": "base_seed",
    "seeds": "base_seed",
    "input_reference": "image",
    "image_reference": "image",
    "reference_url": "image",
    "input_references": "src_ref_images",
    "video_reference": "src_video",
    "video_url": "src_video",
    "audio_reference": "audio",
    "lora": "video_lora",
    "loras": "video_lora",
}
"""Field name of OpenAI's, vllm-omni's and SGLang's APIs -> setting."""
_OFF = (False, 0, "no", "off")
IGNORED_FIELDS: dict[str, tuple[Any, ...]] = {
    "user": (),
    "return_stage_metrics": (),
    "generator_device": ("cpu", "cuda", "gpu", "npu"),
    "quality": ("default", "standard", "auto", "high"),
    "output_quality": ("default", "auto", "high"),
    "max_sequence_length": (512,),
    "true_cfg_scale": (0, 1),
    "start_time_seconds": (0,),
    "diffusers_kwargs": ({},),
    "enable_teacache": _OFF,
    "enable_frame_interpolation": _OFF,
    "frame_interpolation_exp": (),
    "frame_interpolation_scale": (),
    "frame_interpolation_model_path": (),
    "enable_upscaling": _OFF,
    "upscaling_scale": (),
    "upscaling_model_path": (),
    "generate_sound": _OFF,
    "sound_duration": (),
}
"""Field of these APIs without an effect -> its allowed values; (): texts, numbers and switches."""
LORAS = ("video_lora", *(k for k, name in FIELD_TO_SETTING.items() if name == "video_lora"))
"""Fields whose value are the LoRAs of a video."""
SEEDS = ("base_seed", *(k for k, name in FIELD_TO_SETTING.items() if name == "base_seed"))
"""Fields whose value is a seed, or a list of the seeds of several videos."""
BLOCKS = ("extra_body", "extra_json", "extra_params", "video_params")
"""Fields whose values are JSON objects of further fields."""
PICTURES = "src_ref_images"
"""Setting whose value is one or several uploaded files."""
UPLOADS = tuple(
    name
    for group in INPUT_OPTIONS
    for name, flag in list_options(group).items()
    if flag.reader in (read_path, read_image_files) and name != FOLDER
)
"""Settings whose values are uploaded files."""
JSON_FIELDS = frozenset(
    (
        *(*BLOCKS, *UPLOADS, *LORAS, *SEEDS),
        *(k for k, name in FIELD_TO_SETTING.items() if name in UPLOADS),
    )
)
"""Fields whose value in a form may be the text of a JSON object or list."""
PICTURE_FIELDS = tuple(
    key for key in (PICTURES, *FIELD_TO_SETTING) if PICTURES in (key, FIELD_TO_SETTING.get(key))
)
"""Fields that a form may repeat, as NAME or NAME[]; those of seeds only as NAME[]."""
_GUIDANCE = ("guidance_high", "guidance_low")
COUNTS = ("n", "num_outputs_per_prompt")
"""Fields whose value is the number of videos."""
MAX_OUTPUTS = 10
"""Videos of one request; vllm-omni and SGLang allow as many."""
COMPUTED_FIELDS: dict[str, Reader | None] = {
    "seconds": real(0, 3600, exclude_min=True),
    "boundary_ratio": real(0, 1),
    "priority": integer(-100, 100),
    **dict.fromkeys(("width", "height", "short_edge"), integer(1, 100_000)),
    **dict.fromkeys(COUNTS, integer(1, MAX_OUTPUTS)),
    **dict.fromkeys(_GUIDANCE, real(0, 100, exclude_min=True)),
    **dict.fromkeys(("guidance_scale", "guidance_scale_2"), real(0, 1000)),
    **dict.fromkeys(("model", "webhook_url", "aspect_ratio")),
}
"""Field from which settings are computed -> reader of its value; None: it is read later."""
URL_KEYS = ("image_url", "video_url", "audio_url", "url")
"""Keys of an object that has a data URL."""
_BASE64_STEP = 65_536  # characters that are decoded at once
_DATA_URL = re.compile(r"data:[\w.+/-]*(;[\w.+=-]+)*;base64,", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class ParsedRequest:
    """Parsed fields of a request.

    Attributes:
        settings: Setting -> raw value, without uploaded files. `base_seed` is missing for a random
            one, and a list for several videos.
        files: Setting, or SETTING/NAME for several files, -> content of an uploaded file.
        priority: Jobs of higher priority run first.
        names: Setting -> field name of the request.
        webhook_url: Address that gets the events of the job.
    """

    settings: dict[str, Any]
    files: Mapping[str, bytes | bytearray] = field(default_factory=dict)
    priority: int = 0
    names: dict[str, str] = field(default_factory=dict)
    webhook_url: str | None = None

    @property
    def num_outputs(self) -> int:
        """Number of videos."""
        seeds = self.settings.get("base_seed")
        return len(seeds) if isinstance(seeds, list) else 1

    @property
    def naming(self) -> FlagNaming:
        """Names of the settings in refusals."""
        return make_field_naming(self.names)


def make_field_naming(names: Mapping[str, str]) -> FlagNaming:
    """Returns the naming of settings for refusals, given the field name of each setting."""
    names = {"image": FIELD_NAMES["image"], FOLDER: "src_ref, src_pose and src_face"} | dict(names)
    return FlagNaming(lambda name, value: name if value is None else f"{name} {value}", names)


def read_request_layer(settings: Mapping[str, Any], names: Mapping[str, str]) -> Layer:
    """Reads the settings of a request.

    Args:
        names: Setting -> field name of the request.
    """
    return read_layer(settings, "the request", make_field_naming(names))


def parse_request(body: Mapping[str, Any], run: Run, models: Sequence[str]) -> ParsedRequest:
    """Parses the fields of a request.

    Args:
        body: Field -> text, number, JSON value, the bytes of an uploaded file, or a list of these.
            null: as if left out, except for the prompt.
        run: The run that the ranks were started with.
        models: The names of the loaded model.

    Raises:
        InputError: A field is unknown, given twice, or does not fit the loaded model.
    """
    fields = _RequestFields(run)
    for key, value in _merge_blocks(body).items():
        fields.add(*_unwrap_url(key, value))
    settings, files, api_fields = fields.settings, fields.files, fields.api_fields
    try:
        _check_prompts(settings)
        if "seconds" in api_fields and "src_video" in files and "fps" not in settings:
            why = "depends on the frame rate of the uploaded video"
            raise InputError("seconds", why=why, remedy="add fps, or give num_frames instead")
        _apply_api_fields(fields, run, models)
        _apply_shape(fields, run)
        _apply_size(api_fields, settings)
        seeds = _read_seeds(api_fields, settings)
        _normalize_loras(settings, run)
        read_request_layer(settings, fields.names)
    except InputError as error:
        error.naming = make_field_naming(fields.names)
        raise
    if seeds:
        settings["base_seed"] = seeds if len(seeds) > 1 else seeds[0]
    webhook_url = api_fields.get("webhook_url")
    url = None if webhook_url is None else read_url(webhook_url)
    priority = api_fields.get("priority", 0)
    return ParsedRequest(settings, files, priority, fields.names, url)


class _RequestFields:
    """Sorts the fields of a request.

    Attributes:
        settings, files, names: As in `ParsedRequest`.
        api_fields: Those of `COMPUTED_FIELDS`.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.settings: dict[str, Any] = {}
        self.files: dict[str, bytes | bytearray] = {}
        self.names: dict[str, str] = {}
        self.api_fields: dict[str, Any] = {}

    def add(self, key: str, value: Any) -> None:
        """Adds a field; refuses it if its setting has been given, or if it is not known."""
        name = _find_setting(key, value, self._run)
        folder_files = self._run.params.task.upload_names
        if name in self.names:
            is_equal = self.names[name] == key  # such as NAME and NAME[image_url] of a form
            why = "is given twice" if is_equal else f"means the same as {self.names[name]}"
            raise InputError(key, why=why, remedy="give one of them")
        if key in LORAS and value in ({}, []):
            return
        if key in COMPUTED_FIELDS:
            reader = COMPUTED_FIELDS[key]
            self.api_fields[key] = value if reader is None else reader(key, value)
        elif key in IGNORED_FIELDS:
            _check_ignored_field(key, value)
        elif name in folder_files:
            self.files[f"{FOLDER}/{folder_files[name]}"] = _decode_upload(key, value)
        elif name in UPLOADS:
            self.files |= _decode_uploads(key, name, value)
        else:
            self._add_setting(key, name, value)
        self.names[name] = key

    def _add_setting(self, key: str, name: str, value: Any) -> None:
        refuse_removed(name)
        if name not in FLAGS or (
            name in PATH_SETTINGS and not _equals_current_value(name, value, self._run)
        ):
            raise InputError(key, why="is not a known field", remedy=_suggest_field(key))
        if FLAGS[name].line:
            is_single_prompt = name == "clip_prompts" and isinstance(value, str)
            self.settings[name] = [value] if is_single_prompt else value
        elif not _equals_current_value(name, value, self._run):
            why = "can only be set when the service starts"
            raise InputError(key, format_value(value), why, "leave it out")


def check_prompt(text: Any) -> None:
    """Refuses a prompt without a visible character."""
    if not any(c.isprintable() and not c.isspace() for c in str("" if text is None else text)):
        raise InputError("prompt", why="has no visible text", remedy="describe the video")


def _check_prompts(settings: Mapping[str, Any]) -> None:
    """Refuses prompts without a visible character; that of a request may be absent."""
    prompts = settings.get("clip_prompts") or settings.get("prompt")
    if "prompt" in settings or prompts:
        for prompt in prompts if isinstance(prompts, list) else [prompts]:
            check_prompt(prompt)


def _normalize_value(value: Any) -> object:
    """Returns a value in a form that is equal for equal values of forms and of JSON."""
    number = parse_number(value)
    return str(value).strip().lower() if number is None else number


def _merge_blocks(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a body and of the objects in it, without those that are null."""
    merged: dict[str, Any] = {}
    for key, value in body.items():
        if value is None and key != "prompt":
            continue
        if key in BLOCKS and not isinstance(value, Mapping):
            raise InputError(key, why="must be a JSON object")
        for name, inner in (_merge_blocks(value) if key in BLOCKS else {key: value}).items():
            if name in merged and _normalize_value(merged[name]) != _normalize_value(inner):
                raise InputError(name, why="is given twice", remedy="give it once")
            merged[name] = inner
    if merged.get("size") == "":  # SGLang's default
        del merged["size"]
    return merged


def _find_setting(key: str, value: Any, run: Run) -> str:
    """Returns the name of the setting of a field, or the field's name."""
    if key == "prompt" and isinstance(value, list):
        return "clip_prompts"
    name = FIELD_TO_SETTING.get(key, key)
    is_one = not isinstance(value, list) or len(value) == 1
    if key == "input_references" and is_one and run.setup.preset.task not in FLAGS[PICTURES].tasks:
        return "image"
    return name


def _suggest_field(key: str) -> str:
    """Returns what to do about an unknown field."""
    flag = FOREIGN_NAMES.get(key.replace("-", "_"), "")
    names = {name for name, flag in FLAGS.items() if flag.line and name not in PATH_SETTINGS}
    similar = [flag] if flag in names else []
    key = key[:100]  # a comparison takes longer for long names
    similar += get_close_matches(key, (*names, *FIELD_TO_SETTING, *COMPUTED_FIELDS), 1, 0.75)
    return f"did you mean {FIELD_NAMES.get(similar[0], similar[0])}" if similar else "remove it"


def _check_ignored_field(key: str, value: Any) -> None:
    """Refuses a value of a field without an effect, unless it requests nothing."""
    accepted, is_scalar = IGNORED_FIELDS[key], isinstance(value, str | int | float)
    is_accepted = _normalize_value(value) in map(_normalize_value, accepted)
    if not (is_accepted if accepted else is_scalar):
        choice = f"give {json.dumps(accepted[0])}, or " if accepted else ""
        raise InputError(key, format_value(value), "is not supported", f"{choice}leave it out")


def _unwrap_url(key: str, value: Any) -> tuple[str, Any]:
    """Unwraps a field NAME[image_url], or a value {"image_url": ...}."""
    match = re.fullmatch(r"(\w+)\[(\w+)\]", key)
    if match is not None and match[2] in URL_KEYS:
        return match[1], value
    if isinstance(value, Mapping) and len(value) == 1 and {*value} <= {*URL_KEYS}:
        return key, next(iter(value.values()))
    return key, value


def _decode_uploads(key: str, name: str, value: Any) -> dict[str, bytes | bytearray]:
    """Returns the content of a file by its setting, or of several pictures by their names."""
    if name != PICTURES or not isinstance(value, list):
        return {name: _decode_upload(key, value)}
    if len(value) > MAX_REFERENCE_IMAGES:  # before any picture is decoded
        why = f"has {len(value)} pictures, and at most {MAX_REFERENCE_IMAGES} are allowed"
        raise InputError(key, why=why, remedy="choose some of them")
    return {
        f"{PICTURES}/{index:03}": _decode_upload(key, picture)
        for index, picture in enumerate(value)
    }


def _decode_upload(key: str, value: Any) -> bytes | bytearray:
    """Returns the content of an uploaded file or of a data URL."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    _, value = _unwrap_url(key, value)
    if isinstance(value, bytes | bytearray):
        return value
    if isinstance(value, Mapping) and "file_id" in value:
        why = "has a file_id, and the service stores no files"
        raise InputError(key, why=why, remedy="send the file or a base64 data URL")
    return decode_data_url(key, [value] if isinstance(value, str) else [])


def decode_data_url(key: str, texts: Iterable[str]) -> bytearray:
    """Decodes the texts that form a base64 data URL; the first one has the media type.

    Raises:
        InputError: It is no data URL, or its base64 is invalid.
    """
    content, encoded, has_prefix = bytearray(), "", False
    try:
        for text in texts:
            prefix = None if has_prefix else _DATA_URL.match(text)
            if prefix is None and not has_prefix:
                break
            has_prefix = True
            encoded += text if prefix is None else text[prefix.end() :]
            count = (len(encoded) - 4) // 4 * 4 if len(encoded) > _BASE64_STEP else 0
            if "=" in encoded[:count]:
                raise ValueError("padding before its end")
            content += base64.b64decode(encoded[:count], validate=True)
            encoded = encoded[count:]
        content += base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        why = f"is no valid base64 ({error})"
        raise InputError(key, why=why, remedy="encode it again") from error
    if not has_prefix:
        raise InputError(key, why="must be an uploaded file or a base64 data URL")
    return content


def _equals_current_value(name: str, value: Any, run: Run) -> bool:
    """Returns whether the running service has this value of a setting."""
    setup = run.setup
    groups = (setup.execution, setup.attention, setup.parallel, setup.cache, run.output)
    current = {n: v for part in groups for n, v in vars(part).items()} | run.settings
    if name not in FLAGS or name not in current:
        return False
    requested = FLAGS[name].reader(f"`{name}`", value)
    return json.dumps(requested, default=str) == json.dumps(current[name], default=str)


def _apply_api_fields(fields: _RequestFields, run: Run, models: Sequence[str]) -> None:
    """Converts API fields to settings, in place."""
    api_fields, settings = fields.api_fields, fields.settings
    if api_fields.get("model", models[0]) not in models:
        why = f"is not loaded; {join_with_or(models)} is"
        raise InputError("model", format_value(api_fields["model"]), why)
    ratio, boundary = api_fields.get("boundary_ratio"), run.params.boundary
    if ratio is not None and ratio != boundary:
        differs = f"differs from that of this service, {boundary}"
        why = "is set by the checkpoint" if boundary is None else differs
        raise InputError("boundary_ratio", f"{ratio:g}", why, "leave it out")
    if "seconds" in api_fields:
        if run.params.has_clips:
            why = "is set by the audio, the pose video, or clips and num_frames"
            raise InputError("seconds", why=why, remedy="leave it out")
        seconds = api_fields["seconds"]
        fps, block = (
            FLAGS[name].reader(name, settings[name]) if name in settings else value
            for name, value in (
                ("fps", run.output.fps),
                ("num_frame_per_block", run.params.num_frame_per_block or 1),
            )
        )
        latents = block * max(math.floor(((seconds * fps + 3) / 4) / block + 0.5), 1)
        frames = 4 * latents - 3
        frame_num = settings.setdefault("frame_num", frames)
        if FLAGS["frame_num"].reader("num_frames", frame_num) != frames:
            why = f"and num_frames {frame_num} differ: these seconds are {frames} frames"
            raise InputError("seconds", f"{seconds:g}", why, "give one of them")
    _apply_guidance_fields(fields, run)


def _apply_shape(fields: _RequestFields, run: Run) -> None:
    """Converts `aspect_ratio` and `short_edge` to `width` and `height`, in place.

    A missing one is that of the service's size: the area, or the shape.
    """
    api_fields = fields.api_fields
    shape_fields = [name for name in ("aspect_ratio", "short_edge") if name in api_fields]
    if not shape_fields:
        return
    if "size" in fields.settings or "width" in api_fields or "height" in api_fields:
        raise InputError(shape_fields[0], why="means the same as size", remedy="give one of them")
    if fields.files:
        why = "has no effect, because the uploaded files decide the shape"
        raise InputError(shape_fields[0], why=why, remedy="give size, of which the area counts")
    width, height = run.params.size
    area, ratio = width * height, width / height
    if "aspect_ratio" in api_fields:
        text = str(api_fields["aspect_ratio"])
        match = re.fullmatch(r"([1-9]\d{0,3}):([1-9]\d{0,3})", text, re.ASCII)
        if match is None:
            raise InputError("aspect_ratio", format_value(text), "must be like 16:9")
        ratio = int(match[1]) / int(match[2])
    short_edge = api_fields.get("short_edge", math.sqrt(area / max(ratio, 1 / ratio)))
    sides = short_edge * max(ratio, 1), short_edge * max(1 / ratio, 1)
    multiple = run.setup.preset.size_multiple
    for name, side in zip(("width", "height"), sides, strict=True):
        api_fields[name] = max(round(side / multiple), 1) * multiple


def _apply_size(api_fields: Mapping[str, Any], settings: dict[str, Any]) -> None:
    """Writes `size` as WIDTH*HEIGHT, from `size` or from `width` and `height`, in place."""
    if "size" in settings:
        size = FLAGS["size"].reader("size", settings["size"])
        settings["size"] = "*".join(map(str, size))
    sides = {name: api_fields[name] for name in ("width", "height") if name in api_fields}
    if len(sides) == 1:
        (name,) = sides
        raise InputError(name, why="is one of two sides", remedy="give width and height")
    if sides:
        size = "*".join(map(str, sides.values()))
        if settings.setdefault("size", size) != size:
            why = f"and size {format_value(settings['size'])} differ"
            raise InputError("width", why=why, remedy="give one of them")


def _read_seeds(api_fields: Mapping[str, Any], settings: dict[str, Any]) -> list[int]:
    """Removes the seed, or the list of seeds, from the settings; returns that of each video.

    A negative seed means a random one. A single seed is that of the first of several videos, the
    others have the next ones. [] for one video with a random seed.
    """
    seeds = settings.pop("base_seed", -1)
    if isinstance(seeds, str) and "," in seeds:
        seeds = split_list(seeds)
    if not isinstance(seeds, list):
        seeds = [seeds]
    counts = {name: api_fields[name] for name in COUNTS if name in api_fields}
    if len({*counts.values()}) > 1:
        why = f"and n {counts['n']} differ"
        raise InputError(COUNTS[1], str(counts[COUNTS[1]]), why, "give one of them")
    count = next(iter(counts.values()), len(seeds))
    if not seeds:
        raise InputError("`base_seed`", why="is an empty list", remedy="give a seed")
    if len(seeds) not in (1, count):
        why = f"has {len(seeds)} seeds for {count} videos"
        raise InputError("`base_seed`", why=why, remedy="give a seed for each video, or one")
    if count > MAX_OUTPUTS:
        why = f"has {count} seeds, and at most {MAX_OUTPUTS} are allowed"
        raise InputError("`base_seed`", why=why, remedy="send several requests")
    read_seed = partial(FLAGS["base_seed"].reader, "`base_seed`")
    seeds = [seed if seed >= 0 else None for seed in map(read_seed, seeds)]
    if count == 1 and seeds == [None]:
        return []
    seeds = [draw_seed() if seed is None else seed for seed in seeds]
    return [*seeds, *(read_seed(seeds[0] + index) for index in range(len(seeds), count))]


def draw_seed() -> int:
    """Returns a random seed."""
    return random.SystemRandom().randrange(10**10)


def _normalize_loras(settings: dict[str, Any], run: Run) -> None:
    """Converts the LoRAs to objects with name, scale and expert, in place."""
    if "video_lora" in settings:
        chosen = FLAGS["video_lora"].reader("`video_lora`", settings["video_lora"])
        if run.setup.lora_options.lora_folder is None:
            why = "needs a service that was started with --lora_folder"
            raise InputError("`video_lora`", why=why, remedy="leave it out")
        settings["video_lora"] = [*chosen]


def _apply_guidance_fields(fields: _RequestFields, run: Run) -> None:
    """Converts the guidance scales of the experts to `sample_guide_scale` LOW,HIGH, in place."""
    api_fields, settings = fields.api_fields, fields.settings
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
        high, low = api_fields.get("guidance_high", high), api_fields.get("guidance_low", low)
        settings["sample_guide_scale"] = f"{low},{high}"
        return
    names = [name for name in ("guidance_scale_2", "guidance_scale") if name in api_fields]
    if names:
        if "sample_guide_scale" in settings:
            why = "means the same as guidance_scale"
            raise InputError("`sample_guide_scale`", None, why, "give one of them")
        if "guidance_scale" not in api_fields:
            why = "is only for the low-noise expert"
            raise InputError("guidance_scale_2", why=why, remedy="add guidance_scale")
        settings["sample_guide_scale"] = ",".join(f"{api_fields[name]:g}" for name in names)
