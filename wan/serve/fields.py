"""The fields of a request: the settings of a prompt file's line, and the names that others use."""

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
from wan.pipeline.sources import MOST_PICTURES
from wan.run import PATHS, Run
from wan.settings.errors import InputError, Words
from wan.settings.flags import ALIASES, FLAGS, check_given, read
from wan.settings.values import integer, real, shown

NAMES = {
    "num_frames": "frame_num",
    "num_inference_steps": "sample_steps",
    "flow_shift": "sample_shift",
    "seed": "base_seed",
    "input_reference": "image",
    **ALIASES,
}
"""Name in OpenAI's, vllm-omni's or MLPerf's interface -> setting."""
FOLDER = "src_root_path"
"""The setting that is a folder of uploaded files."""
PICTURES = "src_ref_images"
"""The setting that is one uploaded file or several."""
UPLOADS = ("image", "last_image", "audio", "pose_video", "src_video", "src_mask", PICTURES)
"""Settings that are files of the request."""
_IN_FOLDER = {Path(name).stem: f"{FOLDER}/{name}" for name in driving.FILES}
_GUIDANCE = ("guidance_high", "guidance_low")
_OWN = (
    *("model", "seconds", "boundary_ratio", "priority"),
    *("guidance_scale", "guidance_scale_2", *_GUIDANCE),
)
_PROMPT_MAY_BE_LEFT_OUT = {"s2v": ("image", "audio"), "animate": (FOLDER,)}
"""Kind of task -> the files that say what is to be made; official code has a prompt for them."""
_LEFT_OUT = {
    "latent_path": "no file is opened for a request; give a seed",
    "save_file": "the video is fetched from /v1/videos/{id}/content",
}
_DATA_URL = re.compile(r"data:[\w.+/-]+;base64,", re.ASCII)


@dataclass(frozen=True)
class Asked:
    """What a request asks for.

    Attributes:
        settings: Raw values under flags' names, without files.
        files: Setting -> content of an uploaded file; those of several are SETTING/NAME.
        priority: Higher ones come first.
        names: Setting -> the name that the request uses for it.
    """

    settings: dict[str, Any]
    files: dict[str, bytes] = field(default_factory=dict)
    priority: int = 0
    names: dict[str, str] = field(default_factory=dict)

    @property
    def words(self) -> Words:
        """How refusals call settings."""
        return words(self.names)


def words(names: Mapping[str, str]) -> Words:
    """Refusals name settings as a request does."""
    return Words(lambda name, value: name if value is None else f"{name} {value}", names)


def asked(body: Mapping[str, Any], run: Run, model: str) -> Asked:
    """Reads the fields of a request.

    Args:
        body: Field -> text, number, JSON value, the bytes of an uploaded file, or a list of such.
        run: What the ranks were started for.
        model: The name of the model that runs.

    Raises:
        InputError: A field is unknown, is given twice, or does not fit what runs.
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
            raise InputError(key, why="is not taken", remedy=_LEFT_OUT[key])
        if name in names:
            why = f"says the same as {names[name]}"
            raise InputError(key, why=why, remedy="give one of them")
        if key in _OWN:
            own[key] = value
        elif name == PICTURES and isinstance(value, list):
            if len(value) > MOST_PICTURES:  # before any is decoded or written
                why = f"has {len(value)} pictures, and at most {MOST_PICTURES} are taken"
                raise InputError(key, why=why, remedy="choose some of them")
            for index, one in enumerate(value):
                files[f"{PICTURES}/{index:03}"] = _content(*_part(key, one))
        elif name in UPLOADS or name in in_folder:
            files[in_folder.get(name, name)] = _content(key, value)
        elif name not in FLAGS or (name in PATHS and not _is_running(name, value, run)):
            raise InputError(key, why="is not a known field", remedy="remove it")
        elif not FLAGS[name].line:
            if not _is_running(name, value, run):
                why = "is decided when the service starts"
                raise InputError(key, shown(value), why, "leave it out")
        else:
            single = name == "clip_prompts" and isinstance(value, str)
            settings[name] = [value] if single else value
        names[name] = key
    try:
        _check_prompts(settings, files, run.setup.preset.kind)
        priority = _own(own, settings, run, model)
        if "size" in settings:
            settings["size"] = str(settings["size"]).replace("x", "*")
        check_given(read(settings))
    except InputError as error:
        error.words = words(names)
        raise
    return Asked(settings, files, priority, names)


def check_prompt(text: Any) -> None:
    """Refuses a prompt without a visible character."""
    if not any(c.isprintable() and not c.isspace() for c in str("" if text is None else text)):
        raise InputError("prompt", why="says nothing", remedy="say what the video shows")


def _check_prompts(settings: Mapping[str, Any], files: Mapping[str, bytes], kind: str) -> None:
    """Refuses a request without a prompt, for which the command line takes an example."""
    if settings.get("clip_prompts"):
        prompts = settings["clip_prompts"]
    elif "prompt" in settings:
        prompts = [settings["prompt"]]
    else:
        given = {name.partition("/")[0] for name in files}
        if kind in _PROMPT_MAY_BE_LEFT_OUT and given.issuperset(_PROMPT_MAY_BE_LEFT_OUT[kind]):
            return
        raise InputError("prompt", why="is missing", remedy="say what the video shows")
    for prompt in prompts if isinstance(prompts, list) else [prompts]:
        check_prompt(prompt)


def _part(key: str, value: Any) -> tuple[str, Any]:
    """Returns a field whose value may be an object with one reference, or such a form field."""
    of_form = re.fullmatch(r"(\w+)\[image_url\]", key)
    if of_form is not None:
        return of_form[1], value
    if isinstance(value, Mapping) and {*value} == {"image_url"}:
        return key, value["image_url"]
    return key, value


def _content(key: str, value: Any) -> bytes:
    """Returns the bytes of an uploaded file or of a data URL."""
    if isinstance(value, bytes):
        return value
    start = _DATA_URL.match(value) if isinstance(value, str) else None
    if start is None:
        raise InputError(key, why="must be an uploaded file or a data URL with base64 in it")
    try:
        return base64.b64decode(value[start.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        why = f"is no valid base64 ({error})"
        raise InputError(key, why=why, remedy="encode it again") from error


def _is_running(name: str, value: Any, run: Run) -> bool:
    """Returns whether a setting that is decided at the start has this value."""
    setup = run.setup
    parts = (setup.execution, setup.attention, setup.parallel, setup.cache, run.output)
    runs = {n: v for part in parts for n, v in vars(part).items()} | run.settings
    if name not in FLAGS or name not in runs:
        return False
    same = FLAGS[name].read(f"`{name}`", value)
    return json.dumps(same, default=str) == json.dumps(runs[name], default=str)


def _own(own: Mapping[str, Any], settings: dict[str, Any], run: Run, model: str) -> int:
    """Turns fields that are no settings into some, and returns the priority."""
    if own.get("model", model) != model:
        raise InputError("model", shown(own["model"]), f"does not run here; {model} does")
    if "boundary_ratio" in own:
        runs = run.request.boundary
        if real(0, 1)("boundary_ratio", own["boundary_ratio"]) != runs:
            why = (
                "is decided by the checkpoint"
                if runs is None
                else f"does not run here; {runs} does"
            )
            raise InputError("boundary_ratio", shown(own["boundary_ratio"]), why, "leave it out")
    if "seconds" in own:
        if run.request.clips:
            why = "says the same as the length of what it follows, or as clips and num_frames"
            raise InputError("seconds", why=why, remedy="leave it out")
        seconds = real(0, 3600, above=True)("seconds", own["seconds"])
        fps = FLAGS["fps"].read("fps", settings["fps"]) if "fps" in settings else run.output.fps
        frames = 4 * max(math.floor((seconds * fps - 1) / 4 + 0.5), 0) + 1
        given = settings.setdefault("frame_num", frames)
        if FLAGS["frame_num"].read("num_frames", given) != frames:
            why = f"and num_frames {given} differ: {frames} frames are meant by the former"
            raise InputError("seconds", shown(own["seconds"]), why, "give one of them")
    _read_guidance(own, settings, run)
    return int(integer(-100, 100)("priority", own.get("priority", 0)))


def _read_guidance(own: Mapping[str, Any], settings: dict[str, Any], run: Run) -> None:
    """Turns the guidance scales of the experts into LOW,HIGH."""
    experts = [name for name in _GUIDANCE if name in own]
    if experts:
        for other in ("guidance_scale", "guidance_scale_2", "sample_guide_scale"):
            if other in own or other in settings:
                why = f"says the same as {other}"
                raise InputError(experts[0], why=why, remedy="give one of them")
        if run.request.boundary is None:
            why = f"is of one of two experts, and {run.setup.preset.task} has one network"
            raise InputError(experts[0], why=why, remedy="give guidance_scale")
        low, high = run.request.sample_guide_scale
        high, low = (
            real(0, 100, above=True)(name, own.get(name, default))
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
            why = "says the same as guidance_scale"
            raise InputError("`sample_guide_scale`", None, why, "give one of them")
        if "guidance_scale" not in own:
            why = "is that of the low-noise expert alone"
            raise InputError("guidance_scale_2", why=why, remedy="add guidance_scale")
        settings["sample_guide_scale"] = ",".join(f"{scale:g}" for scale in scales)
