"""The flags of the command line as keywords of the Python classes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from wan.cli.flags import check_given
from wan.cli.resolve import check_needs
from wan.settings.errors import InputError
from wan.settings.flags import FLAGS, read
from wan.settings.values import switch

KEYWORDS = {name: flag.keyword for name, flag in FLAGS.items() if flag.keyword is not None}
"""Flag -> keyword of the Python classes, where they differ."""


@contextmanager
def in_keywords() -> Iterator[None]:
    """Refusals name the call's keywords instead of flags and variables."""

    def keyword(flag: re.Match[str]) -> str:
        return KEYWORDS.get(flag[1], flag[1]) if flag[1] in FLAGS else flag[0]

    try:
        yield
    except InputError as error:
        message = re.sub(r" \(or [A-Z][^)]*\)", "", str(error))
        raise InputError(re.sub(r"--(\w+)", keyword, message)) from error


def for_loading(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Checked settings of a constructor; None, or False of what is no switch, is "not given"."""
    unknown = [name for name in keywords if not is_for(name, "load")]
    if unknown:
        remedy = "give it to generate" if is_for(unknown[0], "video") else "remove it"
        raise InputError(f"{unknown[0]} is not a known keyword of the constructor; {remedy}.")
    off = {name for name, value in keywords.items() if value is False and not is_switch(name)}
    given = {n: v for n, v in keywords.items() if v is not None and n not in off}
    found = read(given, "--{}")
    check_given(found)
    check_needs(found)
    return found


def is_for(name: str, python: str) -> bool:
    return name in FLAGS and FLAGS[name].python == python


def is_switch(name: str) -> bool:
    return FLAGS[name].read is switch
