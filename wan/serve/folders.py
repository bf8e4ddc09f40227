"""The folder of a service and those of its jobs: their names, and what no job needs any more."""

from __future__ import annotations

import fcntl
import os
import re
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from wan.output_files import OutputKind, check_folder, check_output, json_kind
from wan.settings.errors import InputError

NAME_LENGTH = 63
"""Characters of a replica's name, as Kubernetes allows them."""
JOB_ID = re.compile(r"video_[\w-]{1,100}", re.ASCII)
UPLOAD = "upload-"
"""What the names of a request's files begin with."""
UPLOADED = OutputKind("a file of this request", lambda _: False)  # its folder is new
_TEMPORARY = r"(\.\w+-\d+-)?"
_OUR_FILES = re.compile(
    rf"{_TEMPORARY}(({UPLOAD}\w+|video[.-][^/]*)(/{_TEMPORARY}[\w.]+)?|(thumbnail|spritesheet)\.jpg)"
)
"""Paths in a job's folder that the service writes."""


_OWN_FILES = (
    *("lock", "front.json", "ranks.log", "ranks.1.log", "reserve"),
    *(f"journal.sqlite{end}" for end in ("", "-wal", "-shm", "-journal")),
)
"""Files of the service in the folder of its journal."""


FRONT = json_kind("the address of a service", "host", "port", "secret")
"""Where ranks find their service: front.json in its folder."""


def check_journal(folder: Path) -> None:
    """Refuses a folder in which the service could not keep its jobs. Makes nothing.

    Raises:
        InputError: It is no folder, cannot be written, or has something else under a name of ours.
    """
    other = "give another folder"
    check_folder(folder.absolute(), "--journal", folder, other)
    for name in ("jobs", *_OWN_FILES):
        path = folder / name
        try:
            mode = path.lstat().st_mode
        except OSError:
            continue  # it is not there
        what = f"--journal {folder}"
        if stat.S_ISLNK(mode) and name != "jobs":
            raise InputError(what, None, f"has a symbolic link as its {name}", other)
        if not (path.is_dir() if name == "jobs" else stat.S_ISREG(mode)):
            kind = "folder" if name == "jobs" else "file"
            raise InputError(what, None, f"has a {name} that is no {kind}", other)
        if not os.access(path, os.R_OK | os.W_OK):
            raise InputError(what, None, f"has a {name} that cannot be written", other)
    check_output(folder / "front.json", FRONT, "--journal")


def lock_journal(folder: Path) -> BinaryIO:
    """Returns a file that keeps other services from a folder until it is closed.

    Raises:
        InputError: Another service has it, or its file cannot be used.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        lock = os.fdopen(os.open(folder / "lock", flags, 0o644), "rb+", buffering=0)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        why = "belongs to a service that runs"
        raise InputError(f"--journal {folder}", None, why, "give another folder") from error
    except OSError as error:
        why = f"cannot be locked ({error.strerror})"
        raise InputError(f"--journal {folder}", None, why, "give another folder") from error
    return lock


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
