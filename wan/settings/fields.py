"""A flag is a field: `option` declares a setting once, for every front end.

The settings of a subject are the fields of one frozen dataclass. The command line, `--help`, the
Python classes, `wan.diffusers`, records, prompt files and the tables of the documents are made from
them (`wan.settings.flags` gathers all).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

from wan.settings.values import Reader

T = TypeVar("T")
REQUIRED = dataclasses.MISSING
"""The default of a setting that has none of its own, because the task's preset has it."""


@dataclass(frozen=True)
class Option:
    """What is known of a setting.

    Attributes:
        read: Reads and checks its value.
        help: One line for `--help` and the documents; it says the default.
        record: Whether the JSON record repeats it, which whatever changes the video needs.
        needs: The setting without which it has no effect.
        python: Which call of the Python classes takes it: "load" for the constructor, "video" for
            `generate`, None for neither.
        keyword: Its official name there, where that is another one.
        diffusers: Its name in `wan.diffusers`, or in a call of diffusers' pipelines; None: it has
            none.
        alias: A shorter name of its flag, also in lines of a prompt file.
        common: Whether `--help` without `all` lists it.
        line: Whether a line of a prompt file may set it.
        decoding: Whether `--decode_latents` reads it.
        checkpoint: Whether a checkpoint's generation_config.json may set it.
        variables: The environment variables that stand for it: variable -> its values -> the
            setting's, of which None leaves the setting as it is.
    """

    read: Reader
    help: str
    record: bool = True
    needs: str | None = None
    python: Literal["load", "video"] | None = "video"
    keyword: str | None = None
    diffusers: str | Literal[True] | None = None
    alias: str | None = None
    common: bool = False
    line: bool = False
    decoding: bool = False
    checkpoint: bool = False
    variables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def option(default: Any, read: Reader, help: str, **more: Any) -> Any:
    """A field of a dataclass that is a setting; `more`: further attributes of `Option`.

    A line of a prompt file may set what one call of `generate` takes, unless `more` says otherwise.
    `diffusers=True` is the name of the field.
    """
    more.setdefault("line", more.get("python", "video") == "video")
    return field(default=default, metadata={Option: Option(read, help, **more)})


loading = partial(option, python="load")
"""A setting that decides how networks are loaded and run."""
layout = partial(option, python="load", record=False)
"""Likewise, where the video is the same with every value."""
command = partial(option, python=None)
"""A setting of the command line alone."""


def options(kind: type) -> dict[str, Option]:
    """The settings that a dataclass declares itself, without those that it inherits."""
    own, found = vars(kind).get("__annotations__", {}), {}
    for one in dataclasses.fields(kind):
        if one.name in own and Option in one.metadata:
            setting: Option = one.metadata[Option]
            if setting.diffusers is True:
                setting = dataclasses.replace(setting, diffusers=one.name)
            found[one.name] = setting
    return found


def fill(kind: Callable[..., T], values: Mapping[str, Any]) -> T:
    """A dataclass whose fields are settings, from the values that are its own."""
    names = {one.name for one in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in values.items() if name in names})
