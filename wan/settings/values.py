"""Readers of single values: they parse text or JSON into checked Python values."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from wan.settings.errors import InputError
from wan.settings.presets import TRAIN_TIMESTEPS

_MAX_SIDE = 1_000_000  # pixels; the much lower limits of a task are checked in `VideoParams`


@dataclass(frozen=True)
class Reader:
    """Parses and checks one value.

    Attributes:
        read: Called with the value's name in errors (`frame_num` in backticks, or a file and its
            key) and the raw value; returns the checked value or raises InputError.
        choices: Allowed words, for `--help`; None where there is no fixed set.
        metavar: Placeholder of the value in `--help` where there are no or too many choices.
    """

    read: Callable[[str, Any], Any]
    choices: tuple[str, ...] | None = None
    metavar: str = "NAME"

    def __call__(self, name: str, raw: Any) -> Any:
        return self.read(name, raw)


def shown(raw: Any, form: Callable[[Any], str] = repr) -> str:
    """Formats a value on one line, short enough for a sentence; plain words are not quoted."""
    if isinstance(raw, str) and re.fullmatch(r"[\w.,:;*+/~@=-]{1,100}", raw):
        return raw
    try:
        line = " ".join(form(raw).split())
    except ValueError:  # Python does not format integers of more than 4300 digits
        return "a number of thousands of digits"
    return line if len(line) <= 100 else f"{line[:60]}... ({len(line)} characters)"


def either(words: Sequence[object]) -> str:
    """Joins items to text such as `0, 1 or 2`."""
    *some, last = map(str, words)
    return f"{', '.join(some)} or {last}" if some else last


@partial(Reader, metavar="TEXT")
def text(name: str, raw: Any) -> str:
    """Reads text that can be encoded in UTF-8."""
    if not isinstance(raw, str):
        raise InputError(name, shown(raw), "must be text")
    try:
        raw.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError(name, why="is not valid UTF-8 text", remedy="pass it in UTF-8") from None
    return raw


@partial(Reader, metavar="TEXT")
def texts(name: str, raw: Any) -> tuple[str, ...]:
    """Reads a list of texts, or one text."""
    parts = raw if isinstance(raw, list | tuple) else [raw]
    found = tuple(text(name, part) for part in parts)
    if not all(part.strip() for part in found) or not found:
        raise InputError(name, why="has an empty text", remedy="give a text for each clip")
    return found


@partial(Reader, metavar="PATH")
def path(name: str, raw: Any) -> Path:
    """Reads a path and expands `~`."""
    raw = str(raw) if isinstance(raw, Path) else raw
    if not text(name, raw).strip():
        raise InputError(name, why="is empty", remedy="give a path, or leave it out")
    if "\0" in raw:
        raise InputError(name, why="holds a NUL character", remedy="give a path without it")
    return Path(os.path.expanduser(raw))  # Path.expanduser raises for an unknown user


@partial(Reader, metavar="FILE[=STRENGTH]")
def files(name: str, raw: Any) -> tuple[str, ...]:
    """Reads paths with an optional `=STRENGTH`; makes them absolute, for the record."""
    parts = raw if isinstance(raw, list | tuple) else [raw]
    if not parts:
        remedy = "give FILE or FILE=STRENGTH, or leave it out"
        raise InputError(name, why="is empty", remedy=remedy)
    return tuple(str(path(name, part).absolute()) for part in parts)


@partial(Reader, metavar="FILE[,FILE]")
def pictures(name: str, raw: Any) -> tuple[str, ...]:
    """Reads image paths, separated by commas or in a list; makes them absolute, for the record.

    A text that is the path of an existing file is not split at its commas.
    """
    parts = raw if isinstance(raw, list | tuple) else [raw]
    found: list[Path] = []
    for part in parts:
        whole = path(name, part)
        found += [whole] if whole.exists() else [path(name, one) for one in str(part).split(",")]
    if not found:
        raise InputError(name, why="is empty", remedy="give a picture, or leave it out")
    return tuple(str(one.absolute()) for one in found)


@partial(Reader, metavar="X[,X,...]")
def factors(name: str, raw: Any) -> tuple[float, ...]:
    """Reads one number, or several separated by commas."""
    raw = raw.tolist() if hasattr(raw, "tolist") else raw  # an array or tensor
    parts = raw.split(",") if isinstance(raw, str) else raw
    parts = parts if isinstance(parts, list | tuple) else [parts]
    if not parts:
        raise InputError(name, why="is empty", remedy="give a number, or leave it out")
    one = real(-100, 100)
    return tuple(one(name, part) for part in parts)


def _switch(name: str, raw: Any) -> bool:
    """Reads yes/true/t/y/1 or no/false/f/n/0 in any case, as the official command does."""
    word = shown(raw, str).lower()
    if word in ("yes", "true", "t", "y", "1"):
        return True
    if word in ("no", "false", "f", "n", "0"):
        return False
    raise InputError(name, shown(raw), "must be true or false")


switch = Reader(_switch, ("true", "false"))


def switch_or(*words: str) -> Reader:
    """Makes a reader of true, false or one of these words."""

    def read(name: str, raw: Any) -> bool | str:
        if raw in words:
            return str(raw)
        try:
            return _switch(name, raw)
        except InputError:
            allowed = either(("true", "false", *words))
            raise InputError(name, shown(raw), f"must be {allowed}") from None

    return Reader(read, ("true", "false", *words))


def choice(*allowed: str | int) -> Reader:
    """Makes a reader of one of these words or integers."""
    known = {str(value): value for value in allowed}

    def read(name: str, raw: Any) -> str | int:
        word = shown(raw, str)
        if word not in known:
            raise InputError(name, shown(raw), f"must be {either(allowed)}")
        return known[word]

    return Reader(read, tuple(known))


def some_of(*allowed: str) -> Reader:
    """Makes a reader of some of these words, separated by commas or in a list.

    "none" is the empty list; "auto" must be the only word.
    """

    def read(name: str, raw: Any) -> tuple[str, ...]:
        parts = raw.split(",") if isinstance(raw, str) else raw
        words = [str(part).strip() for part in parts] if isinstance(parts, list | tuple) else [""]
        if words == ["none"]:
            return ()
        if words == ["auto"]:
            return ("auto",)
        if not set(words) <= set(allowed):
            raise InputError(
                name, shown(raw), f"must be auto, none, or some of {','.join(allowed)}"
            )
        return tuple(word for word in allowed if word in words)

    return Reader(read)


def integer(minimum: int, maximum: int, metavar: str = "N") -> Reader:
    """Makes a reader of an integer in [minimum, maximum]."""

    def read(name: str, raw: Any) -> int:
        try:
            value = int(str(raw))
        except ValueError:
            raise InputError(name, shown(raw), "must be a whole number") from None
        if isinstance(raw, bool) or not minimum <= value <= maximum:
            raise InputError(name, shown(raw), f"must be from {minimum} to {maximum}")
        return value

    return Reader(read, metavar=metavar)


def real(minimum: float, maximum: float, *, above: bool = False, below: bool = False) -> Reader:
    """Makes a reader of a finite number in [minimum, maximum].

    Args:
        minimum: Lower limit.
        maximum: Upper limit.
        exclude_min: Whether values must be larger than `minimum`.
        exclude_max: Whether values must be smaller than `maximum`.
    """
    low = f"above {minimum:g}" if above else f"at least {minimum:g}"
    high = f"below {maximum:g}" if below else f"at most {maximum:g}"
    allowed = f"{low} and {high}" if above or below else f"from {minimum:g} to {maximum:g}"

    def read(name: str, raw: Any) -> float:
        try:
            value = math.nan if isinstance(raw, bool) else float(str(raw))
        except ValueError:
            value = math.nan
        if math.isnan(value):
            raise InputError(name, shown(raw), "must be a number")
        inside = (value > minimum if above else value >= minimum) and (
            value < maximum if below else value <= maximum
        )
        if not inside:
            raise InputError(name, shown(raw), f"must be {allowed}")
        return value

    return Reader(read, metavar="X")


@partial(Reader, metavar="T1,T2,...")
def timesteps(name: str, raw: Any) -> tuple[float, ...]:
    """Reads `T1,T2,...`, the timestep of each step."""
    raw = raw.tolist() if hasattr(raw, "tolist") else raw  # an array or tensor
    parts = raw.split(",") if isinstance(raw, str) else raw
    one = real(0, 1000, above=True)
    found = [one(name, part) for part in parts] if isinstance(parts, list | tuple) else []
    if not found or any(b >= a for a, b in zip(found, found[1:], strict=False)):
        why = "must be falling timesteps above 0 and at most 1000, for example 1000,757,522"
        raise InputError(name, shown(raw), why)
    return tuple(found)


def listed(name: str, text: str) -> tuple[int, ...]:
    """Parses step numbers such as `0-5,8,11` into a rising sequence without duplicates."""
    found: set[int] = set()
    for part in text.split(","):
        written = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part.strip())
        if written is None:
            remedy = "give step numbers from 0, for example 0-5,8,11"
            raise InputError(name, why=f"has the steps {shown(text)}", remedy=remedy)
        low, high = int(written[1]), int(written[2] or written[1])
        if not low <= high < TRAIN_TIMESTEPS:
            remedy = f"they must rise and stay below {TRAIN_TIMESTEPS}"
            raise InputError(name, why=f"has the steps {low} to {high}", remedy=remedy)
        found |= set(range(low, high + 1))
    return tuple(sorted(found))


@partial(Reader, metavar="4N+1")
def frame_num(name: str, raw: Any) -> int:
    """Reads a frame count 4n+1; the VAE encodes the first frame, then each four, to one latent."""
    value = int(integer(1, 4093)(name, raw))
    below = (value - 1) // 4 * 4 + 1
    if value != below:
        raise InputError(name, value, "must be 4n+1", f"use {below} or {below + 4}")
    return value


@partial(Reader, metavar="4N")
def clip_frames(name: str, raw: Any) -> int:
    """Reads the frames of a clip of s2v, a multiple of 4."""
    value = int(integer(4, 4092)(name, raw))
    if value % 4:
        below = max(4, value // 4 * 4)
        raise InputError(name, value, "must be a multiple of 4", f"use {below} or {below + 4}")
    return value


@partial(Reader, metavar="W*H")
def size(name: str, raw: Any) -> tuple[int, int]:
    """Reads `W*H` or `WxH` in pixels, or [W, H] from JSON."""
    parts: Sequence[Any] = re.split(r"[*xX]", raw) if isinstance(raw, str) else raw
    try:
        width, height = (int(str(part)) for part in parts)
    except (TypeError, ValueError):
        why = "must be WIDTH*HEIGHT, for example 832*480"
        raise InputError(name, shown(raw), why) from None
    if min(width, height) < 1 or max(width, height) > _MAX_SIDE:
        why = f"must have a width and height from 1 to {_MAX_SIDE}"
        raise InputError(name, shown(raw), why)
    return width, height


@partial(Reader, metavar="X[,X]")
def guide_scale(name: str, raw: Any) -> tuple[float, float]:
    """Reads one number for both experts, or `LOW,HIGH` (low-noise expert first, as officially)."""
    parts = raw.split(",") if isinstance(raw, str) else raw
    parts = parts if isinstance(parts, list | tuple) else [parts]
    if not 1 <= len(parts) <= 2:
        raise InputError(name, shown(raw), "must be one number, or LOW,HIGH for the two experts")
    one = real(0, 100, above=True)
    return one(name, parts[0]), one(name, parts[-1])


@partial(Reader, metavar="INSIDE,BETWEEN")
def link_rates(name: str, raw: Any) -> tuple[float, float]:
    """Reads the bandwidths inside a machine and between machines, two positive numbers."""
    parts = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(parts, list | tuple) or len(parts) != 2:
        raise InputError(name, shown(raw), "must be two numbers, INSIDE,BETWEEN")
    one = real(0, 1e6, above=True)
    return one(name, parts[0]), one(name, parts[1])


@partial(Reader, metavar="0-5,8")
def steps(name: str, raw: Any) -> tuple[int, ...]:
    """Reads sampling steps such as `0-5,8,11`."""
    return listed(name, text(name, raw))
