"""All settings, gathered from the dataclasses whose fields they are, and read together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from wan.settings.attention import Attention
from wan.settings.command import (
    Earlier,
    Evidence,
    Files,
    Images,
    Many,
    Output,
    Planning,
    PromptExtension,
)
from wan.settings.errors import InputError
from wan.settings.execution import Execution
from wan.settings.fields import Option, options
from wan.settings.parallel import Parallel
from wan.settings.request import Request, Sampling
from wan.settings.step_cache import StepCache
from wan.settings.values import switch

GROUPS: dict[str, tuple[type, ...]] = {
    "what to generate": (Request, Images),
    "checkpoint": (Files,),
    "sampling": (Sampling,),
    "device and memory": (Execution,),
    "attention": (Attention,),
    "step cache": (StepCache,),
    "several processes (torchrun)": (Parallel,),
    "planning": (Planning,),
    "prompt extension": (PromptExtension,),
    "evidence": (Evidence,),
    "many videos": (Many,),
    "output": (Output, Earlier),
}
"""Title of a group of flags -> the dataclasses whose fields they are."""
FLAGS: dict[str, Option] = {
    name: one for kinds in GROUPS.values() for kind in kinds for name, one in options(kind).items()
}


def read(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Checked values of raw ones.

    Args:
        raw: Values under flags' names.
        source: Makes a value's shown name from its key: "--{}", "record.json: {}".

    Raises:
        InputError: A name is unknown, or its value is not allowed.
    """
    unknown = [key for key in raw if key not in FLAGS]
    if unknown:
        raise InputError(f"{source.format(unknown[0])} is not a known setting; remove it.")
    return {key: FLAGS[key].read(source.format(key), value) for key, value in raw.items()}


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
    given = {
        name: value
        for name, value in keywords.items()
        if value is not None and (value is not False or FLAGS[name].read is switch)
    }
    found = read(given, "--{}")
    check_given(found)
    check_needs(found)
    return found


def is_for(name: str, python: str) -> bool:
    """Whether a call of the Python classes, "load" or "video", takes this setting."""
    return name in FLAGS and FLAGS[name].python == python


def check_given(given: Mapping[str, Any]) -> None:
    """InputError for settings of one call that exclude each other, whatever their values."""
    if {"attention_algo", "attention_backend"} <= given.keys():
        raise InputError(
            "--attention_algo names the dense kernel of NPUs, --attention_backend that of GPUs; "
            "give one of them."
        )
    for name in ("sample_shift", "sample_steps"):
        if {"timesteps", name} <= given.keys():
            raise InputError(f"--timesteps says all steps; drop it or --{name}.")
    if given.get("sample_solver") == "rcm" and "sample_shift" in given:
        raise InputError("--sample_shift has no effect on --sample_solver rcm; drop it.")


def check_needs(values: Mapping[str, Any]) -> None:
    """InputError for a setting without the one that it belongs to."""
    for name in values:
        needs = FLAGS[name].needs
        if needs is not None and not values.get(needs):
            raise InputError(f"--{name} has no effect without --{needs}; add it or drop --{name}.")
