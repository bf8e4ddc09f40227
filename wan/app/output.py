"""Checks output paths before a run, names unfinished files, and removes those of killed runs."""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from wan.app.clip_store import CLIP_KINDS, NUMBERED_SAFETENSORS
from wan.app.failures import DECODING_NOTE, refuse_unusable_paths
from wan.app.run import InputFile, Run
from wan.metering.exchange_order import TRACE_KIND, make_trace_path
from wan.settings.command import Output
from wan.settings.errors import InputError
from wan.utils import env
from wan.utils.files import (
    KERNEL_TRACE_KIND,
    LATENTS_KIND,
    PREVIEW_KIND,
    RECORD_KIND,
    VIDEO_KIND,
    check_folder,
    check_output,
    check_output_folder,
    has_process_ended,
    make_process_name,
    remove_output,
)
from wan.utils.log import logger


def check_current_folder() -> None:
    """Checks, on rank 0, that a video without `save_file` can be written to the current folder.

    Raises:
        InputError: The current folder does not exist any more, or is not writable.
    """
    try:
        folder = Path.cwd()
    except FileNotFoundError as error:
        remedy = "change into one that does"
        raise InputError("The current folder", why="does not exist", remedy=remedy) from error
    if env.rank() == 0:
        check_folder(folder, "The current folder", folder, "give a `save_file` elsewhere")


@refuse_unusable_paths()
def check_video_path(path: Path) -> None:
    """Checks, on rank 0, that a video and its record can be written.

    Raises:
        InputError: The path does not end in .mp4, its folder cannot be created, or an existing file
            is not an output of generate.py.
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
    check_output(path, VIDEO_KIND, flag)
    check_output(path.with_suffix(".json"), RECORD_KIND, flag)


@refuse_unusable_paths()
def check_run_outputs(run: Run) -> None:
    """Checks, on rank 0, all files and folders that are named after the video.

    Raises:
        InputError: A path cannot be written, or is not an output of generate.py.
    """
    output = run.output
    check_video_path(output.save_file)
    if env.rank() != 0:
        return
    if output.save_latents:
        check_output(output.latents_path, LATENTS_KIND, "`save_latents`")
    if output.save_latents == "steps":
        check_output_folder(
            output.steps_dir, {NUMBERED_SAFETENSORS: LATENTS_KIND}, "`save_latents`"
        )
    if run.params.preview:
        check_output(output.preview_path, PREVIEW_KIND, "`preview`")
    if output.stream:
        check_output(output.stream_path, VIDEO_KIND, "`stream`")
    if run.params.task.count_clips(run.params):
        check_output_folder(output.clips_dir, CLIP_KINDS, "`save_file`")
    replaced_file = find_replaced_input(run, index_input_files(run.input_files))
    if replaced_file is not None:
        why = "would be replaced by an output of this run"
        remedy = "choose another `save_file`"
        raise InputError(f"`{replaced_file.setting}`", replaced_file.path, why, remedy)


FileId = tuple[int, int]
"""Device and inode of a file: equal for all links to it."""


def index_input_files(input_files: Iterable[InputFile]) -> dict[FileId, InputFile]:
    """Indexes input files by their identity and by that of their folder."""
    files: dict[FileId, InputFile] = {}
    for input_file in input_files:
        path = input_file.path.resolve()
        for status in (path.stat(), path.parent.stat()):
            files.setdefault((status.st_dev, status.st_ino), input_file)
    return files


def find_replaced_input(run: Run, input_files: Mapping[FileId, InputFile]) -> InputFile | None:
    """Finds an input file that an output of the run would replace or remove; None if none is."""
    output = run.output
    outputs = [output.save_file, output.record_path]
    if output.save_latents:
        outputs += [output.latents_path, output.steps_dir]
    if run.params.preview:
        outputs.append(output.preview_path)
    if output.stream:
        outputs.append(output.stream_path)
    if run.params.task.count_clips(run.params):
        outputs.append(output.clips_dir)
    for path in outputs:
        with suppress(OSError):  # it does not exist
            status = path.stat()
            if (status.st_dev, status.st_ino) in input_files:
                return input_files[status.st_dev, status.st_ino]
    return None


def check_trace_options(output: Output, compiled: bool, steps: int) -> None:
    """Checks `trace` and `log_level=debug`: no compiled blocks, valid steps, writable files.

    Args:
        compiled: Whether blocks are compiled.
        steps: The number of sampling steps.

    Raises:
        InputError: A step does not exist, a file cannot be written, or blocks are compiled.
    """
    ranged_features = {
        "`trace`": output.trace is not None,
        "`log_level=debug`": output.log_level == "debug",
    }
    for setting in (setting for setting, is_set in ranged_features.items() if is_set and compiled):
        why = "does not work with `compile`, whose graphs contain no spans"
        raise InputError(setting, None, why, "drop one of them")
    if output.trace_steps is not None and max(output.trace_steps) >= steps:
        why = f"names step {max(output.trace_steps)}, but there are {steps} (from `sample_steps`)"
        raise InputError("`trace_steps`", None, f"{why}: 0 to {steps - 1}")
    if output.trace is not None:
        check_folder(output.trace.absolute(), "`trace`", output.trace)
        check_output(make_trace_path(output.trace, env.rank()), TRACE_KIND, "`trace`")
        for path in output.trace.glob(f"rank{env.rank()}.step*.kernels.json"):
            check_output(path, KERNEL_TRACE_KIND, "`trace`")


@contextmanager
def report_saved_latents(path: Path | None) -> Iterator[None]:
    """Logs the path of the denoised latents when decoding or writing fails."""
    try:
        yield
    except BaseException as error:
        error.add_note(DECODING_NOTE)
        if path is not None:
            command = f"python generate.py --decode_latents {shlex.quote(str(path))}"
            logger.error("The denoised latents are safe in %s; continue with: %s", path, command)
        raise


def make_unfinished_paths(output: Output, suffix: str) -> tuple[Path, Path]:
    """Returns paths unique to this run, in the video's folder and in the temporary folder."""
    sibling = output.save_file.with_suffix(f".{make_process_name()}{suffix}")
    return sibling, Path(tempfile.gettempdir()) / sibling.name


def write_to_first_path(
    paths: Iterable[Path], write: Callable[[Path], None], kind: str
) -> Path | None:
    """Writes to the first writable path and returns it; logs failures; None if all fail."""
    for path in paths:
        try:
            write(path)
            return path
        except OSError as error:
            text = "The %s could not be saved to %s (%s)."
            logger.error(text, kind, path, error.strerror or error)
    return None


def remove_stale_files(run: Run) -> None:
    """Removes the temporary files of killed runs of a complete video.

    A hidden file, which may be incomplete, is removed if its name contains an ended process. A
    latents file must also have the content of one, and must not be an input of this video.
    """
    inputs = {f.path.resolve() for f in run.input_files if f.setting != "decode_latents"}
    path = run.output.save_file.absolute()
    stem, process_pattern = re.escape(path.stem), r"([\w]+-\d+)"
    hidden = re.compile(
        rf"\.{process_pattern}-{stem}\.((sound\.)?mp4|json|preview\.jpg|\S+\.latents\.safetensors)"
    )
    latents = re.compile(rf"{stem}\.{process_pattern}\.latents\.safetensors")
    for stale_file in path.parent.iterdir():
        match = hidden.fullmatch(stale_file.name)
        if match is not None and has_process_ended(match[1]) and stale_file.is_file():
            stale_file.unlink(missing_ok=True)
        elif (
            (match := latents.fullmatch(stale_file.name)) is None
            or stale_file.resolve() in inputs
            or not has_process_ended(match[1])
            or not remove_output(stale_file, LATENTS_KIND)
        ):
            continue
        logger.info("Removed %s, left by a killed run.", stale_file)
