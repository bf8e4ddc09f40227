"""Readers of single values: raw text or JSON in, a checked Python value or an InputError out."""

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

_MAX_SIDE = 1_000_000  # pixels; what a task takes is far less and is checked there


@dataclass(frozen=True)
class Reader:
    """How one value is read.

    Attributes:
        read: Gets the value's name as refusals write it (`frame_num` in backticks, or a file and
            its key) and the raw value; returns the checked one or raises InputError.
        choices: The words that are allowed, for `--help`; None where any text may be right.
        metavar: Stands for the value in `--help`, where the choices are none or too many.
    """

    read: Callable[[str, Any], Any]
    choices: tuple[str, ...] | None = None
    metavar: str = "NAME"

    def __call__(self, name: str, raw: Any) -> Any:
        return self.read(name, raw)


def shown(raw: Any, form: Callable[[Any], str] = repr) -> str:
    """A value, as form writes it, on one line and short enough for a sentence.

    Plain words are not quoted.
    """
    if isinstance(raw, str) and re.fullmatch(r"[\w.,:;*+/~@=-]{1,100}", raw):
        return raw
    try:
        line = " ".join(form(raw).split())
    except ValueError:  # Python writes no whole number of more than 4300 digits
        return "a number of thousands of digits"
    return line if len(line) <= 100 else f"{line[:60]}... ({len(line)} characters)"


def either(words: Sequence[object]) -> str:
    """`0, 1 or 2`."""
    *some, last = map(str, words)
    return f"{', '.join(some)} or {last}" if some else last


@partial(Reader, metavar="TEXT")
def text(name: str, raw: Any) -> str:
    """Text that can be written in UTF-8."""
    if not isinstance(raw, str):
        raise InputError(name, shown(raw), "must be text")
    try:
        raw.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError(name, why="is not valid UTF-8 text", remedy="pass it in UTF-8") from None
    return raw


@partial(Reader, metavar="TEXT")
def texts(name: str, raw: Any) -> tuple[str, ...]:
    """A list of texts, or one text."""
    parts = raw if isinstance(raw, list | tuple) else [raw]
    found = tuple(text(name, part) for part in parts)
    if not all(part.strip() for part in found) or not found:
        raise InputError(name, why="has an empty text", remedy="give a text for each clip")
    return found


@partial(Reader, metavar="PATH")
def path(name: str, raw: Any) -> Path:
    """A path; `~` is the home folder."""
    raw = str(raw) if isinstance(raw, Path) else raw
    if not text(name, raw).strip():
        raise InputError(name, why="is empty", remedy="give a path, or leave it out")
    if "\0" in raw:
        raise InputError(name, why="holds a NUL character", remedy="give a path without it")
    return Path(os.path.expanduser(raw))  # Path's own fails for an unknown user


@partial(Reader, metavar="FILE[=STRENGTH]")
def files(name: str, raw: Any) -> tuple[str, ...]:
    """Paths as text, perhaps with `=STRENGTH`; absolute, so that a record repeats them anywhere."""
    parts = raw if isinstance(raw, list | tuple) else [raw]
    if not parts:
        remedy = "give FILE or FILE=STRENGTH, or leave it out"
        raise InputError(name, why="is empty", remedy=remedy)
    return tuple(str(path(name, part).absolute()) for part in parts)


@partial(Reader, metavar="FILE[,FILE]")
def pictures(name: str, raw: Any) -> tuple[str, ...]:
    """Paths as text with commas between them, or a list of such; absolute, as `files`.

    A file whose name has a comma in it is given by itself.
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
    """One number, or several with commas between them."""
    raw = raw.tolist() if hasattr(raw, "tolist") else raw  # an array or tensor
    parts = raw.split(",") if isinstance(raw, str) else raw
    parts = parts if isinstance(parts, list | tuple) else [parts]
    if not parts:
        raise InputError(name, why="is empty", remedy="give a number, or leave it out")
    one = real(-100, 100)
    return tuple(one(name, part) for part in parts)


def _switch(name: str, raw: Any) -> bool:
    """Official boolean words: yes/true/t/y/1 and no/false/f/n/0, in any case."""
    word = shown(raw, str).lower()
    if word in ("yes", "true", "t", "y", "1"):
        return True
    if word in ("no", "false", "f", "n", "0"):
        return False
    raise InputError(name, shown(raw), "must be true or false")


switch = Reader(_switch, ("true", "false"))


def switch_or(*words: str) -> Reader:
    """true or false, as `switch`, or one of these words."""

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
    """One of these words or whole numbers."""
    known = {str(value): value for value in allowed}

    def read(name: str, raw: Any) -> str | int:
        word = shown(raw, str)
        if word not in known:
            raise InputError(name, shown(raw), f"must be {either(allowed)}")
        return known[word]

    return Reader(read, tuple(known))


def some_of(*allowed: str) -> Reader:
    """Some of these words with commas between them, or a list of them.

    "none" is an empty list, and "auto" stands alone.
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
    """A whole number in [minimum, maximum]."""

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
    """A finite number in [minimum, maximum].

    Args:
        minimum: The smallest value; with `above`, values must be larger.
        maximum: The largest value; with `below`, values must be smaller.
        above: Excludes minimum.
        below: Excludes maximum.
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
    """`T1,T2,...`: the timestep that the model gets in each step."""
    raw = raw.tolist() if hasattr(raw, "tolist") else raw  # an array or tensor
    parts = raw.split(",") if isinstance(raw, str) else raw
    one = real(0, 1000, above=True)
    found = [one(name, part) for part in parts] if isinstance(parts, list | tuple) else []
    if not found or any(b >= a for a, b in zip(found, found[1:], strict=False)):
        why = "must be falling timesteps above 0 and at most 1000, for example 1000,757,522"
        raise InputError(name, shown(raw), why)
    return tuple(found)


def listed(name: str, text: str) -> tuple[int, ...]:
    """Whole numbers written as in `0-5,8,11`, each once and rising."""
    found: set[int] = set()
    for part in text.split(","):
        written = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part.strip())
        if written is None:
            remedy = "write them from 0, for example 0-5,8,11"
            raise InputError(name, why=f"has the steps {shown(text)}", remedy=remedy)
        low, high = int(written[1]), int(written[2] or written[1])
        if not low <= high < TRAIN_TIMESTEPS:
            remedy = f"they must rise and stay below {TRAIN_TIMESTEPS}"
            raise InputError(name, why=f"has the steps {low} to {high}", remedy=remedy)
        found |= set(range(low, high + 1))
    return tuple(sorted(found))


@partial(Reader, metavar="4N+1")
def frame_num(name: str, raw: Any) -> int:
    """A frame count 4n+1: the VAE turns the first frame, then every four, into one latent frame."""
    value = int(integer(1, 4093)(name, raw))
    below = (value - 1) // 4 * 4 + 1
    if value != below:
        raise InputError(name, value, "must be 4n+1", f"use {below} or {below + 4}")
    return value


@partial(Reader, metavar="4N")
def clip_frames(name: str, raw: Any) -> int:
    """Frames of a clip, 4n: its latent frames stand behind those of the clip before."""
    value = int(integer(4, 4092)(name, raw))
    if value % 4:
        below = max(4, value // 4 * 4)
        raise InputError(name, value, "must be a multiple of 4", f"use {below} or {below + 4}")
    return value


@partial(Reader, metavar="W*H")
def size(name: str, raw: Any) -> tuple[int, int]:
    """`W*H` in pixels (also `WxH`), or [W, H] from JSON."""
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
    """One number for both experts, or `LOW,HIGH` (low-noise expert first, as officially)."""
    parts = raw.split(",") if isinstance(raw, str) else raw
    parts = parts if isinstance(parts, list | tuple) else [parts]
    if not 1 <= len(parts) <= 2:
        raise InputError(name, shown(raw), "must be one number, or LOW,HIGH for the two experts")
    one = real(0, 100, above=True)
    return one(name, parts[0]), one(name, parts[-1])


@partial(Reader, metavar="INSIDE,BETWEEN")
def link_rates(name: str, raw: Any) -> tuple[float, float]:
    """Two positive numbers."""
    parts = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(parts, list | tuple) or len(parts) != 2:
        raise InputError(name, shown(raw), "must be two numbers, INSIDE,BETWEEN")
    one = real(0, 1e6, above=True)
    return one(name, parts[0]), one(name, parts[1])


@partial(Reader, metavar="0-5,8")
def steps(name: str, raw: Any) -> tuple[int, ...]:
    """Sampling steps, as in `0-5,8,11`."""
    return listed(name, text(name, raw))
