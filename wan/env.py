"""Reads the environment variables, except those of `wan.distributed` and the API keys."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from wan.settings.errors import COMMAND_LINE_NAMING, FlagNaming, InputError
from wan.settings.flags import FLAGS
from wan.settings.values import join_with_or

_REFUSED: dict[str, tuple[str | None, str]] = {
    "USE_SUB_HEAD": (
        "0",
        "but groups of heads are an attention mode here; unset it and use `comm_type=1`, which "
        "works head by head",
    ),
    "MINDIE_SD_FA_TYPE": (
        None,
        "by which mindiesd would silently replace the attention kernel; unset it and use "
        "`attention_algo`",
    ),
}
"""Variable -> its value without effect, and the rest of the sentence that refuses others."""


_COUNTS, _INDICES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE"), ("RANK", "LOCAL_RANK")


def world_size(environ: Mapping[str, str] = os.environ) -> int:
    """Returns the number of processes that torchrun started; 1 without torchrun."""
    return _count("WORLD_SIZE", 1, environ)


def rank(environ: Mapping[str, str] = os.environ) -> int:
    """Returns the rank of this process; 0 without torchrun."""
    found, world = _index("RANK", environ), world_size(environ)
    if found >= world:
        raise InputError(
            f"RANK is {found}, but WORLD_SIZE is {world}, so ranks are 0 to {world - 1}: start "
            "with torchrun."
        )
    return found


def local_rank(environ: Mapping[str, str] = os.environ) -> int:
    """Returns the rank on this machine, which is also the index of the device."""
    return _index("LOCAL_RANK", environ)


def local_world_size(environ: Mapping[str, str] = os.environ) -> int:
    """Returns the number of processes that torchrun started on this machine."""
    return _count("LOCAL_WORLD_SIZE", 1, environ)


def node(environ: Mapping[str, str] = os.environ) -> int:
    """Returns the rank of this machine among those of the job."""
    return _count("GROUP_RANK", 0, environ)


def stand_for(ranks: int, nodes: int = 1, environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets torchrun's variables as for rank 0, for a process that only checks settings."""
    if ranks > 1:
        counts = dict(zip(_COUNTS, (str(ranks), str(ranks // nodes)), strict=True))
        environ.update(counts | dict.fromkeys(_INDICES, "0"))


def for_ranks(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the environment without the variables of `simulate_ranks`, for starting the ranks."""
    return {name: value for name, value in environ.items() if name not in (*_COUNTS, *_INDICES)}


def refused(environ: Mapping[str, str] = os.environ) -> None:
    """Checks that no unsupported environment variable is set.

    Raises:
        InputError: One is set.
    """
    for name, (harmless, instead) in _REFUSED.items():
        if environ.get(name, harmless) != harmless:
            raise InputError(f"{name} is {environ[name]!r}, {instead}.")


def aliases(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Returns the settings that environment variables of the Ascend adaptation of Wan2.2 set.

    Raises:
        InputError: A variable is unsupported, or has a value that the adaptation does not have.
    """
    refused(environ)
    found: dict[str, Any] = {}
    read: dict[str, list[str]] = {}  # by variable
    for flag, option in FLAGS.items():
        for name, meanings in option.variables.items():
            read.setdefault(name, []).extend(meanings)
            value = meanings.get(environ.get(name, ""))
            if value is not None:  # two variables add fused operations
                found[flag] = (*found.get(flag, ()), *value) if isinstance(value, tuple) else value
    for name, allowed in read.items():
        if environ.get(name, allowed[0]) not in allowed:
            flags = [flag for flag, option in FLAGS.items() if name in option.variables]
            raise InputError(
                name,
                repr(environ[name]),
                f"must be {join_with_or(allowed)}",
                f"unset it, or use {join_with_or([f'`{flag}`' for flag in flags])}",
            )
    return found


def words(environ: Mapping[str, str] = os.environ) -> FlagNaming:
    """Returns how the command line writes settings, with the variable that may have set each.

    The variable is omitted where a message has another value of the setting than the variable's.
    """

    def setting(name: str, value: str | None) -> str:
        text = COMMAND_LINE_NAMING.format_setting(name, value)
        for variable, meanings in FLAGS[name].variables.items() if name in FLAGS else ():
            meaning = meanings.get(environ.get(variable, ""))
            if meaning is not None and (value is None or _says(meaning, value)):
                return f"{text} (or {variable}={environ[variable]})"
        return text

    return FlagNaming(setting)


def _says(meaning: Any, value: str) -> bool:
    """Returns whether a variable's setting equals or contains a value in a message."""
    if isinstance(meaning, tuple):
        return any(part in meaning for part in value.split(","))
    return str(meaning).lower() == value.lower()


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Returns the folder of randomly initialised demo checkpoints."""
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
