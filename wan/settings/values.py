"""Readers of single values: they parse text or JSON into checked Python values."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from wan.settings.errors import InputError, escape_controls
from wan.settings.json_text import DuplicateNameError, parse_json
from wan.settings.presets import TRAIN_TIMESTEPS

_FACTOR_SCHEMA = {"type": "number", "minimum": -100, "maximum": 100}
_SCALE_SCHEMA = {"type": "number", "exclusiveMinimum": 0, "maximum": 100}
_SIZE_SCHEMA = {
    "type": ["string", "array"],
    "pattern": r"^\d+[*xX]\d+$",
    "items": {"type": "integer", "minimum": 1},
    "minItems": 2,
    "maxItems": 2,
}
_BLOCK_SCHEMA = {"type": "integer", "minimum": 0, "maximum": TRAIN_TIMESTEPS - 1}
MAX_FRAMES = 4093  # of the networks' 1024 rotary positions: 4 * 1023 + 1
_MAX_SIDE = 1_000_000  # pixels; the much lower limits of a task are checked in `VideoParams`


@dataclass(frozen=True)
class Reader:
    """Parses and checks one value.

    Attributes:
        read: Called with the value's name in errors (`frame_num` in backticks, or a file and its
            key) and the raw value; returns the checked value or raises InputError.
        choices: Allowed words, for `--help`; None where there is no fixed set.
        metavar: Placeholder of the value in `--help` where there are no or too many choices.
        schema: JSON Schema of the value.
    """

    read: Callable[[str, Any], Any]
    choices: tuple[str, ...] | None = None
    metavar: str = "NAME"
    schema: Mapping[str, Any] = field(default_factory=lambda: {"type": "string"})

    def __call__(self, name: str, raw: Any) -> Any:
        return self.read(name, raw)


def _list_schema(item: Mapping[str, Any], **limits: Any) -> dict[str, Any]:
    """Returns the JSON Schema of a list that is not empty."""
    return {"type": "array", "items": item, "minItems": 1, **limits}


def describe_json_error(error: Exception) -> str:
    """Returns where or why a text is no JSON."""
    if isinstance(error, JSONDecodeError):
        return f"line {error.lineno}, column {error.colno}"
    if isinstance(error, DuplicateNameError):
        return str(error)
    return "too long a number" if isinstance(error, ValueError) else "too many brackets"


def format_value(raw: Any, formatter: Callable[[Any], str] = repr) -> str:
    """Formats a value on one line, short enough for a sentence; plain words are not quoted."""
    if isinstance(raw, str) and re.fullmatch(r"[\w.,:;*+/~@=-]{1,100}", raw):
        return raw
    try:
        line = " ".join(formatter(raw).split())
    except ValueError:  # Python does not format integers of more than 4300 digits
        return "a number of thousands of digits"
    line = escape_controls(line)
    return line if len(line) <= 100 else f"{line[:60]}... ({len(line)} characters)"


def join_with_or(items: Sequence[object]) -> str:
    """Joins items to text such as `0, 1 or 2`."""
    *some, last = map(str, items)
    return f"{', '.join(some)} or {last}" if some else last


def join_with_and(items: Sequence[object]) -> str:
    """Joins items to text such as `0, 1 and 2`."""
    *some, last = map(str, items)
    return f"{', '.join(some)} and {last}" if some else last


def list_names(names: Iterable[str]) -> str:
    """Returns the first three names, escaped and shortened, and how many follow."""
    first = [*names]
    listing = ", ".join(format_value(name, str) for name in first[:3])
    return f"{listing} and {len(first) - 3} more" if len(first) > 3 else listing


_INTEGER = re.compile(r"[+-]?\d+", re.ASCII)
_NUMBER = re.compile(r"[+-]?(inf|(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?)", re.ASCII)


def parse_number(raw: Any) -> float | None:
    """Returns the number in a text, or a number of JSON or Python; None for anything else.

    Texts have ASCII digits without spaces or `_`; true, false and NaN are no numbers.
    """
    try:
        text = str(raw)
    except ValueError:  # Python does not format integers of more than 4300 digits
        return None
    return float(text) if _NUMBER.fullmatch(text) else None


def parse_integer(raw: Any) -> int | None:
    """Returns the integer in a text, or an integer of JSON, which is also 9.0; else None."""
    value = parse_number(raw)
    try:
        if _INTEGER.fullmatch(text := str(raw)):
            return int(text)
    except ValueError:  # thousands of digits
        return None
    is_integer = value is not None and value.is_integer() and not isinstance(raw, str)
    return int(value) if is_integer else None  # type: ignore[arg-type]


def split_list(raw: Any) -> Any:
    """Splits a text at its commas, and an array into a list; returns other values as they are."""
    if isinstance(raw, str):
        return [part.strip(" ") for part in raw.split(",")]
    return raw.tolist() if hasattr(raw, "tolist") else raw


def _get_word(raw: Any) -> str:
    """Returns a text, or the text of another value; that of the number 1.0 is 1."""
    if isinstance(raw, str):
        return raw
    number = parse_integer(raw)
    return format_value(raw if number is None else number, str)


@partial(Reader, metavar="TEXT")
def read_text_value(name: str, raw: Any) -> str:
    """Reads text that can be encoded in UTF-8."""
    if not isinstance(raw, str):
        raise InputError(name, format_value(raw), "must be text")
    try:
        raw.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError(name, why="is not valid UTF-8 text", remedy="pass it in UTF-8") from None
    return raw


@partial(Reader, metavar="TEXT", schema=_list_schema({"type": "string", "pattern": r"\S"}))
def read_text_values(name: str, raw: Any) -> tuple[str, ...]:
    """Reads a list of texts, or one text."""
    parts = raw if isinstance(raw, list | tuple) else [raw]
    items = tuple(read_text_value(name, part) for part in parts)
    if not all(part.strip() for part in items) or not items:
        raise InputError(name, why="has an empty text", remedy="give a text for each clip")
    return items


@partial(Reader, metavar="PATH")
def read_path(name: str, raw: Any) -> Path:
    """Reads a path and expands `~`."""
    raw = str(raw) if isinstance(raw, Path) else raw
    if not read_text_value(name, raw).strip():
        raise InputError(name, why="is empty", remedy="give a path, or leave it out")
    if "\0" in raw:
        raise InputError(name, why="holds a NUL character", remedy="give a path without it")
    return expand_home(name, raw)


def expand_home(name: str, text: str) -> Path:
    """Expands `~` and `~user`; refuses them where that folder is unknown, as without HOME.

    Otherwise a folder with the name `~` would be made.
    """
    expanded, (user, slash, _) = os.path.expanduser(text), text.partition("/")
    if user == "~" or (slash and user.startswith("~")):
        is_empty = user == "~" and not os.path.expandvars("$HOME")  # it would be the root folder
        if is_empty or not os.path.isabs(expanded):
            why = f"begins with {user}, and that folder is unknown"
            raise InputError(name, format_value(text), why, "set HOME, or give the whole path")
    return Path(expanded)


@partial(Reader, metavar="FILE[=STRENGTH]")
def read_lora_files(name: str, raw: Any) -> tuple[str, ...]:
    """Reads paths with an optional `=STRENGTH`; makes them absolute, for the record."""
    parts = raw if isinstance(raw, list | tuple) else [raw]
    if not parts:
        remedy = "give FILE or FILE=STRENGTH, or leave it out"
        raise InputError(name, why="is empty", remedy=remedy)
    return tuple(str(read_path(name, part).absolute()) for part in parts)


_LORA_KEYS = {
    "name": "name",
    **dict.fromkeys(("lora_name", "adapter"), "name"),
    "scale": "scale",
    "lora_scale": "scale",
    "expert": "expert",
    **dict.fromkeys(("int_id", "lora_int_id"), "id"),
    **dict.fromkeys(("path", "lora_path", "local_path"), "path"),
}
"""Key of a chosen LoRA, also in vllm-omni's requests -> its meaning."""
_LORA_EXPERTS = ("both", "high_noise", "low_noise")
MAX_VIDEO_LORAS = 8
"""Maximum of LoRAs of one video."""


_LORA_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "scale": {"type": "number"},
        "expert": {"enum": [*_LORA_EXPERTS]},
    },
    "required": ["name"],
}


@partial(
    Reader,
    metavar="NAME[=SCALE]",
    schema={"type": "array", "items": _LORA_SCHEMA, "maxItems": MAX_VIDEO_LORAS},
)
def read_video_loras(name: str, raw: Any) -> tuple[dict[str, Any], ...]:
    """Reads the LoRAs chosen for a video: texts `NAME[=SCALE]`, or objects with name and scale.

    Returns:
        Objects with "name", "scale" and, if given, "expert".
    """
    parts = raw if isinstance(raw, list | tuple) else [raw]
    loras = []
    for part in parts:
        if isinstance(part, str) and part.lstrip().startswith(("{", "[")):
            try:
                part = parse_json(part)
            except DuplicateNameError as error:
                raise InputError(name, why=f"is no JSON ({error})", remedy="give it once") from None
            except (ValueError, RecursionError):
                raise InputError(name, format_value(part), "is no JSON") from None
        loras += part if isinstance(part, list) else [part]
    if len(loras) > MAX_VIDEO_LORAS:
        why = f"has {len(loras)} LoRAs, and at most {MAX_VIDEO_LORAS} are allowed"
        raise InputError(name, why=why, remedy="leave some out")
    return tuple(_read_video_lora(name, lora) for lora in loras)


def _read_video_lora(name: str, raw: Any) -> dict[str, Any]:
    if isinstance(raw, str):
        file, equals, scale = raw.rpartition("=")
        raw = {"name": file, "scale": scale} if equals else {"name": raw}
    if not isinstance(raw, dict):
        remedy = 'give {"name": ..., "scale": 1.0}'
        raise InputError(name, format_value(raw), "must be an object with a name", remedy)
    lora: dict[str, Any] = {}
    for key, value in raw.items():
        meaning = _LORA_KEYS.get(key) if isinstance(key, str) else None
        if meaning is None:
            remedy = "give name, scale and expert"
            raise InputError(name, why=f"has the unknown key {format_value(key)}", remedy=remedy)
        if meaning == "path":
            why = f"has {key}, and a file cannot be named by its path"
            raise InputError(name, why=why, remedy="give the name of a LoRA of `lora_folder`")
        if meaning in lora:
            raise InputError(name, why=f"has two keys for {meaning}", remedy="give one of them")
        if value is not None:
            lora[meaning] = value
    lora.pop("id", None)  # a number that vllm-omni caches it under
    if "name" not in lora:
        raise InputError(name, why="has no name", remedy="give the name of a LoRA of `lora_folder`")
    read_text_value(name, lora["name"])
    lora["scale"] = real(-1e6, 1e6)(name, lora.get("scale", 1.0))
    if "expert" in lora:
        lora["expert"] = choice(*_LORA_EXPERTS)(name, lora["expert"])
    return lora


@partial(Reader, metavar="FILE[,FILE]")
def read_image_files(name: str, raw: Any) -> tuple[str, ...]:
    """Reads image paths, separated by commas or in a list; makes them absolute, for the record.

    A text that is the path of an existing file is not split at its commas.
    """
    parts = raw if isinstance(raw, list | tuple) else [raw]
    paths: list[Path] = []
    for part in parts:
        single_path = read_path(name, part)
        paths += (
            [single_path]
            if single_path.exists()
            else [read_path(name, entry) for entry in str(part).split(",")]
        )
    if not paths:
        raise InputError(name, why="is empty", remedy="give a picture, or leave it out")
    return tuple(str(entry.absolute()) for entry in paths)


@partial(
    Reader,
    metavar="X[,X,...]",
    schema={"anyOf": [_FACTOR_SCHEMA, _list_schema(_FACTOR_SCHEMA)]},
)
def read_factors(name: str, raw: Any) -> tuple[float, ...]:
    """Reads one number, or several separated by commas."""
    parts = split_list(raw)
    parts = parts if isinstance(parts, list | tuple) else [parts]
    if not parts:
        raise InputError(name, why="is empty", remedy="give a number, or leave it out")
    read_number = real(-100, 100)
    return tuple(read_number(name, part) for part in parts)


def _read_switch(name: str, raw: Any) -> bool:
    """Reads yes/true/t/y/1 or no/false/f/n/0 in any case, as the official command does."""
    word = _get_word(raw).lower()
    if word in ("yes", "true", "t", "y", "1"):
        return True
    if word in ("no", "false", "f", "n", "0"):
        return False
    raise InputError(name, format_value(raw), "must be true or false")


switch = Reader(_read_switch, ("true", "false"), schema={"type": "boolean"})


def switch_or_choice(*choices: str) -> Reader:
    """Makes a reader of true, false or one of these words."""

    def read_switch_or_choice(name: str, raw: Any) -> bool | str:
        if raw in choices:
            return str(raw)
        try:
            return _read_switch(name, raw)
        except InputError:
            allowed = join_with_or(("true", "false", *choices))
            raise InputError(name, format_value(raw), f"must be {allowed}") from None

    schema = {"enum": [False, True, *choices]}
    return Reader(read_switch_or_choice, ("true", "false", *choices), schema=schema)


def choice(*allowed: str | int) -> Reader:
    """Makes a reader of one of these words or integers."""
    choices = {str(value): value for value in allowed}

    def read_choice(name: str, raw: Any) -> str | int:
        word = _get_word(raw)
        if word not in choices:
            raise InputError(name, format_value(raw), f"must be {join_with_or(allowed)}")
        return choices[word]

    return Reader(read_choice, tuple(choices), schema={"enum": [*allowed]})


def subset_of(*allowed: str) -> Reader:
    """Makes a reader of some of these words, separated by commas or in a list.

    "none" is the empty list; "auto" must be the only word.
    """

    def read_subset(name: str, raw: Any) -> tuple[str, ...]:
        parts = split_list(raw)
        names = [str(part).strip() for part in parts] if isinstance(parts, list | tuple) else [""]
        if names == ["none"]:
            return ()
        if names == ["auto"]:
            return ("auto",)
        if not set(names) <= set(allowed):
            raise InputError(
                name, format_value(raw), f"must be auto, none, or some of {','.join(allowed)}"
            )
        return tuple(word for word in allowed if word in names)

    return Reader(read_subset)


def integer(minimum: int, maximum: int, metavar: str = "N") -> Reader:
    """Makes a reader of an integer in [minimum, maximum]."""

    def read_integer(name: str, raw: Any) -> int:
        value = parse_integer(raw)
        if value is None:
            raise InputError(name, format_value(raw), "must be a whole number")
        if not minimum <= value <= maximum:
            raise InputError(name, format_value(raw), f"must be from {minimum} to {maximum}")
        return value

    schema = {"type": "integer", "minimum": minimum, "maximum": maximum}
    return Reader(read_integer, metavar=metavar, schema=schema)


def real(
    minimum: float, maximum: float, *, exclude_min: bool = False, exclude_max: bool = False
) -> Reader:
    """Makes a reader of a finite number in [minimum, maximum].

    Args:
        minimum: Lower limit.
        maximum: Upper limit.
        exclude_min: Whether values must be larger than `minimum`.
        exclude_max: Whether values must be smaller than `maximum`.
    """
    low = f"above {minimum:g}" if exclude_min else f"at least {minimum:g}"
    high = f"below {maximum:g}" if exclude_max else f"at most {maximum:g}"
    allowed = (
        f"{low} and {high}" if exclude_min or exclude_max else f"from {minimum:g} to {maximum:g}"
    )

    def read_real(name: str, raw: Any) -> float:
        value = parse_number(raw)
        if value is None:
            raise InputError(name, format_value(raw), "must be a number")
        is_allowed = (value > minimum if exclude_min else value >= minimum) and (
            value < maximum if exclude_max else value <= maximum
        )
        if not is_allowed:
            raise InputError(name, format_value(raw), f"must be {allowed}")
        return value

    lowest, highest = (
        f"exclusive{word}" if is_excluded else word.lower()
        for word, is_excluded in (("Minimum", exclude_min), ("Maximum", exclude_max))
    )
    schema = {"type": "number", lowest: minimum, highest: maximum}
    return Reader(read_real, metavar="X", schema=schema)


@partial(
    Reader,
    metavar="T1,T2,...",
    schema=_list_schema({"type": "number", "exclusiveMinimum": 0, "maximum": 1000}),
)
def read_timesteps(name: str, raw: Any) -> tuple[float, ...]:
    """Reads `T1,T2,...`, the timestep of each step."""
    parts = split_list(raw)
    read_number = real(0, 1000, exclude_min=True)
    numbers = [read_number(name, part) for part in parts] if isinstance(parts, list | tuple) else []
    if not numbers or any(b >= a for a, b in zip(numbers, numbers[1:], strict=False)):
        why = "must be falling timesteps above 0 and at most 1000, for example 1000,757,522"
        raise InputError(name, format_value(raw), why)
    return tuple(numbers)


def parse_step_list(name: str, text: str, noun: str = "step") -> tuple[int, ...]:
    """Parses numbers such as `0-5,8,11` of steps, or of `noun`s, into a rising sequence."""
    indices: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part.strip(" "), re.ASCII)
        if match is None:
            remedy = f"give {noun} numbers from 0, for example 0-5,8,11"
            raise InputError(name, why=f"has the {noun}s {format_value(text)}", remedy=remedy)
        low, high = int(match[1]), int(match[2] or match[1])
        if not low <= high < TRAIN_TIMESTEPS:
            remedy = f"they must rise and stay below {TRAIN_TIMESTEPS}"
            raise InputError(name, why=f"has the {noun}s {low} to {high}", remedy=remedy)
        indices |= set(range(low, high + 1))
    return tuple(sorted(indices))


@partial(
    Reader,
    metavar="4N+1",
    schema={"type": "integer", "minimum": 1, "maximum": MAX_FRAMES, "x-step": 4},
)
def read_frame_num(name: str, raw: Any) -> int:
    """Reads a frame count 4n+1; the VAE encodes the first frame, then each four, to one latent."""
    value = int(integer(1, MAX_FRAMES)(name, raw))
    lower = (value - 1) // 4 * 4 + 1
    if value != lower:
        raise InputError(name, value, "must be 4n+1", f"use {lower} or {lower + 4}")
    return value


@partial(
    Reader,
    metavar="4N",
    schema={"type": "integer", "minimum": 4, "maximum": 4092, "multipleOf": 4},
)
def read_clip_frames(name: str, raw: Any) -> int:
    """Reads the frames of a clip of s2v, a multiple of 4."""
    value = int(integer(4, 4092)(name, raw))
    if value % 4:
        lower = max(4, value // 4 * 4)
        raise InputError(name, value, "must be a multiple of 4", f"use {lower} or {lower + 4}")
    return value


@partial(
    Reader,
    metavar="N",
    schema={"type": ["integer", "boolean"], "minimum": 0, "maximum": TRAIN_TIMESTEPS},
)
def read_preview(name: str, raw: Any) -> int:
    """Reads the steps between two previews: a number, true (1) or false (0)."""
    word = _get_word(raw).lower()
    if word in ("true", "false"):
        return int(word == "true")
    try:
        return int(integer(0, TRAIN_TIMESTEPS)(name, raw))
    except InputError:
        why = f"must be true, false or a number of steps up to {TRAIN_TIMESTEPS}"
        raise InputError(name, format_value(raw), why) from None


@partial(Reader, metavar="W*H", schema=_SIZE_SCHEMA)
def read_size(name: str, raw: Any) -> tuple[int, int]:
    """Reads `W*H` or `WxH` in pixels, or [W, H] from JSON."""
    parts = re.split(r"[*xX]", raw) if isinstance(raw, str) else raw
    sides = [parse_integer(part) for part in parts] if isinstance(parts, list | tuple) else []
    if len(sides) != 2 or None in sides:
        why = "must be WIDTH*HEIGHT, for example 832*480"
        raise InputError(name, format_value(raw), why)
    width, height = (int(side or 0) for side in sides)
    if min(width, height) < 1 or max(width, height) > _MAX_SIDE:
        why = f"must have a width and height from 1 to {_MAX_SIDE}"
        raise InputError(name, format_value(raw), why)
    return width, height


@partial(
    Reader,
    metavar="X[,X]",
    schema={"anyOf": [_SCALE_SCHEMA, _list_schema(_SCALE_SCHEMA, maxItems=2)]},
)
def read_guide_scale(name: str, raw: Any) -> tuple[float, float]:
    """Reads one number for both experts, or `LOW,HIGH` (low-noise expert first, as officially)."""
    parts = split_list(raw)
    parts = parts if isinstance(parts, list | tuple) else [parts]
    if not 1 <= len(parts) <= 2:
        raise InputError(
            name, format_value(raw), "must be one number, or LOW,HIGH for the two experts"
        )
    read_number = real(0, 100, exclude_min=True)
    return read_number(name, parts[0]), read_number(name, parts[-1])


@partial(Reader, metavar="INSIDE,BETWEEN")
def read_link_rates(name: str, raw: Any) -> tuple[float, float]:
    """Reads the bandwidths inside a machine and between machines, two positive numbers."""
    parts = split_list(raw)
    if not isinstance(parts, list | tuple) or len(parts) != 2:
        raise InputError(name, format_value(raw), "must be two numbers, INSIDE,BETWEEN")
    read_number = real(0, 1e6, exclude_min=True)
    return read_number(name, parts[0]), read_number(name, parts[1])


@partial(Reader, metavar="0-5,8")
def read_steps(name: str, raw: Any) -> tuple[int, ...]:
    """Reads sampling steps such as `0-5,8,11`."""
    return parse_step_list(name, read_text_value(name, raw))


@partial(
    Reader,
    metavar="9,10",
    schema={"anyOf": [_BLOCK_SCHEMA, _list_schema(_BLOCK_SCHEMA)]},
)
def read_blocks(name: str, raw: Any) -> tuple[int, ...]:
    """Reads block numbers: text such as `9,10` or `8-10`, one number, or a list of numbers."""
    blocks = raw if isinstance(raw, list | tuple) else [raw]
    return parse_step_list(name, ",".join(map(_get_word, blocks)), "block")
