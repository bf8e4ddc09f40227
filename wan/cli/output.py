"""Checks the files of results in advance, and tells after a failure where the latents are."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wan import env
from wan.checkpoint.files import read_json
from wan.cli.failures import DECODING
from wan.log import logger
from wan.settings.command import Output
from wan.settings.errors import InputError


@contextmanager
def usable_paths() -> Iterator[None]:
    """Refuses a path that the system itself refuses: too long, not permitted, a broken disk."""
    try:
        yield
    except OSError as error:
        what = "A path" if error.filename is None else os.fsdecode(error.filename)
        why = f"cannot be used ({error.strerror or error})"
        raise InputError(what, why=why, remedy="give another one") from error


def check_current_folder() -> None:
    """Checks, on rank 0, that a video without a name of its own can be written here.

    Raises:
        InputError: The current folder is not there any more, or cannot be written.
    """
    try:
        folder = Path.cwd()
    except FileNotFoundError as error:
        remedy = "change into one that does"
        raise InputError("The current folder", why="does not exist", remedy=remedy) from error
    if env.rank() == 0:
        _check_folder("The current folder", folder, folder, "give a `save_file` elsewhere")


@usable_paths()
def check_writable(path: Path) -> None:
    """Checks, on rank 0, that a path names an mp4 in a folder that exists or can be made.

    Raises:
        InputError: It does not, or the JSON file beside it is not a record of a run.
    """
    if env.rank() != 0:
        return
    flag = "`save_file`"
    if path.name.lower() == ".mp4":
        raise InputError(flag, path, "has no name before .mp4", "add one")
    if path.suffix.lower() != ".mp4":
        raise InputError(flag, path, "must end in .mp4, the only format written")
    if (size := len(os.fsencode(path.name))) > 200:
        raise InputError(flag, None, f"has a name of {size} bytes; 200 are allowed", "shorten it")
    if path.is_dir():
        raise InputError(flag, path, "is a folder", "add a file name")
    record = path.with_suffix(".json")
    if record.exists() and "settings" not in read_json(record):
        why = f"would replace {record}, which is no record of generate.py"
        raise InputError(flag, path, why, "choose another name")
    _check_folder(flag, path, path.absolute().parent)


def check_trace(output: Output, compiled: bool, steps: int) -> None:
    """Checks that what `trace` and `log_level=debug` ask for exists and can be written.

    Args:
        output: The output settings.
        compiled: Whether blocks are compiled.
        steps: The number of sampling steps.

    Raises:
        InputError: It does not exist, or cannot be written.
    """
    asked = {"`trace`": output.trace is not None, "`log_level=debug`": output.log_level == "debug"}
    for setting in (setting for setting, given in asked.items() if given and compiled):
        why = "does not work with `compile`, whose graphs have no ranges inside"
        raise InputError(setting, None, why, "drop one of them")
    if output.trace_steps is not None and max(output.trace_steps) >= steps:
        why = f"names step {max(output.trace_steps)}, but there are {steps} (`sample_steps`)"
        raise InputError("`trace_steps`", None, f"{why}: 0 to {steps - 1}")
    if output.trace is not None:
        _check_folder("`trace`", output.trace, output.trace.absolute())


def _check_folder(flag: str, path: Path, folder: Path, remedy: str = "choose another one") -> None:
    """Checks that the folder, or the first one above it that exists, is writable."""
    while not folder.exists():
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):  # permission bits alone do not tell, nor does root
            pass
    except OSError as error:
        why = f"cannot be written: {folder} is not a writable folder ({error.strerror})"
        raise InputError(flag, path, why, remedy) from error


@contextmanager
def latents_survive(path: Path | None) -> Iterator[None]:
    """Says where the denoised latents are when decoding or writing fails."""
    try:
        yield
    except BaseException as error:
        error.add_note(DECODING)
        if path is not None:
            command = f"python generate.py --decode_latents {shlex.quote(str(path))}"
            logger.error("The denoised latents are safe in %s; continue with: %s", path, command)
        raise
