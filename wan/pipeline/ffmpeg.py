"""Starts ffmpeg, and names the files that it reads and writes.

Every path reaches ffmpeg as `file:` and an absolute path, so that no name is an address, an option
or a pattern, and a file cannot make ffmpeg open another file or an address.

Torch is not imported with this file, because bad files are refused before it is.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from wan.settings.errors import InputError
from wan.settings.values import shown

_FORMATS = (
    *("aac", "ac3", "aiff", "amr", "asf", "au", "avi", "caf", "eac3", "flac", "flv", "gif"),
    *("m4v", "matroska", "mov", "mp3", "mp4", "mpeg", "mpegts", "mxf", "nut", "ogg", "rm"),
    *("w64", "wav", "webm", "wv", "yuv4mpegpipe"),
)


def build_input_args(path: Path) -> list[str]:
    """Returns the arguments for an input file; playlists and scripts are not among its formats."""
    lists = ["-protocol_whitelist", "file,pipe", "-format_whitelist", ",".join(_FORMATS)]
    return [*lists, "-i", _file_url(path)]


def build_clock_args(path: Path, streams: str) -> list[str]:
    """Returns a second output, which reads streams only for their time stamps.

    ffmpeg counts the time of MPEG streams from the first stream in use, not from the file's first.

    Args:
        path: The input file.
        streams: The others of its streams, such as "0:v?".
    """
    with path.open("rb") as file:
        head = file.read(8)
    is_mpeg = head[:1] == b"G" or head[4:5] == b"G" or head[:4] == b"\0\0\1\xba"
    return ["-map", streams, "-c", "copy", "-f", "null", "-"] if is_mpeg else []


def build_concat_args() -> list[str]:
    """Returns the arguments for mp4 files in the folder of the process, listed on its stdin."""
    lists = ["-protocol_whitelist", "file,pipe", "-format_whitelist", "concat,mov"]
    return [*lists, "-f", "concat", "-safe", "0", "-i", "pipe:0"]


def build_output_args(path: Path) -> list[str]:
    """Returns the arguments for an mp4 that is written or overwritten, its index in front."""
    return ["-movflags", "+faststart", "-f", "mp4", "-y", _file_url(path)]


def run_ffmpeg(
    args: Sequence[str], folder: Path | None = None, stdin: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    """Runs ffmpeg to its end.

    Args:
        args: Its arguments, without the program.
        folder: The working folder.
        stdin: What it reads from its stdin.

    Raises:
        OSError: It cannot be started.
    """
    command = [*_command("error"), *args]
    return subprocess.run(command, cwd=folder, input=stdin, capture_output=True, check=False)


def start_ffmpeg(
    args: Sequence[str], log_level: str = "error", *, writes: bool = False, reads: bool = False
) -> subprocess.Popen[bytes]:
    """Starts ffmpeg with a pipe for its stderr.

    Args:
        args: Its arguments, without the program.
        log_level: What it says on stderr.
        writes: The caller writes to a pipe for its stdin, which is empty otherwise.
        reads: The caller reads a pipe for its stdout, which is dropped otherwise.

    Raises:
        OSError: It cannot be started.
    """
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen(
        [*_command(log_level), *args],
        stdin=pipe if writes else nothing,
        stdout=pipe if reads else nothing,
        stderr=pipe,
    )


def stop_ffmpeg(process: subprocess.Popen[bytes]) -> None:
    """Ends a process of `start_ffmpeg` at once, if it runs, and closes its pipes."""
    process.kill()
    for pipe in (process.stdin, process.stdout, process.stderr):
        with suppress(OSError):  # what was not written yet
            if pipe is not None:
                pipe.close()
    process.wait()


def build_passthrough_args() -> list[str]:
    """Returns the output option that neither repeats nor drops frames."""
    return ["-fps_mode", "passthrough"] if "-fps_mode" in _help("long") else ["-vsync", "0"]


def has_filters(*names: str) -> bool:
    """Returns whether this ffmpeg has all of these filters."""
    return all(f"Filter {name}" in _help(f"filter={name}") for name in names)


def check_media_file(setting: str, path: Path, remedy: str) -> None:
    """Refuses a path that is no file, or an empty one.

    Raises:
        InputError: The path cannot be read.
    """
    try:
        if not path.exists():
            if re.match(r"[a-z][a-z0-9+.-]+:/", str(path), re.IGNORECASE):
                raise InputError(setting, path, "is an address, not a file", "download it first")
            raise InputError(setting, path, "does not exist", remedy)
        if not path.is_file():
            raise InputError(setting, path, "is not a file", remedy)
        if not path.stat().st_size:
            raise InputError(setting, path, "is empty (0 bytes)", remedy)
        with path.open("rb"):
            pass
    except OSError as error:
        why = f"cannot be used ({error.strerror or error})"
        raise InputError(setting, path, why, remedy) from error


def describe_failure(stderr: str) -> str:
    """Returns the last line of ffmpeg's messages, without memory addresses."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return shown(
        re.sub(r"\[[^\]]* @ 0x[0-9a-f]+\]\s*", "", lines[-1]) if lines else "no reason", str
    )


def _file_url(path: Path) -> str:
    return f"file:{path.absolute()}"


def _command(log_level: str) -> list[str]:
    import imageio_ffmpeg

    try:
        program = imageio_ffmpeg.get_ffmpeg_exe()
    except RuntimeError as error:
        raise OSError(f"there is no ffmpeg: {error}") from error
    return [program, "-hide_banner", "-nostdin", "-nostats", "-v", log_level]


def _help(topic: str) -> str:
    return _read_help(_command("info")[0], topic)


@cache
def _read_help(program: str, topic: str) -> str:
    done = subprocess.run([program, "-hide_banner", "-h", topic], capture_output=True, check=False)
    return done.stdout.decode(errors="replace")
