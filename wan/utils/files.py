"""Writes, replaces and removes output files atomically.

All programs of this repository write their results with these functions. An existing file is
replaced or removed only if it is empty or its content is recognised as an earlier output of the
same kind. Symbolic links, devices and pipes are refused, as are devices and pipes given as input
files (`open_regular_file`).
"""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import shutil
import stat
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from wan.settings.errors import InputError, WriteError
from wan.settings.values import format_value

_MAX_JSON = 512 << 20  # bytes; traces of many steps can exceed 100 MB
_HEAD_BYTES = 4096  # bytes in which a text or picture has its marker
_MAX_INDEX = 64 << 20  # bytes of an mp4's moov atom or of a safetensors header
_COMMENT_PREFIXES = ('{"wan": ', '{"task": ')  # of mp4 comments; the second one up to version 0.4.0


@dataclass(frozen=True)
class OutputKind:
    """A kind of file that a program of this repository writes.

    Attributes:
        name: The kind with its article, for sentences: "a record of generate.py".
        matches: Returns whether a regular file's content is of this kind; may raise OSError or
            ValueError if not.
    """

    name: str
    matches: Callable[[Path], bool]


def make_json_kind(name: str, *keys: str) -> OutputKind:
    """Returns the kind of a JSON object with all these keys, or of a list of such objects."""

    def matches(path: Path) -> bool:
        if path.stat().st_size > _MAX_JSON:
            return False
        content: Any = json.loads(path.read_bytes())
        objects = content if isinstance(content, list) and content else [content]
        return all(isinstance(item, dict) and {*keys} <= item.keys() for item in objects)

    return OutputKind(name, matches)


def make_marked_kind(name: str, marker: bytes) -> OutputKind:
    """Returns the kind of a file with these bytes among its first 4096."""

    def matches(path: Path) -> bool:
        with path.open("rb") as file:
            return marker in file.read(_HEAD_BYTES)

    return OutputKind(name, matches)


def make_safetensors_kind(name: str, *keys: str) -> OutputKind:
    """Returns the kind of a safetensors file whose metadata has all these keys."""

    def matches(path: Path) -> bool:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header: Any = json.loads(file.read(size)) if size <= _MAX_INDEX else None
        metadata = header.get("__metadata__") if isinstance(header, dict) else None
        return isinstance(metadata, dict) and {*keys} <= metadata.keys()

    return OutputKind(name, matches)


def _is_generated_video(path: Path) -> bool:
    """Returns whether an mp4's comment begins like those of generate.py."""
    moov = _read_moov_atom(path)
    _, _, item = moov.partition(b"\xa9cmt")
    # The item's one atom: its length, "data", a type and a language, and the text.
    return item[4:8] == b"data" and item[16:32].startswith(
        tuple(prefix.encode() for prefix in _COMMENT_PREFIXES)
    )


def _read_moov_atom(path: Path) -> bytes:
    """Returns the content of an mp4's moov atom; b"" without one."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        start = 0
        while start + 8 <= end:
            file.seek(start)
            size, atom_type = struct.unpack(">I4s", file.read(8))
            if size == 1:  # a length of 64 bits follows
                (size,) = struct.unpack(">Q", file.read(8))
            size = end - start if size == 0 else size
            if atom_type == b"moov" and size <= _MAX_INDEX:
                return file.read(size - 8)
            if size < 8:
                break
            start += size
    return b""


VIDEO_KIND = OutputKind("a video of generate.py", _is_generated_video)
RECORD_KIND = make_json_kind("a record of generate.py", "settings", "versions")
LATENTS_KIND = make_safetensors_kind("latents of generate.py", "settings")
KERNEL_TRACE_KIND = make_json_kind("a kernel trace of generate.py --trace_kernels", "traceEvents")
PREVIEW_MARKER = b"preview of generate.py"  # in the comment of the JPEG
PREVIEW_KIND = make_marked_kind("a preview of generate.py", PREVIEW_MARKER)
SUMMARY_KIND = make_json_kind(
    "a summary of generate.py --prompt_file", "made", "there already", "go on with"
)


def is_output(path: Path, kind: OutputKind) -> bool:
    """Returns whether a path is a regular file (no link) of an output kind."""
    try:
        return stat.S_ISREG(path.lstat().st_mode) and kind.matches(path)
    except (OSError, ValueError, RecursionError, struct.error):
        return False


def _find_output_conflict(path: Path, kind: OutputKind) -> str | None:
    """Returns the reason why a path cannot be written, as a predicate; None if it can."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):  # `check_folder` checks the folders
        return None
    except OSError as error:
        return f"cannot be used ({error.strerror})"
    if stat.S_ISLNK(status.st_mode):
        return "is a symbolic link, which would be replaced"
    if stat.S_ISDIR(status.st_mode):
        return "is a folder"
    if not stat.S_ISREG(status.st_mode):
        return "is a device, a pipe or a socket"
    if not status.st_size or is_output(path, kind):
        return None
    return f"exists and is not {kind.name}"


def check_output(path: Path, kind: OutputKind, setting: str) -> None:
    """Checks that `write_output` can write a path.

    Args:
        setting: Name of the path in the error message.

    Raises:
        InputError: The path is a link, a folder, a special file or a file of another kind, or its
            folder cannot be created.
    """
    why = _find_output_conflict(path, kind)
    if why is not None:
        remedy = "give another name" + (", or move it away" if path.is_file() else "")
        raise InputError(setting, path, why, remedy)
    check_folder(path.absolute().parent, setting, path)


def check_output_folder(folder: Path, kinds: dict[str, OutputKind], setting: str) -> None:
    """Checks that a folder of output files is absent, empty, or holds earlier outputs.

    Args:
        kinds: File name pattern (`*`, `?`) -> kind of the files that match it.
        setting: Name of the folder in the error message.

    Raises:
        InputError: The path is a link or a file, a file that matches a pattern is of another kind,
            or the folder has files and none matches.
    """
    remedy = "give another name, or move it away"
    if folder.is_symlink():
        raise InputError(setting, folder, "is a symbolic link", remedy)
    if not folder.exists():
        return
    if not folder.is_dir():
        raise InputError(setting, folder, "exists and is no folder", remedy)
    entries = [path for path in folder.iterdir() if not is_temporary(path)]
    num_outputs = 0
    for pattern, kind in kinds.items():
        for path in entries:
            if path.match(pattern):
                if (why := _find_output_conflict(path, kind)) is not None:
                    raise InputError(setting, path, why, remedy)
                num_outputs += 1
    if entries and not num_outputs:
        why = f"exists and holds files of somebody else, such as {entries[0].name}"
        raise InputError(setting, folder, why, remedy)


def check_folder(
    folder: Path, setting: str, path: Path, remedy: str = "choose another one"
) -> None:
    """Checks that files can be written in a folder.

    Args:
        folder: The folder. If it does not exist, its first existing parent is checked.
        setting: Name of the path in the error message.
        path: The path in the error message.

    Raises:
        InputError: A file cannot be created there, or a missing folder's name is too long.
    """
    missing = []
    while not os.path.lexists(folder):
        missing.append(folder.name)
        folder = folder.parent
    try:
        longest = os.pathconf(folder, "PC_NAME_MAX")
        if any(len(os.fsencode(name)) > longest for name in missing):
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        # Permission bits do not suffice (read-only file systems, ACLs); a link may be broken.
        file, probe = tempfile.mkstemp("-probe", f".{make_process_name()}-", folder)
    except OSError as error:
        why = f"cannot be written: {folder} is not a writable folder ({error.strerror})"
        raise InputError(setting, path, why, remedy) from error
    os.close(file)
    os.unlink(probe)


@contextmanager
def write_output(
    path: Path, kind: OutputKind, finalize: Callable[[Path], object] | None = None
) -> Iterator[Path]:
    """Yields a temporary name that becomes `path` when the block ends without an error.

    The name is absolute and hidden and has the suffix of `path`; missing folders are created. After
    an error, Ctrl-C included, the temporary file is removed and `path` is unchanged.

    Args:
        kind: Kind of the file; `check_output` checks in advance whether `path` can be replaced.
        finalize: Moves the complete temporary file to its final name, by default to `path`.

    Raises:
        WriteError: `path` exists and is of another kind.
    """
    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{make_process_name()}-{path.name}")
    with suppress(FileNotFoundError):  # of a killed process with the same PID
        temporary.unlink()
    create_file(temporary)
    try:
        yield temporary
        if finalize is None:
            replace_output(temporary, path, kind)
        else:
            finalize(temporary)
    finally:
        temporary.unlink(missing_ok=True)


def create_file(path: Path) -> None:
    """Creates an empty file; an existing file or link of that name is an OSError."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))


def replace_output(temporary: Path, path: Path, kind: OutputKind) -> None:
    """Renames a complete temporary file; raises WriteError if another kind of file has the name."""
    why = _find_output_conflict(path, kind)
    if why is not None:
        raise WriteError(f"{path} could not be written: it {why}; move it away.")
    temporary.replace(path)


def move_to_free_name(temporary: Path, path: Path) -> Path:
    """Renames a complete temporary file to a name that does not exist, and returns that name.

    It is `path`, or the first free one of `iterate_numbered_paths`.
    """
    for name in iterate_numbered_paths(path):
        try:
            os.link(temporary, name)
            temporary.unlink()
            break
        except FileExistsError:
            continue
        except OSError:  # a file system without hard links
            if not os.path.lexists(name):
                temporary.replace(name)
                break
    return name


def remove_output(path: Path, kind: OutputKind) -> bool:
    """Removes a file if it is of an output kind, and returns whether it did."""
    if not is_output(path, kind):
        return False
    path.unlink(missing_ok=True)
    return True


def iterate_numbered_paths(path: Path) -> Iterator[Path]:
    """Yields a path, then the same with -2, -3, ... appended to its stem."""
    yield path
    for number in count(2):
        yield path.with_stem(f"{path.stem}-{number}")


@contextmanager
def write_folder(path: Path) -> Iterator[Path]:
    """Yields a temporary folder that becomes `path` when the block ends without an error.

    Raises:
        InputError: `path` is a link, the current folder, or exists and is not an empty folder.
    """
    if path.is_symlink():
        raise InputError(f"{path}", None, "is a symbolic link", "name a new folder")
    if path.exists() and path.samefile(Path.cwd()):
        raise InputError(f"{path}", None, "is the current folder", "name a new one")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        remedy = "name another folder or remove it"
        raise InputError(f"{path}", None, "exists and is not empty", remedy)
    path = path.absolute()
    temporary = path.with_name(f".{make_process_name()}-{path.name}")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        temporary.rename(path)
    except BaseException:  # also Ctrl-C
        shutil.rmtree(temporary)
        raise


def check_input_file(setting: str, path: Path, remedy: str) -> None:
    """Refuses a path of an input that is no file, is empty or cannot be read.

    Args:
        setting: Name of the path in the error message.
        remedy: For the InputError, such as "give an mp4".
    """
    try:
        if not path.exists():
            if re.match(r"([a-z][a-z0-9+.-]+:/|data:)", str(path), re.IGNORECASE):
                raise InputError(setting, None, "takes a file, not an address", "download it first")
            raise InputError(setting, path, "does not exist", remedy)
        if not path.is_file():
            raise InputError(setting, path, "is not a file", remedy)
        if not path.stat().st_size:
            raise InputError(setting, path, "is empty (0 bytes)", remedy)
        with path.open("rb"):
            pass
    except OSError as error:
        why = f"cannot be used ({error.strerror or error})"
        # The name may be too long to print.
        raise InputError(setting, format_value(path, str), why, remedy) from error


def find_link_error(path: Path) -> InputError | None:
    """Returns the refusal of a path that is, or contains, a link to nothing; else None."""
    if os.path.exists(path):
        return None
    for link in (path, *path.parents):
        if os.path.islink(link) and not os.path.exists(link):
            why = f"is a link to {os.readlink(link)}, which does not exist"
            remedy = "download what it stands for again, or remove the link"
            return InputError(f"{link}", None, why, remedy)
    return None


def check_link(path: Path) -> None:
    """Refuses a path that is, or contains, a link to nothing."""
    if (error := find_link_error(path)) is not None:
        raise error


def has_file(path: Path) -> bool:
    """Returns whether a path is a file; InputError for a link to nothing."""
    check_link(path)
    return path.is_file()


def has_folder(path: Path) -> bool:
    """Returns whether a path is a folder; InputError for a link to nothing."""
    check_link(path)
    return path.is_dir()


@contextmanager
def open_regular_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a regular file; devices and pipes are refused, since reading them may not end."""
    check_link(path)
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise InputError(f"{path}", None, "is not a regular file", "give another one")
        with path.open("rb") as file:
            yield file
    except OSError as error:
        why = f"cannot be read ({error.strerror or error})"
        raise InputError(f"{path}", None, why, "check the file") from None


def make_process_name() -> str:
    """Returns `host-pid`, which is unique among machines that share a folder."""
    host = re.sub(r"\W+", "_", platform.node())[:30]
    return f"{host or 'host'}-{os.getpid()}"


def is_temporary(path: Path) -> bool:
    """Returns whether a path is a temporary file of any process."""
    return re.match(r"\.\w+-\d+-", path.name) is not None


def has_process_ended(name: str) -> bool:
    """Returns whether a process of this machine, named by `make_process_name`, has ended."""
    host, _, pid = name.rpartition("-")
    if not pid.isdecimal() or host != make_process_name().rpartition("-")[0]:
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (OverflowError, PermissionError):
        pass
    return False
