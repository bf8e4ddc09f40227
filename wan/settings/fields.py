"""`option` declares a setting once, as a dataclass field, for all front ends.

The settings of a subject are the fields of one frozen dataclass. The command line, `--help`, the
Python classes, `wan.diffusers`, records, prompt files and the tables of the documentation are
derived from these fields (`wan.settings.flags` collects them).
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
"""Default of a field whose default comes from the task's preset."""


@dataclass(frozen=True)
class Option:
    """Declaration of a setting.

    Attributes:
        reader: Parses and checks a value.
        help: One line for `--help` and the documentation, with the unit and the default.
        record: Whether the JSON record contains it; true for each setting that changes the video.
        needs: Setting without which this one has no effect.
        python: Call of the Python classes that accepts it: "load" for the constructor, "video" for
            `generate`, None for neither.
        keyword: Official keyword in that call, where it differs from the flag.
        diffusers: Name in `wan.diffusers`, or in a call of diffusers' pipelines; True: the flag's
            name; None: not available there.
        alias: Shorter name of the flag, also in lines of a prompt file.
        common: Whether `--help` without `all` lists it.
        line: Whether a line of a prompt file may set it.
        decoding: Whether it has an effect with `--decode_latents`.
        checkpoint: Whether a checkpoint's generation_config.json may set it.
        variables: Environment variable -> its value -> the setting's value; None leaves the setting
            unchanged.
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
    """Declares a dataclass field that is a setting.

    By default a line of a prompt file may set it where `generate` accepts it (python="video").

    Args:
        default: Default of the field.
        reader: Parses and checks a value.
        help: See `Option`.
        attributes: Further attributes of `Option`.
    """
    more.setdefault("line", more.get("python", "video") == "video")
    return field(default=default, metadata={Option: Option(read, help, **more)})


loading = partial(option, python="load")
"""Declares a setting of the constructor: how networks are loaded and run."""
layout = partial(option, python="load", record=False)
"""Declares a setting of the constructor that does not change the video."""
command = partial(option, python=None)
"""Declares a setting of the command line only."""


def options(kind: type) -> dict[str, Option]:
    """Returns the options that a dataclass declares, without inherited ones, by field name."""
    own, found = vars(kind).get("__annotations__", {}), {}
    for one in dataclasses.fields(kind):
        if one.name in own and Option in one.metadata:
            setting: Option = one.metadata[Option]
            if setting.diffusers is True:
                setting = dataclasses.replace(setting, diffusers=one.name)
            found[one.name] = setting
    return found


def fill(kind: Callable[..., T], values: Mapping[str, Any]) -> T:
    """Builds a dataclass from the values that have the names of its fields; ignores the others."""
    names = {one.name for one in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in values.items() if name in names})
