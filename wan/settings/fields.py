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

from wan.settings.errors import COMMAND_LINE_NAMING, FlagNaming
from wan.settings.values import Reader

T = TypeVar("T")
REQUIRED = dataclasses.MISSING
"""Default of a field whose default comes from the task's preset."""


@dataclass(frozen=True)
class HelpText:
    """The meaning of a setting, from which each front end makes its text.

    Other settings are in backticks, as in an `InputError`.

    Attributes:
        text: Meaning and unit; "": that of each kind of task in `kinds`.
        note: Tasks and default, for the command line and the documentation.
        kinds: Kind of task -> meaning for requests to a service of this kind.
        command_line: Continues `text` for the command line and the documentation.
    """

    text: str = ""
    note: str = ""
    kinds: Mapping[str, str] = field(default_factory=dict)
    command_line: str = ""

    def render(self) -> str:
        """Returns the text of `--help` and of the documentation."""
        kinds_by_text: dict[str, list[str]] = {}
        for kind, text in self.kinds.items():
            kinds_by_text.setdefault(text, []).append(kind)
        parts = (f"{', '.join(kinds)}: {text}" for text, kinds in kinds_by_text.items())
        text = (self.text or "; ".join(parts)) + self.command_line
        return COMMAND_LINE_NAMING.render(f"{text} ({self.note})" if self.note else text)

    def describe(self, kind: str, naming: FlagNaming) -> str:
        """Returns the meaning for requests to a service with a task of this kind."""
        return naming.render(self.kinds.get(kind, self.text))


@dataclass(frozen=True)
class Option:
    """Declaration of a setting.

    Attributes:
        reader: Parses and checks a value.
        meaning: Its text.
        record: Whether the JSON record contains it; true for each setting that changes the video.
        needs: Setting without which this one has no effect.
        python: Call of the Python classes that accepts it: "load" for the constructor, "video" for
            `generate`, None for neither.
        keyword: Official keyword in that call, where it differs from the flag.
        diffusers: Name in `wan.diffusers`, or in a call of diffusers' pipelines; True: the flag's
            name; None: not available there.
        common: Whether `--help` without `all` lists it.
        line: Whether a line of a prompt file may set it.
        decoding: Whether it has an effect with `--decode_latents`.
        checkpoint: Whether a checkpoint's generation_config.json may set it.
        tasks: Tasks on whose videos it has an effect; (): on those of all tasks.
        needed: Task that needs this input -> the inputs of which one may be given instead.
        media: Media types of an input file, such as "image/*".
        variables: Environment variable -> its value -> the setting's value; None leaves the setting
            unchanged.
    """

    reader: Reader
    meaning: HelpText
    record: bool = True
    needs: str | None = None
    python: Literal["load", "video"] | None = "video"
    keyword: str | None = None
    diffusers: str | Literal[True] | None = None
    common: bool = False
    line: bool = False
    decoding: bool = False
    checkpoint: bool = False
    tasks: tuple[str, ...] = ()
    needed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    media: str = ""
    variables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def help(self) -> str:
        """One line for `--help` and the documentation, with the unit and the default."""
        return self.meaning.render()


def option(default: Any, reader: Reader, help: str | HelpText, **attributes: Any) -> Any:
    """Declares a dataclass field that is a setting.

    By default a line of a prompt file may set it where `generate` accepts it (python="video").

    Args:
        default: Default of the field.
        reader: Parses and checks a value.
        help: Its meaning; a text, which includes the default, where no request may set it.
        attributes: Further attributes of `Option`.
    """
    attributes.setdefault("line", attributes.get("python", "video") == "video")
    meaning = HelpText(help) if isinstance(help, str) else help
    return field(default=default, metadata={Option: Option(reader, meaning, **attributes)})


load_option = partial(option, python="load")
"""Declares a setting of the constructor: how networks are loaded and run."""
layout_option = partial(option, python="load", record=False)
"""Declares a setting of the constructor that does not change the video."""
command_option = partial(option, python=None)
"""Declares a setting of the command line only."""


def list_options(group: type) -> dict[str, Option]:
    """Returns the options that a dataclass declares, without inherited ones, by field name."""
    declared_names, options_by_name = vars(group).get("__annotations__", {}), {}
    for dataclass_field in dataclasses.fields(group):
        if dataclass_field.name in declared_names and Option in dataclass_field.metadata:
            entry: Option = dataclass_field.metadata[Option]
            if entry.diffusers is True:
                entry = dataclasses.replace(entry, diffusers=dataclass_field.name)
            options_by_name[dataclass_field.name] = entry
    return options_by_name


def build_from_values(factory: Callable[..., T], values: Mapping[str, Any]) -> T:
    """Builds a dataclass from the values that have the names of its fields; ignores the others."""
    names = {dataclass_field.name for dataclass_field in dataclasses.fields(factory)}  # type: ignore[arg-type]
    return factory(**{name: value for name, value in values.items() if name in names})
