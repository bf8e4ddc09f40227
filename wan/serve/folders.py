"""The folders of jobs: their names, and those that no job needs any more."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from wan.output_files import OutputKind

JOB_ID = re.compile(r"video_[\w-]{1,80}", re.ASCII)
UPLOAD = "upload-"
"""What the names of a request's files begin with."""
UPLOADED = OutputKind("a file of this request", lambda _: False)  # its folder is new
_TEMPORARY = r"(\.\w+-\d+-)?"
_OUR_FILES = re.compile(
    rf"{_TEMPORARY}(({UPLOAD}\w+|video[.-][^/]*)(/{_TEMPORARY}[\w.]+)?|(thumbnail|spritesheet)\.jpg)"
)
"""Paths in a job's folder that the service writes."""


def remove_files(folder: Path, keep: Callable[[str], bool] | None = None) -> None:
    """Removes the files of a job's folder that the service and its ranks write.

    Other files stay. Links are removed, not followed.

    Args:
        folder: The folder; it may be absent.
        keep: Returns whether a path in the folder stays; None: the folder is removed, too, unless
            somebody else's files are in it.
    """
    for path in sorted(folder.rglob("*"), reverse=True):  # what is in a folder comes before it
        name = path.relative_to(folder).as_posix()
        if (keep is not None and keep(name)) or not _OUR_FILES.fullmatch(name):
            continue
        with suppress(OSError):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    if keep is None:
        with suppress(OSError):  # it is not empty, or not there
            folder.rmdir()


def remove_orphans(jobs: Path, state_of: Callable[[str], str | None]) -> None:
    """Removes the folders of deleted jobs, and unfinished ones that the journal has no job of.

    A folder with any file that the service does not write is left. One with a finished video and
    its record is left, too, from which its job can be taken up again.

    Args:
        jobs: The folder of the folders.
        state_of: Returns the state of a job by its id, also of a deleted one, or None.
    """
    for folder in jobs.iterdir():
        if folder.is_symlink() or not folder.is_dir() or not JOB_ID.fullmatch(folder.name):
            continue
        state = state_of(folder.name)
        is_finished = all((folder / name).exists() for name in ("video.mp4", "video.json"))
        paths = (path.relative_to(folder).as_posix() for path in folder.rglob("*"))
        is_ours = all(map(_OUR_FILES.fullmatch, paths))
        if state == "deleted" or (state is None and is_ours and not is_finished):
            remove_files(folder)
