"""Values with parameters of their own, such as `mag:threshold=0.1,warmup=2`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wan.settings.errors import InputError
from wan.settings.values import Reader, join_with_and, parse_number

_KEY = re.compile(r"(?:^|,) *([a-z]\w*)=")


@dataclass(frozen=True)
class Parameter:
    """A parameter of a value.

    Attributes:
        reader: Parses and checks it.
        default: Its value where the text does not have it.
    """

    reader: Reader
    default: Any = None


Parameters = Mapping[str, Parameter]
"""Name -> parameter. The first one may be given without its name: `mag:0.1`."""


def read_parameters(name: str, text: str, parameters: Parameters) -> dict[str, Any]:
    """Reads the parameters in the text of a setting, and adds the defaults of the others.

    Args:
        name: The setting in errors.
        text: `VALUE`, or `VALUE:KEY=VALUE,KEY=VALUE`.

    Raises:
        InputError: A parameter is unknown, given twice, or has a value that is not allowed.
    """
    value, _, _ = text.partition(":")
    values = {key: parameter.default for key, parameter in parameters.items()}
    for key, raw in _split_parameters(name, text, parameters).items():
        values[key] = parameters[key].reader(f"{name} {value}:{key}", raw)
    return values


def normalize_parameters(name: str, text: str, parameters: Parameters) -> str:
    """Returns the text with numbers and paths in one form, so that equal settings are equal."""
    value, colon, _ = text.partition(":")
    read_values, parts = read_parameters(name, text, parameters), list[str]()
    for key, raw in _split_parameters(name, text, parameters).items():
        path = read_values[key]
        part = str(path.absolute()) if isinstance(path, Path) else format_number(raw)
        parts.append(part if not parts and f"{key}=" not in text else f"{key}={part}")
    return f"{value}{colon}{','.join(parts)}"


def format_number(raw: Any) -> str:
    """Returns the text of a number without a needless fraction; other texts as they are."""
    number = parse_number(raw)
    return str(raw) if number is None else repr(number).removesuffix(".0")


def _split_parameters(name: str, text: str, parameters: Parameters) -> dict[str, str]:
    """Splits the text after the colon at each `KEY=`."""
    value, colon, listed = text.partition(":")
    if not colon:
        return {}
    first, *parts = _KEY.split(listed)
    pairs = [*zip(parts[::2], parts[1::2], strict=True)]
    if first or not parts:
        pairs.insert(0, (next(iter(parameters), ""), first))
    if not parameters:
        raise InputError(f"{name} {value}", why="has no parameters", remedy="give only its name")
    for key, _ in pairs:
        if key not in parameters:
            why = f"has no parameter {key}"
            raise InputError(f"{name} {value}", None, why, f"it has {join_with_and([*parameters])}")
    if len(dict(pairs)) < len(pairs):
        raise InputError(f"{name} {value}", why="has a parameter twice", remedy="give it once")
    return dict(pairs)
