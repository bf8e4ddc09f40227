"""Readers of single values: raw text or JSON in, a checked Python value or an InputError out.

Every reader gets the value's name as the user knows it (`--frame_num`, or a key of a JSON file).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from wan.settings.errors import InputError

Reader = Callable[[str, Any], Any]
_LONGEST = 1_000_000  # pixels of a side; what a task takes is far less, and says so itself


def shown(raw: Any, form: Callable[[Any], str] = repr) -> str:
    """A value, as form writes it, on one line and short enough for a sentence."""
    try:
        line = " ".join(form(raw).split())
    except ValueError:  # Python writes no whole number of more than 4300 digits
        return "a number of thousands of digits"
    return line if len(line) <= 100 else f"{line[:60]}... ({len(line)} characters)"


def text(name: str, raw: Any) -> str:
    if not isinstance(raw, str):
        raise InputError(f"{name} is {shown(raw)}; it must be text.")
    try:
        raw.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError(f"{name} is not valid UTF-8 text; pass it in UTF-8.") from None
    return raw


def path(name: str, raw: Any) -> str:
    if not text(name, raw).strip():
        raise InputError(f"{name} is empty; give a path or leave the flag out.")
    return str(raw)


def switch(name: str, raw: Any) -> bool:
    """Official boolean words: yes/true/t/y/1 and no/false/f/n/0, in any case."""
    word = shown(raw, str).lower()
    if word in ("yes", "true", "t", "y", "1"):
        return True
    if word in ("no", "false", "f", "n", "0"):
        return False
    raise InputError(f"{name} is {shown(raw)}; use true or false.")


def integer(minimum: int, maximum: int, hint: str = "") -> Reader:
    """A whole number within [minimum, maximum]."""

    def read(name: str, raw: Any) -> int:
        try:
            value = int(str(raw))
        except ValueError:
            raise InputError(f"{name} is {shown(raw)}; it must be a whole number.{hint}") from None
        if isinstance(raw, bool) or not minimum <= value <= maximum:
            raise InputError(
                f"{name} is {shown(raw, str)}; it must be from {minimum} to {maximum}.{hint}"
            )
        return value

    return read


def positive(maximum: float, minimum: float = 0.0) -> Reader:
    """A finite number in (0, maximum], or in [minimum, maximum] where a minimum is given."""
    allowed = f"from {minimum:g} to {maximum:g}" if minimum else f"above 0 and at most {maximum:g}"

    def read(name: str, raw: Any) -> float:
        try:
            value = float(str(raw))
        except ValueError:
            raise InputError(f"{name} is {shown(raw)}; it must be a number.") from None
        if not math.isfinite(value) or not max(minimum, 5e-324) <= value <= maximum:
            raise InputError(f"{name} is {shown(raw, str)}; it must be {allowed}.")
        return value

    return read


def share(name: str, raw: Any) -> float:
    """A number in [0, 1)."""
    try:
        value = float(str(raw))
    except ValueError:
        raise InputError(f"{name} is {shown(raw)}; it must be a number.") from None
    if not 0 <= value < 1:
        raise InputError(f"{name} is {shown(raw, str)}; it must be from 0 to below 1.")
    return value


def choice(*allowed: str) -> Reader:
    def read(name: str, raw: Any) -> str:
        if raw not in allowed:
            raise InputError(f"{name} is {shown(raw)}; choose one of {', '.join(allowed)}.")
        return str(raw)

    return read


def some_of(*allowed: str) -> Reader:
    """Some of these words with commas between them, or a list of them; "none" is no one."""

    def read(name: str, raw: Any) -> tuple[str, ...]:
        parts = raw.split(",") if isinstance(raw, str) else raw
        words = [str(part).strip() for part in parts] if isinstance(parts, list | tuple) else [""]
        if words == ["none"]:
            return ()
        if not set(words) <= set(allowed):
            raise InputError(f"{name} is {shown(raw)}; give some of {','.join(allowed)}, or none.")
        return tuple(word for word in allowed if word in words)

    return read


def comm_type(name: str, raw: Any) -> int:
    word = shown(raw, str)
    if word not in ("0", "1", "2"):
        raise InputError(f"{name}: comm_type must be 0, 1, or 2, but got {word}.")
    return int(word)


def frame_num(name: str, raw: Any) -> int:
    """A frame count 4n+1: the VAE turns the first frame, then every four, into one latent frame."""
    value = int(integer(1, 4093)(name, raw))
    below = (value - 1) // 4 * 4 + 1
    if value != below:
        raise InputError(f"{name} is {value}; it must be 4n+1: use {below} or {below + 4}.")
    return value


def size(name: str, raw: Any) -> tuple[int, int]:
    """`W*H` in pixels (also `WxH`), or [W, H] from JSON."""
    parts: Sequence[Any] = re.split(r"[*xX]", raw) if isinstance(raw, str) else raw
    try:
        width, height = (int(str(part)) for part in parts)
    except (TypeError, ValueError):
        raise InputError(
            f"{name} is {shown(raw)}; write WIDTH*HEIGHT, for example 832*480."
        ) from None
    if min(width, height) < 1 or max(width, height) > _LONGEST:
        raise InputError(
            f"{name} is {shown(raw, str)}; width and height must be positive, and at most "
            f"{_LONGEST}."
        )
    return width, height


def guide_scale(name: str, raw: Any) -> tuple[float, float]:
    """One number for both experts, or `LOW,HIGH` (low-noise expert first, as officially)."""
    parts = raw.split(",") if isinstance(raw, str) else raw
    parts = parts if isinstance(parts, list | tuple) else [parts]
    if not 1 <= len(parts) <= 2:
        raise InputError(
            f"{name} is {shown(raw)}; give one number, or LOW,HIGH for the two experts."
        )
    low, high = (positive(100)(name, parts[i]) for i in (0, -1))
    return low, high
