"""Checks that a video has the inputs that its task needs."""

from __future__ import annotations

from wan.settings.errors import InputError
from wan.settings.presets import Preset
from wan.settings.rules import Values
from wan.settings.values import join_with_and, join_with_or
from wan.settings.video_options import list_needed_inputs


def check_needed_inputs(preset: Preset, values: Values) -> None:
    """Refuses a video without an input that its task needs."""
    groups = list_needed_inputs(preset.task)
    missing = [group for group in groups if not any(_has_value(values, name) for name in group)]
    if missing:
        names = [join_with_or([f"`{name}`" for name in group]) for group in groups]
        needs = join_with_and(names)
        remedy = join_with_and([names[groups.index(group)] for group in missing])
        if remedy == needs:
            remedy = "them" if len(groups) > 1 else "it" if len(groups[0]) == 1 else "one of them"
        raise InputError("`task`", preset.task, f"needs {needs}", f"give {remedy}")


def _has_value(values: Values, name: str) -> bool:
    """Returns whether an input is given; the default of several images is ()."""
    value = values.get(name)
    return value is not None and not (isinstance(value, tuple) and not value)
