"""JSON from a user, in which a name may not occur twice in one object (RFC 8259, section 4)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


class DuplicateNameError(ValueError):
    """A name occurs twice in a JSON object.

    Attributes:
        name: The name.
    """

    def __init__(self, name: str) -> None:
        super().__init__(f"the name {name[:60]!r} is given twice")
        self.name = name


def parse_json(text: str | bytes, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """Parses JSON.

    Args:
        text: The JSON text.
        parse_constant: Called with NaN, Infinity and -Infinity, which are no JSON.

    Raises:
        DuplicateNameError: A name occurs twice in an object, at any depth.
        ValueError: The text is no JSON.
        RecursionError: It is nested too deeply.
    """
    return json.loads(text, object_pairs_hook=_make_unique_dict, parse_constant=parse_constant)


def _make_unique_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the names and values of an object as a dictionary."""
    values = dict(pairs)
    if len(values) < len(pairs):
        for name, _ in pairs:
            if name not in values:  # was removed at its first occurrence
                raise DuplicateNameError(name)
            del values[name]
    return values
