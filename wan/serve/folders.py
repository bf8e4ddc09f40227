"""The folders of jobs: their names, and those that no job needs any more."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

JOB_ID = re.compile(r"video_[\w-]{1,80}", re.ASCII)
UPLOAD = "upload-"
"""What the names of a request's files begin with."""
_TEMPORARY = r"(\.\w+-\d+-)?"
_OUR_FILES = re.compile(
    rf"{_TEMPORARY}(({UPLOAD}\w+|video[.-][^/]*)(/{_TEMPORARY}[\w.]+)?|(thumbnail|spritesheet)\.jpg)"
)
"""Paths in a job's folder that the service writes."""


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
            shutil.rmtree(folder, ignore_errors=True)
