"""The environment, read once and here (elsewhere only in `mesh`, and API keys)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from wan.settings.errors import InputError


def world_size(environ: Mapping[str, str] = os.environ) -> int:
    """Number of processes torchrun started; 1 without torchrun."""
    return _count("WORLD_SIZE", 1, environ)


def rank(environ: Mapping[str, str] = os.environ) -> int:
    """This process among all that torchrun started; 0 without torchrun."""
    return _index("RANK", environ)


def local_rank(environ: Mapping[str, str] = os.environ) -> int:
    """This process among those of its machine, which is also the index of its device."""
    return _index("LOCAL_RANK", environ)


def overlap(environ: Mapping[str, str] = os.environ) -> dict[str, bool]:
    """The setting that OVERLAP stands for, where it is set; the flag's older form."""
    words = {"0": False, "1": True}
    raw = environ.get("OVERLAP")
    if raw is None:
        return {}
    if raw not in words:
        raise InputError(f"OVERLAP is {raw!r}; it must be 0 or 1 (or use --fa_alltoall_overlap).")
    return {"fa_alltoall_overlap": words[raw]}


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the demo checkpoint is made: `wan` in the user's cache folder."""
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "wan"


def _index(name: str, environ: Mapping[str, str]) -> int:
    if world_size(environ) == 1:
        return 0
    if name not in environ:
        raise InputError(f"WORLD_SIZE is set, but {name} is not: start with torchrun.")
    return _count(name, 0, environ)


def _count(name: str, minimum: int, environ: Mapping[str, str]) -> int:
    raw = environ.get(name, str(minimum))
    if not raw.isascii() or not raw.isdigit() or int(raw) < minimum:
        raise InputError(
            f"{name} is {raw!r}; it must be a number from {minimum}: start with torchrun."
        )
    return int(raw)
