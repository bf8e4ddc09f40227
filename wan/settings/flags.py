"""All settings, gathered from the dataclasses whose fields they are."""

from __future__ import annotations

from collections.abc import Mapping
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
