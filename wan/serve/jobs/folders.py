"""The journal folder of a service and the folders of its jobs: checks, lock and cleanup."""

from __future__ import annotations

import fcntl
import os
import re
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from wan.settings.errors import InputError
from wan.utils.files import OutputKind, check_folder, check_output, make_json_kind

NAME_LENGTH = 63
"""Maximum length of a replica's name, as in Kubernetes."""
JOB_ID = re.compile(r"video_[\w-]{1,100}", re.ASCII)
UPLOAD_PREFIX = "upload-"
"""Prefix of the names of uploaded files."""
UPLOAD_KIND = OutputKind("a file of this request", lambda _: False)  # the folder is new
_TEMPORARY = r"(\.\w+-\d+-)?"
_JOB_FILES = re.compile(
    rf"{_TEMPORARY}(({UPLOAD_PREFIX}\w+|video[.-][^/]*)(/{_TEMPORARY}[\w.]+)?|(thumbnail|spritesheet)(-\d+)?\.jpg)"
)
"""Paths in a job's folder that the service writes."""


_SERVICE_FILES = (
    *("lock", "front.json", "ranks.log", "ranks.1.log"),
    *(f"journal.sqlite{suffix}" for suffix in ("", "-wal", "-shm", "-journal")),
)
"""Files of the service in the journal folder."""


FRONT_KIND = make_json_kind("the address of a service", "host", "port", "secret")
"""Kind of front.json, from which ranks read the address of the front."""


def make_output_stem(index: int, kind: str = "video") -> str:
    """Returns the name, without suffix, of one of the videos of a job, or of a picture of it."""
    return kind if index == 0 else f"{kind}-{index}"


def list_output_files(index: int) -> tuple[str, ...]:
    """Returns the files of a complete video, the record last."""
    video, *pictures = (make_output_stem(index, k) for k in ("video", "thumbnail", "spritesheet"))
    return (*(f"{picture}.jpg" for picture in pictures), f"{video}.mp4", f"{video}.json")


def check_journal_folder(folder: Path) -> None:
    """Checks that a folder can hold the journal and the jobs; writes nothing.

    Raises:
        InputError: It is not a writable folder, or one of the service's file names is taken.
    """
    remedy = "give another folder"
    check_folder(folder.absolute(), "--journal", folder, remedy)
    for name in ("jobs", *_SERVICE_FILES):
        path = folder / name
        try:
            mode = path.lstat().st_mode
        except OSError:
            continue  # absent
        subject = f"--journal {folder}"
        if stat.S_ISLNK(mode) and name != "jobs":
            raise InputError(subject, None, f"has a symbolic link as its {name}", remedy)
        if not (path.is_dir() if name == "jobs" else stat.S_ISREG(mode)):
            file_type = "folder" if name == "jobs" else "file"
            raise InputError(subject, None, f"has a {name} that is not a {file_type}", remedy)
        if not os.access(path, os.R_OK | os.W_OK):
            raise InputError(subject, None, f"has a {name} that cannot be written", remedy)
    check_output(folder / "front.json", FRONT_KIND, "--journal")


def lock_journal(folder: Path) -> BinaryIO:
    """Locks a journal folder against other services until the returned file is closed.

    Raises:
        InputError: Another service has the lock, or the file `lock` cannot be used.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        lock = os.fdopen(os.open(folder / "lock", flags, 0o644), "rb+", buffering=0)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        why = "is used by a running service"
        raise InputError(f"--journal {folder}", None, why, "give another folder") from error
    except OSError as error:
        why = f"cannot be locked ({error.strerror})"
        raise InputError(f"--journal {folder}", None, why, "give another folder") from error
    return lock


def remove_job_files(folder: Path, keep: Callable[[str], bool] | None = None) -> None:
    """Removes the files that the service and its ranks have written to a job's folder.

    Other files stay. Links are removed, not followed.

    Args:
        folder: May be absent.
        keep: Returns whether a relative path stays; None: all files are removed, and the folder
            with them unless it has other files.
    """
    for path in sorted(folder.rglob("*"), reverse=True):  # content before its folder
        name = path.relative_to(folder).as_posix()
        if (keep is not None and keep(name)) or not _JOB_FILES.fullmatch(name):
            continue
        with suppress(OSError):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    if keep is None:
        with suppress(OSError):  # not empty, or absent
            folder.rmdir()


def remove_orphaned_folders(jobs: Path, state_of: Callable[[str], str | None]) -> None:
    """Removes the folders of deleted jobs and unfinished folders without a job in the journal.

    An unfinished folder stays if it has a file that the service does not write. A folder with the
    record of a finished video stays, so that its job can be restored; the video may be in a store.

    Args:
        jobs: The parent folder.
        state_of: Returns the state of a job, also of a deleted one, by its id; None: no such job.
    """
    for folder in jobs.iterdir():
        if folder.is_symlink() or not folder.is_dir() or not JOB_ID.fullmatch(folder.name):
            continue
        state = state_of(folder.name)
        is_finished = (folder / "video.json").exists()
        paths = (path.relative_to(folder).as_posix() for path in folder.rglob("*"))
        has_only_job_files = all(map(_JOB_FILES.fullmatch, paths))
        if state == "deleted" or (state is None and has_only_job_files and not is_finished):
            remove_job_files(folder)
