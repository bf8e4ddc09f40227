"""Reads the environment variables, except those of `wan.distributed` and the API keys."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from wan.settings.errors import COMMAND_LINE_NAMING, FlagNaming, InputError
from wan.settings.flags import FLAGS
from wan.settings.layers import Layer
from wan.settings.values import expand_home, join_with_or

_UNSUPPORTED_VARIABLES: dict[str, tuple[str | None, str]] = {
    "USE_SUB_HEAD": (
        "0",
        "but groups of heads are an attention mode here; unset it and use `comm_type=1`, which "
        "works head by head",
    ),
    "MINDIE_SD_FA_TYPE": (
        None,
        "by which mindiesd would silently replace the attention kernel; unset it and use "
        "`attention_backend`",
    ),
}
"""Variable -> its value without effect, and the rest of the sentence that refuses others."""


_COUNTS, _INDICES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE"), ("RANK", "LOCAL_RANK")


def world_size(environ: Mapping[str, str] = os.environ) -> int:
    """Returns the number of processes that torchrun started; 1 without torchrun."""
    return _read_rank_count("WORLD_SIZE", 1, environ)


def rank(environ: Mapping[str, str] = os.environ) -> int:
    """Returns the rank of this process; 0 without torchrun."""
    index, num_ranks = _read_rank_index("RANK", environ), world_size(environ)
    if index >= num_ranks:
        raise InputError(
            f"RANK is {index}, but WORLD_SIZE is {num_ranks}, so ranks are 0 to {num_ranks - 1}: "
            "start with torchrun."
        )
    return index


def local_rank(environ: Mapping[str, str] = os.environ) -> int:
    """Returns the rank on this machine, which is also the index of the device."""
    return _read_rank_index("LOCAL_RANK", environ)


def local_world_size(environ: Mapping[str, str] = os.environ) -> int:
    """Returns the number of processes that torchrun started on this machine."""
    return _read_rank_count("LOCAL_WORLD_SIZE", 1, environ)


def node_rank(environ: Mapping[str, str] = os.environ) -> int:
    """Returns the rank of this machine among those of the job."""
    return _read_rank_count("GROUP_RANK", 0, environ)


def simulate_ranks(
    ranks: int, nodes: int = 1, environ: MutableMapping[str, str] = os.environ
) -> None:
    """Sets torchrun's variables as for rank 0, for a process that only checks settings."""
    if ranks > 1:
        counts = dict(zip(_COUNTS, (str(ranks), str(ranks // nodes)), strict=True))
        environ.update(counts | dict.fromkeys(_INDICES, "0"))


def make_rank_environ(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the environment without the variables of `simulate_ranks`, for starting the ranks."""
    return {name: value for name, value in environ.items() if name not in (*_COUNTS, *_INDICES)}


def enable_huge_pages(environ: MutableMapping[str, str] = os.environ) -> None:
    """Lets PyTorch ask for pages of 2 MiB for large tensors in host memory (Linux).

    Page faults took 7 % of a forward on a CPU. PyTorch reads the variable when it allocates its
    first tensor, and has no function for it. A value of the user's is kept.
    """
    environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def find_cpp_compiler(environ: Mapping[str, str] = os.environ) -> str:
    """Returns the command of the C++ compiler, which the variable CXX names as for PyTorch."""
    return environ.get("CXX") or "g++"


def check_environment(environ: Mapping[str, str] = os.environ) -> None:
    """Checks that no unsupported environment variable is set.

    Raises:
        InputError: One is set.
    """
    for name, (harmless_value, remedy) in _UNSUPPORTED_VARIABLES.items():
        if environ.get(name, harmless_value) != harmless_value:
            raise InputError(f"{name} is {environ[name]!r}, {remedy}.")


def read_variables(environ: Mapping[str, str] = os.environ) -> Layer:
    """Reads the settings that environment variables of the Ascend adaptation of Wan2.2 set.

    Raises:
        InputError: A variable is unsupported, or has a value that the adaptation does not have.
    """
    check_environment(environ)
    settings: dict[str, Any] = {}
    allowed_values: dict[str, list[str]] = {}  # by variable
    for flag, option in FLAGS.items():
        for name, meanings in option.variables.items():
            allowed_values.setdefault(name, []).extend(meanings)
            value = meanings.get(environ.get(name, ""))
            if value is not None:  # two variables add fused operations
                settings[flag] = (
                    (*settings.get(flag, ()), *value) if isinstance(value, tuple) else value
                )
    for name, allowed in allowed_values.items():
        if environ.get(name, allowed[0]) not in allowed:
            flags = [flag for flag, option in FLAGS.items() if name in option.variables]
            raise InputError(
                name,
                repr(environ[name]),
                f"must be {join_with_or(allowed)}",
                f"unset it, or use {join_with_or([f'`{flag}`' for flag in flags])}",
            )

    return Layer("environment variables", make_flag_naming(environ), settings)


def make_flag_naming(environ: Mapping[str, str] = os.environ) -> FlagNaming:
    """Returns how the command line writes settings, with the variable that may have set each.

    The variable is omitted where a message has another value of the setting than the variable's.
    """

    def write_setting(name: str, value: str | None) -> str:
        text = COMMAND_LINE_NAMING.format_setting(name, value)
        for variable, meanings in FLAGS[name].variables.items() if name in FLAGS else ():
            meaning = meanings.get(environ.get(variable, ""))
            if meaning is not None and (value is None or _matches_setting_value(meaning, value)):
                return f"{text} (or {variable}={environ[variable]})"
        return text

    return FlagNaming(write_setting)


def _matches_setting_value(meaning: Any, value: str) -> bool:
    """Returns whether a variable's setting equals or contains a value in a message."""
    if isinstance(meaning, tuple):
        return any(part in meaning for part in value.split(","))
    return str(meaning).lower() == value.lower()


def find_cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Returns the folder of randomly initialised demo checkpoints."""
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else expand_home("The cache folder", "~/.cache")) / "wan"


def _read_rank_index(name: str, environ: Mapping[str, str]) -> int:
    if world_size(environ) == 1:
        return 0
    if name not in environ:
        raise InputError(f"WORLD_SIZE is set, but {name} is not: start with torchrun.")
    return _read_rank_count(name, 0, environ)


def _read_rank_count(name: str, minimum: int, environ: Mapping[str, str]) -> int:
    raw = environ.get(name, str(minimum))
    if not raw.isascii() or not raw.isdigit() or int(raw) < minimum:
        raise InputError(
            f"{name} is {raw!r}; it must be a number from {minimum}: start with torchrun."
        )
    return int(raw)
