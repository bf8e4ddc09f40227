"""All flags: the options of all settings dataclasses, and the checks of a set of flags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wan.settings import errors, rules
from wan.settings.attention import Attention
from wan.settings.command import (
    Controlled,
    Driving,
    Earlier,
    Evidence,
    Files,
    Images,
    Loras,
    Many,
    NetworkFiles,
    Output,
    Planning,
    PromptExtension,
    Sounds,
    Start,
)
from wan.settings.errors import InputError, Words
from wan.settings.execution import Execution
from wan.settings.fields import Option, options
from wan.settings.parallel import Parallel
from wan.settings.request import Request, Sampling
from wan.settings.step_cache import StepCache
from wan.settings.values import switch

GROUPS: dict[str, tuple[type, ...]] = {
    "video": (Request, Images, Sounds, Driving, Controlled),
    "checkpoint": (Files, NetworkFiles, Loras),
    "sampling": (Sampling, Start),
    "device and memory": (Execution,),
    "attention": (Attention,),
    "step cache": (StepCache,),
    "several processes (torchrun)": (Parallel,),
    "planning": (Planning,),
    "prompt extension": (PromptExtension,),
    "measurement": (Evidence,),
    "prompt file": (Many,),
    "output": (Output, Earlier),
}
"""Title of a group of flags -> the dataclasses that declare them."""
FLAGS: dict[str, Option] = {
    name: one for kinds in GROUPS.values() for kind in kinds for name, one in options(kind).items()
}


ALIASES = {flag.alias: name for name, flag in FLAGS.items() if flag.alias is not None}
"""Alias -> flag."""
_ONE = "give one of them"


def read(raw: Mapping[str, Any], source: str = "`{}`") -> dict[str, Any]:
    """Parses and checks the values of settings.

    Args:
        raw: Flag or alias -> value as text or JSON.
        source: Template of a setting's name in errors, such as "record.json: {}"; by default the
            key in backticks.

    Raises:
        InputError: A name is unknown, or a value is missing or not allowed.
    """
    twins = [alias for alias, key in ALIASES.items() if alias in raw and key in raw]
    if twins:
        raise InputError(
            source.format(twins[0]), why=f"is an alias of {ALIASES[twins[0]]}", remedy=_ONE
        )
    raw = {ALIASES.get(key, key): value for key, value in raw.items()}
    for key in (key for key, value in raw.items() if value is None):
        raise InputError(source.format(key), why="has no value", remedy="give one or leave it out")
    unknown = [key for key in raw if key not in FLAGS]
    if unknown:
        raise InputError(
            source.format(unknown[0]), why="is not a known setting", remedy="remove it"
        )
    return {key: FLAGS[key].read(source.format(key), value) for key, value in raw.items()}


KEYWORDS = {name: flag.keyword for name, flag in FLAGS.items() if flag.keyword is not None}
"""Flag -> keyword of the Python classes, where the two differ."""


PYTHON = Words(errors.KEYWORDS.setting, KEYWORDS)
"""Names of settings in messages of the Python classes."""
DIFFUSERS = Words(
    errors.KEYWORDS.setting,
    {name: str(flag.diffusers) for name, flag in FLAGS.items() if flag.diffusers is not None},
)
"""Names of settings in messages of `wan.diffusers`."""
NEEDS = tuple(
    rules.needs(name, flag.needs) for name, flag in FLAGS.items() if flag.needs is not None
)
"""Rules for settings that need another one; they hold for all layers of a run together."""


def for_loading(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Checks the keywords of a constructor. None, or False for no switch, counts as not given."""
    unknown = [name for name in keywords if not is_for(name, "load")]
    if unknown:
        remedy = "give it to generate" if is_for(unknown[0], "video") else "remove it"
        raise InputError(unknown[0], why="is not a known keyword of the constructor", remedy=remedy)
    given = {
        name: value
        for name, value in keywords.items()
        if value is not None and (value is not False or FLAGS[name].read is switch)
    }
    found = read(given)
    check_given(found)
    check_needs(found)
    return found


def is_for(name: str, python: str) -> bool:
    """Whether a call of the Python classes ("load" or "video") accepts this setting."""
    return name in FLAGS and FLAGS[name].python == python


def check_given(given: Mapping[str, Any]) -> None:
    """Raises InputError where a user sets two settings that exclude each other."""
    rules.check(rules.GIVEN, given)


def check_needs(values: Mapping[str, Any]) -> None:
    """Raises InputError for a setting without another one that it needs."""
    rules.check(NEEDS, values)
