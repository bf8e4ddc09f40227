"""JSON Schema of the fields of a request, derived from the settings of the running task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from mimetypes import guess_type
from pathlib import Path
from typing import Any

from wan.app.run import PATH_SETTINGS, Run
from wan.serve.requests import fields
from wan.serve.requests.fields import FIELD_NAMES
from wan.settings.errors import InputError
from wan.settings.fields import REQUIRED, Option
from wan.settings.flags import FLAGS, GROUPS
from wan.settings.presets import Preset
from wan.settings.values import join_with_and, join_with_or
from wan.settings.video_options import list_needed_inputs

Schema = dict[str, Any]
TITLES = {
    "n": "Videos",
    "num_frames": "Frames",
    "num_inference_steps": "Steps",
    "flow_shift": "Shift",
    "fps": "Frames per second",
    "input_reference": "Image",
    "guidance_scale": "Guidance",
    "guidance_high": "Guidance, high noise",
    "guidance_low": "Guidance, low noise",
    "num_clip": "Clips",
    "infer_frames": "Frames of a clip",
    "refert_num": "Shared frames",
    "replace_flag": "Replace the character",
    "start_from_ref": "Start from the image",
    "src_ref": "Reference image",
    "src_pose": "Pose video",
    "src_face": "Face video",
    "src_bg": "Background video",
    "src_mask": "Mask video",
    "src_video": "Source video",
    "src_ref_images": "Reference images",
    "ode": "ODE",
    "slg_blocks": "SLG blocks",
    "nag_scale": "NAG scale",
    "sigmas": "Noise table",
}
"""Field -> its title, where that is not its name."""
_FIELD_NAMING = fields.make_field_naming(FIELD_NAMES)
DATA_URL: Schema = {"type": "string", "pattern": "^data:.*;base64,"}
_ANY_REFERENCE = {"$ref": "#/components/schemas/FileReference"}
_NUMBERS: dict[str, Schema] = {
    name: dict(reader.schema) for name, reader in fields.COMPUTED_FIELDS.items() if reader
}
"""Field from which settings are computed -> its limits."""
_GUIDANCE_SCHEMA = _NUMBERS["guidance_high"]


@dataclass(frozen=True)
class RequestSchema:
    """The fields of a request to the running service.

    Each property may have these extensions: `x-common` (one of the usual fields), `x-media` (a file
    of these media types), `x-alias-of` (another name of this field), `x-ignored` (taken from
    clients of other APIs, without an effect), and `x-step` (distance of allowed numbers).

    Attributes:
        properties: Field -> JSON Schema.
        required: Required fields.
        required_one: Fields of which at least one is required.
        required_with: Switch -> the fields that are required with it.
    """

    properties: dict[str, Schema]
    required: tuple[str, ...]
    required_one: tuple[str, ...] = ()
    required_with: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def files(self) -> dict[str, str]:
        """Field of an uploaded file -> its media types."""
        return {
            name: entry["x-media"] for name, entry in self.properties.items() if "x-media" in entry
        }

    def make_object_schema(self) -> Schema:
        """Returns the schema of the whole request."""
        schema: Schema = {
            "type": "object",
            "description": "A required field may also have another of its names, x-alias-of, or be "
            "in an object of further fields.",
            "properties": self.properties,
            "required": [*self.required],
            "additionalProperties": False,
        }
        if self.required_one:
            schema["anyOf"] = [{"required": [name]} for name in self.required_one]
        for name, needed in self.required_with.items():
            schema["if"] = {"properties": {name: {"const": True}}, "required": [name]}
            schema["then"] = {"required": [*needed]}
        return schema


def make_request_schema(
    run: Run, models: Sequence[str], max_frames: int, max_characters: int
) -> RequestSchema:
    """Returns the fields of a request.

    Args:
        run: The run that the ranks were started with.
        models: The names of the loaded model.
        max_frames: Frames of a video.
        max_characters: Characters of a prompt.
    """
    properties = _list_settings(run)
    for name, most in (
        ("num_frames", (max_frames - 1) // 4 * 4 + 1),
        ("infer_frames", max_frames // 4 * 4),
    ):
        if name in properties:
            properties[name]["maximum"] = min(properties[name]["maximum"], most)
    for name in ("prompt", "negative_prompt"):
        properties[name]["maxLength"] = max_characters
    properties["prompt"]["pattern"] = r"\S"
    properties |= _list_files(run) | _list_computed_fields(run, models)
    ordered = sorted(properties, key=lambda name: _rank_field(name, properties[name]))
    properties = {
        name: {"title": TITLES.get(name, name.replace("_", " ").capitalize())} | properties[name]
        for name in ordered
    }
    properties |= _list_aliases(properties, run) | _list_foreign_fields(properties)
    groups = list_needed_fields(run, bool(run.params.replace_flag))
    single, several = ([x for x in groups if (len(x) > 1) == more] for more in (False, True))
    scene = run.params.task.scene_uploads if not run.params.replace_flag else ()
    return RequestSchema(
        properties,
        tuple(name for (name,) in single),
        next(iter(several), ()),
        {"replace_flag": scene} if scene else {},
    )


def list_needed_fields(run: Run, replaces_character: bool) -> list[tuple[str, ...]]:
    """Returns groups of fields; a request needs one of each group.

    Args:
        run: The run that the ranks were started with.
        replaces_character: The value of `replace_flag`.
    """
    task = run.params.task
    groups: list[tuple[str, ...]] = [] if task.uploads_without_prompt else [("prompt",)]
    for group in list_needed_inputs(run.setup.preset.task):
        if fields.FOLDER in group:
            names = (*task.needed_uploads, *(task.scene_uploads if replaces_character else ()))
            groups += [(name,) for name in names]
        else:
            groups.append(tuple(FIELD_NAMES.get(name, name) for name in group))
    return groups


def check_needed_fields(
    settings: Mapping[str, Any], files: Mapping[str, bytes | bytearray], run: Run
) -> None:
    """Refuses a request that lacks fields, and names all of them.

    Args:
        settings, files: See `ParsedRequest`.
        run: The run that the ranks were started with.
    """
    present = {"prompt"} if settings.get("clip_prompts") or "prompt" in settings else set()
    for name, _, file in (key.partition("/") for key in files):
        present.add(Path(file).stem if name == fields.FOLDER else FIELD_NAMES.get(name, name))
    flag = settings.get("replace_flag", bool(run.params.replace_flag))
    groups = list_needed_fields(run, FLAGS["replace_flag"].reader("replace_flag", flag))
    missing = [group for group in groups if present.isdisjoint(group)]
    if missing == [("prompt",)]:
        raise InputError("prompt", why="is missing", remedy="describe the video")
    if missing:
        names = join_with_and([join_with_or(group) for group in missing])
        remedy = "give it" if names == missing[0][0] else f"give {names}"
        if ("prompt",) not in groups and "prompt" not in present:
            remedy += ", and a prompt if you like"
        raise InputError(missing[0][0], why="is missing", remedy=remedy)


def _list_settings(run: Run) -> dict[str, Schema]:
    """Returns the schema of each setting that a request may have, without files."""
    defaults, preset = _read_defaults(), run.setup.preset
    properties: dict[str, Schema] = {}
    other_fields = {*PATH_SETTINGS, *fields.UPLOADS, "sample_guide_scale"}  # an alias of guidance
    for name, flag in FLAGS.items():
        if not flag.line or name in other_fields:
            continue
        is_unused = defaults[name] is REQUIRED and name not in run.settings
        if flag.needs is not None and not FLAGS[flag.needs].line:
            parts = (run.output, *vars(run.setup).values())
            is_unused |= not any(getattr(part, flag.needs, None) for part in parts)
        if is_unused or (flag.tasks and preset.task not in flag.tasks):
            continue
        entry = _describe_setting(flag, preset)
        started = run.settings.get(name, defaults[name])
        if started is not None and name != "prompt":
            entry["default"] = _format_default(name, started)
        properties[FIELD_NAMES.get(name, name)] = entry
    if run.params.boundary is None:
        del properties["boundary_step"]
    if run.params.task.uploads_without_prompt:  # the length follows from the uploaded files
        del properties["num_clip"]["default"]
    if run.params.task.upload_names:
        del properties["size"]["default"]
    if run.params.task.has_fixed_fps:
        properties["fps"] |= {"const": properties["fps"]["default"]}
    properties["seed"] |= {
        "type": ["integer", "array"],
        "default": -1,
        "items": dict(FLAGS["base_seed"].reader.schema),
        "minItems": 1,
        "maxItems": fields.MAX_OUTPUTS,
    }
    properties["size"]["examples"] = [size.replace("*", "x") for size in preset.trained_sizes]
    return properties


def _read_defaults() -> dict[str, Any]:
    """Returns the declared default of each setting."""
    return {
        name: declared.default
        for groups in GROUPS.values()
        for group in groups
        for name, declared in group.__dataclass_fields__.items()  # type: ignore[attr-defined]
        if name in FLAGS
    }


def _describe_setting(flag: Option, preset: Preset) -> Schema:
    """Returns the schema of a setting with its meaning for the running task."""
    text = flag.meaning.describe(preset.kind, _FIELD_NAMING)
    entry: Schema = dict(flag.reader.schema) | {"description": text}
    return entry | ({"x-common": True} if flag.common else {})


def _format_default(name: str, value: Any) -> Any:
    """Returns the value of a setting as JSON has it."""
    if name == "size":
        return "x".join(map(str, value))
    return list(value) if isinstance(value, tuple) else value


def _list_files(run: Run) -> dict[str, Schema]:
    """Returns the schema of each uploaded file of the task."""
    preset, files = run.setup.preset, {}
    for name in fields.UPLOADS:
        flag = FLAGS[name]
        if preset.task in flag.tasks:
            entry = _describe_setting(flag, preset) | {"x-common": True, "x-media": flag.media}
            del entry["type"]
            one_file = _ANY_REFERENCE
            if name == fields.PICTURES:
                most = fields.MAX_REFERENCE_IMAGES
                many = {"type": "array", "items": one_file, "minItems": 1, "maxItems": most}
                entry |= {"anyOf": [one_file, many]}
            else:
                entry |= one_file
            files[FIELD_NAMES.get(name, name)] = entry
    for name, file in run.params.task.upload_names.items():
        media = f"{(guess_type(file)[0] or '').partition('/')[0]}/*"
        is_scene = name in run.params.task.scene_uploads
        text = f"{file} of the preprocessed folder{', for replace_flag' if is_scene else ''}"
        files[name] = _ANY_REFERENCE | {"description": text, "x-media": media, "x-common": True}
    return files


def _list_computed_fields(run: Run, models: Sequence[str]) -> dict[str, Schema]:
    """Returns the schema of each field that is no setting."""
    low, high = run.params.sample_guide_scale
    properties: dict[str, Schema] = {
        "model": {"enum": [*models], "default": models[0], "description": "name of the model"},
        "n": _NUMBERS["n"]
        | {"default": 1, "description": "number of videos, with this seed and the next ones"},
        "priority": _NUMBERS["priority"]
        | {"default": 0, "description": "videos of higher priority run first"},
        "webhook_url": {
            "type": "string",
            "pattern": "^https?://",
            "examples": ["https://hooks.example/video"],
            "description": "address that gets the end of the video, on a host that this service "
            "allows",
        },
    }
    if run.params.boundary is None:
        text = "guidance scale; 1: no guidance"
        return properties | {
            "guidance_scale": _GUIDANCE_SCHEMA
            | {"default": low, "description": text, "x-common": True}
        }
    text = "of other APIs; only the value of this service"
    properties["boundary_ratio"] = {
        "const": run.params.boundary,
        "description": text,
        "x-ignored": True,
    }
    for name, default in (("high", high), ("low", low)):
        text = f"guidance scale of the {name}-noise expert; 1: no guidance"
        properties[f"guidance_{name}"] = _GUIDANCE_SCHEMA | {
            "default": default,
            "description": text,
            "x-common": True,
        }
    return properties


def _list_aliases(properties: Mapping[str, Schema], run: Run) -> dict[str, Schema]:
    """Returns the other names of fields."""
    aliases = {setting: name for setting, name in FIELD_NAMES.items() if name in properties}
    for name, setting in fields.FIELD_TO_SETTING.items():
        field = FIELD_NAMES.get(setting, setting)
        if name not in properties and field in properties:
            aliases[name] = field
    entries = {
        alias: {key: value for key, value in properties[field].items() if key != "default"}
        for alias, field in aliases.items()
    }
    side = _NUMBERS["width"]
    entries |= {"width": side, "height": side, fields.COUNTS[1]: properties["n"]}
    if not run.params.task.upload_names:
        entries["aspect_ratio"] = {"type": "string", "pattern": r"^\d+:\d+$", "examples": ["16:9"]}
        entries["short_edge"] = side
    aliases[fields.COUNTS[1]] = "n"
    aliases |= dict.fromkeys(
        ("width", "height", "aspect_ratio", "short_edge") & entries.keys(), "size"
    )
    if not run.params.has_clips:
        entries["seconds"] = {
            "type": "number",
            "exclusiveMinimum": 0,
            "maximum": properties["num_frames"]["maximum"] / run.output.fps,
            "description": "duration; rounded to a number of frames",
        }
        aliases["seconds"] = "num_frames"
    scales = {"sample_guide_scale": dict(FLAGS["sample_guide_scale"].reader.schema)}
    scales |= {"guidance_scale_2": _GUIDANCE_SCHEMA, "guidance_scale": _GUIDANCE_SCHEMA}
    first = "guidance_scale" if "guidance_scale" in properties else "guidance_high"
    for name in scales.keys() - properties.keys():
        entries[name], aliases[name] = scales[name], first
    return {
        name: {k: v for k, v in entry.items() if k not in ("title", "x-common")}
        | {"x-alias-of": aliases[name]}
        for name, entry in sorted(entries.items())
    }


def _list_foreign_fields(properties: Mapping[str, Schema]) -> dict[str, Schema]:
    """Returns the fields of other APIs that are accepted without an effect."""
    text = "of other APIs; accepted without an effect"
    entries: dict[str, Schema] = {}
    for name, values in fields.IGNORED_FIELDS.items():
        limits: Schema = {"type": ["string", "number", "boolean"]}
        limits = {"enum": [*values]} if values else limits
        entries[name] = limits | {"description": text, "x-ignored": True}
    for name in fields.BLOCKS:
        entries[name] = {"type": "object", "description": "further fields", "x-ignored": True}
    return {name: entry for name, entry in entries.items() if name not in properties}


def _rank_field(name: str, entry: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the sort key of a field: the prompt, files, the usual fields, and the others."""
    return (name != "prompt", "x-media" not in entry, "x-common" not in entry)
