"""The environment, read once and here (elsewhere only in `mesh`, and API keys)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from wan.settings.errors import InputError


def world_size(environ: Mapping[str, str] = os.environ) -> int:
    """Number of processes torchrun started; 1 without torchrun."""
    raw = environ.get("WORLD_SIZE", "1")
    if not raw.isdigit() or int(raw) < 1:
        raise InputError(
            f"WORLD_SIZE is {raw!r}; it must be a positive number: start with torchrun."
        )
    return int(raw)


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the demo checkpoint is made: `wan` in the user's cache folder."""
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "wan"
