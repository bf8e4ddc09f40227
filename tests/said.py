"""What a call says where it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wan.settings.errors import InputError


def said(call: Callable[..., Any], *given: Any, kind: type[Exception] = InputError) -> str:
    """The sentence of the refusal; "" where the call does not refuse."""
    try:
        call(*given)
    except kind as refusal:
        return str(refusal)
    return ""
