"""Where results go: the video, its JSON record beside it, and latents that survive a failure."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wan import env
from wan.checkpoint.files import read_json
from wan.log import logger
from wan.settings.command import Output
from wan.settings.errors import InputError


def check_writable(path: Path) -> None:
    """The path must name an mp4 in a folder that exists or can be made (where rank 0 runs)."""
    if env.rank() != 0:
        return
    if path.name.lower() == ".mp4":
        raise InputError(f"--save_file {path} has no name before .mp4; add one.")
    if path.suffix.lower() != ".mp4":
        raise InputError(f"--save_file {path} must end in .mp4, the only format written.")
    if path.is_dir():
        raise InputError(f"--save_file {path} is a folder; add a file name.")
    if len(os.fsencode(path.name)) > 200:
        size = len(os.fsencode(path.name))
        raise InputError(f"--save_file has a name of {size} bytes; 200 are allowed: shorten it.")
    record = path.with_suffix(".json")
    if record.exists() and "settings" not in read_json(record):
        raise InputError(
            f"--save_file {path} would replace {record}, which is no record of generate.py; "
            "choose another name."
        )
    _check_folder("--save_file", path, path.absolute().parent)


def check_trace(output: Output, compiled: bool, steps: int) -> None:
    """InputError for a trace that cannot be written, or of what does not happen.

    Args:
        output: What is asked for.
        compiled: --compile.
        steps: Sampling steps.
    """
    asked = {"--trace": output.trace is not None, "--log_level debug": output.log_level == "debug"}
    for flag in (flag for flag, given in asked.items() if given and compiled):
        raise InputError(
            f"{flag} does not work with --compile, whose graphs have no ranges inside; drop one "
            "of them."
        )
    if output.trace_steps is not None and max(output.trace_steps) >= steps:
        raise InputError(
            f"--trace_steps names step {max(output.trace_steps)}, but there are {steps} "
            f"(--sample_steps): 0 to {steps - 1}."
        )
    if output.trace is not None:
        _check_folder("--trace", output.trace, output.trace.absolute())


def _check_folder(flag: str, path: Path, folder: Path) -> None:
    """The folder, or the first one above it that exists, must be writable."""
    while not folder.exists():
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):  # permission bits alone do not tell, nor does root
            pass
    except OSError as error:
        raise InputError(
            f"{flag} {path} cannot be written: {folder} is not a writable folder "
            f"({error.strerror}); choose another one."
        ) from error


@contextmanager
def latents_survive(path: Path | None) -> Iterator[None]:
    """When decoding or writing fails, says where the result of the long part is."""
    try:
        yield
    except BaseException:
        if path is not None:
            command = f"python generate.py --decode_latents {shlex.quote(str(path))}"
            logger.error("The denoised latents are safe in %s; continue with: %s", path, command)
        raise
