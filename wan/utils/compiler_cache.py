"""The folder in which PyTorch's compilers keep code: nobody but the user can write in it.

PyTorch's default is a predictable name in the temporary folder, and what lies there is loaded:
libraries, Python modules, pickles, precompiled headers. Whoever makes that folder first runs code
as this user.
"""

from __future__ import annotations

import errno
import grp
import hashlib
import os
import pwd
import stat
import tempfile
from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from pathlib import Path

from wan.settings.errors import InputError
from wan.utils.env import find_cache_dir
from wan.utils.log import logger
from wan.utils.system import read_cpu_features

_INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
_SUBFOLDERS = {"TRITON_CACHE_DIR": "triton", "TORCH_EXTENSIONS_DIR": "extensions"}
"""Variables of other compilers' folders, and the names of their folders in that of Inductor."""
_REFUSED: dict[str, tuple[str, str]] = {}
"""Folder that Inductor's variable names instead -> the refused folder, and why it was refused."""
_TEMPORARY_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []
_MAX_LINKS = 40  # in one path, as in Linux
_REMEDY = "name a folder in which only you can write"


def prepare_compiler_cache(environ: MutableMapping[str, str] = os.environ) -> Path:
    """Sets the variables of the compilers' folders, and returns Inductor's.

    A folder that a variable names is used if only the user can write in it. Without the variable it
    is in the user's cache folder, and where that cannot be used, in a new temporary folder.

    Raises:
        InputError: The folder of Inductor's variable cannot be used, or others can write in it. The
            variable then names a new folder, since torch uses it even if nothing is compiled.
    """
    named_folder = environ.get(_INDUCTOR, "")
    refused, problem = _REFUSED.get(named_folder, ("", None))
    if problem is not None:
        folder = Path(named_folder)
    elif not named_folder or _is_default_of_torch(named_folder):
        folder = _make_default_folder(environ)
    else:
        folder = Path(named_folder).absolute()
        refused, problem = named_folder, _make_private_folder(folder)
        if problem is not None:
            folder = _make_temporary_folder()
            _REFUSED[str(folder)] = refused, problem
    environ[_INDUCTOR] = str(folder)
    for variable, name in _SUBFOLDERS.items():
        other_folder = environ.get(variable, "")
        if not other_folder:
            environ[variable] = str(folder / name)
        elif (other_problem := _make_private_folder(Path(other_folder).absolute())) is not None:
            environ[variable] = str(folder / name)
            logger.warning("%s %s %s; it is not used.", variable, other_folder, other_problem)
    if problem is not None:
        raise InputError(_INDUCTOR, refused, problem, f"unset it, or {_REMEDY}")
    return folder


def _is_default_of_torch(folder: str) -> bool:
    """Whether torch has set the variable, which it does when a part of it is imported."""
    path = Path(folder)
    return path.name.startswith("torchinductor_") and path.parent == Path(tempfile.gettempdir())


def _make_default_folder(environ: MutableMapping[str, str]) -> Path:
    """Makes a folder in the user's cache folder, else a temporary one.

    Compiled code has the instructions of this CPU, and machines may share a home.
    """
    name = f"compiled-{hashlib.sha256(read_cpu_features().encode()).hexdigest()[:8]}"
    with suppress(RuntimeError):  # there is no home
        folder = find_cache_dir(environ).absolute() / name
        if (problem := _make_private_folder(folder)) is None:
            return folder
        logger.info("Compiled code is not kept for the next run: %s %s.", folder, problem)
    return _make_temporary_folder()


def _make_temporary_folder() -> Path:
    """Makes a folder that is removed when this process ends."""
    try:
        temporary = tempfile.TemporaryDirectory(prefix="wan-compiled-", ignore_cleanup_errors=True)
    except OSError as error:
        why = f"cannot be made ({error.strerror})"
        raise InputError("A folder for compiled code", None, why, _REMEDY) from error
    _TEMPORARY_FOLDERS.append(temporary)
    folder = Path(temporary.name).absolute()
    if (problem := _find_problem(folder)) is not None:
        raise InputError(f"{folder}", None, problem, _REMEDY)
    return folder


def _make_private_folder(folder: Path) -> str | None:
    """Makes a folder for the user alone; returns why it cannot be used, or None if it can."""
    try:
        for path in (*reversed(folder.parents), folder):
            if not path.exists():
                with suppress(FileExistsError):  # another rank was faster, or a link is broken
                    path.mkdir(0o700)
        problem = _find_problem(folder)
        is_writable = os.access(folder, os.W_OK | os.X_OK)
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        return f"cannot be used ({getattr(error, 'strerror', None) or error})"
    return problem if problem is not None or is_writable else "cannot be written"


def _find_problem(folder: Path) -> str | None:
    """Returns who else can change a folder, one of its parents or its content; None: nobody."""
    *parents, (real_folder, status) = _iterate_components(folder)
    if not stat.S_ISDIR(status.st_mode):
        return "is no folder"
    if problem := _describe_access(status):
        return problem
    for path, parent_status in parents:
        # In a sticky folder, nobody can replace what belongs to somebody else.
        is_harmless = stat.S_ISLNK(parent_status.st_mode) or parent_status.st_mode & stat.S_ISVTX
        if problem := _describe_access(parent_status, checks_mode=not is_harmless):
            return f"lies behind {path}, which {problem}"
    is_open, folders = bool(status.st_mode & 0o011), [real_folder]
    while folders:
        entries = list[os.DirEntry[str]]()
        with suppress(FileNotFoundError):  # another rank has removed the folder
            entries += os.scandir(folders.pop())
        for entry in entries:
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                checks_mode = is_open and not stat.S_ISLNK(status.st_mode)
                if problem := _describe_access(status, checks_mode=checks_mode):
                    return f"holds {entry.name}, which {problem}"
                if stat.S_ISDIR(status.st_mode):
                    folders.append(Path(entry.path))
    return None


def _iterate_components(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yields the folders and links from the root to a path, and the targets of links; last the end.

    Raises:
        OSError: One does not exist, or there are too many links.
    """
    current, names, num_links = Path(path.anchor), [*path.parts[1:]], 0
    yield current, current.lstat()
    while names:
        name = names.pop(0)
        if name == "..":
            current = current.parent
            continue
        status = (current / name).lstat()
        yield current / name, status
        if not stat.S_ISLNK(status.st_mode):
            current /= name
            continue
        target, num_links = Path(os.readlink(current / name)), num_links + 1
        if num_links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        current = Path(target.anchor) if target.is_absolute() else current
        names = [*target.parts[bool(target.anchor) :], *names]
    yield current, current.lstat()


def _describe_access(status: os.stat_result, checks_mode: bool = True) -> str | None:
    """Returns why others than the user and root can change a file or folder; None if they cannot.

    A group in which the user is alone may write: many systems give each user one.
    """
    if status.st_uid not in (0, os.geteuid()):
        return "belongs to another user"
    if not checks_mode or not status.st_mode & 0o022:
        return None
    if status.st_mode & 0o002 or not _is_own_group(status.st_gid):
        return "can be written by others"
    return None


def _is_own_group(group_id: int) -> bool:
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(group_id)
    except KeyError:
        return False
    return (
        user.pw_gid == group_id
        and group.gr_name == user.pw_name
        and not {*group.gr_mem} - {user.pw_name}
    )
