"""What calls are refused with, for tables of refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wan.settings.errors import InputError

FOLDER = r"(?<=TMP/)[\w-]+"
"""For `check_refusals` to hide: a folder of pytest, numbered where several tests have one name."""


def said(call: Callable[..., Any], *args: Any, **keywords: Any) -> str:
    """The sentence that a call is refused with; nothing where it is not refused."""
    try:
        call(*args, **keywords)
    except InputError as refusal:
        return str(refusal)
    return ""
