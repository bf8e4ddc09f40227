"""Starts ffmpeg, and builds its arguments for input and output files.

Every path is passed to ffmpeg as `file:` and an absolute path, so that no file name acts as an
address, an option or a pattern. Protocols and formats are whitelisted, so that a file cannot make
ffmpeg open another file or an address.

This module does not import torch, so that bad files are refused before torch is loaded.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from wan.settings.values import format_value

_FORMATS = (
    *("aac", "ac3", "aiff", "amr", "asf", "au", "avi", "caf", "eac3", "flac", "flv", "gif"),
    *("m4v", "matroska", "mov", "mp3", "mp4", "mpeg", "mpegts", "mxf", "nut", "ogg", "rm"),
    *("w64", "wav", "webm", "wv", "yuv4mpegpipe"),
)


def build_input_args(path: Path) -> list[str]:
    """Builds the arguments of an input file; playlists and scripts are not allowed formats."""
    whitelists = ["-protocol_whitelist", "file,pipe", "-format_whitelist", ",".join(_FORMATS)]
    return [*whitelists, "-i", _make_file_url(path)]


def build_clock_args(path: Path, streams: str) -> list[str]:
    """Builds a null output that makes ffmpeg read further MPEG streams for their time stamps.

    ffmpeg counts the time of MPEG files from the first used stream, not from the first stream of
    the file.

    Args:
        path: The input file.
        streams: ffmpeg's specifier of the streams that are not used otherwise, such as "0:v?".
    """
    with path.open("rb") as file:
        head = file.read(8)
    is_mpeg = head[:1] == b"G" or head[4:5] == b"G" or head[:4] == b"\0\0\1\xba"
    return ["-map", streams, "-c", "copy", "-f", "null", "-"] if is_mpeg else []


def build_concat_args() -> list[str]:
    """Builds the arguments for a list of mp4 files on stdin, relative to the working folder."""
    whitelists = ["-protocol_whitelist", "file,pipe", "-format_whitelist", "concat,mov"]
    return [*whitelists, "-f", "concat", "-safe", "0", "-i", "pipe:0"]


def build_output_args(path: Path, *, fragmented: bool = False) -> list[str]:
    """Builds the arguments of an mp4 output with its index at the start; overwrites the file.

    fragmented: Each frame is a fragment, which is written at once when the next frame has come, so
        that the file can be read while it grows.
    """
    flags = ["-movflags", "+faststart"]
    if fragmented:
        fragment_flags = "+frag_every_frame+empty_moov+default_base_moof"
        flags = ["-flush_packets", "1", "-movflags", fragment_flags]
    return [*flags, "-f", "mp4", "-y", _make_file_url(path)]


def run_ffmpeg(
    args: Sequence[str], folder: Path | None = None, stdin: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    """Runs ffmpeg and waits for it.

    Args:
        args: Arguments without the program.
        folder: The working folder.
        stdin: Bytes for ffmpeg's stdin.

    Raises:
        OSError: ffmpeg cannot be started.
    """
    command = [*_build_ffmpeg_command("error"), *args]
    return subprocess.run(command, cwd=folder, input=stdin, capture_output=True, check=False)


def start_ffmpeg(
    args: Sequence[str], log_level: str = "error", *, writes: bool = False, reads: bool = False
) -> subprocess.Popen[bytes]:
    """Starts ffmpeg with a pipe for its stderr.

    Args:
        args: Arguments without the program.
        log_level: ffmpeg's `-v`, for its messages on stderr.
        writes: Whether stdin is a pipe; otherwise it is empty.
        reads: Whether stdout is a pipe; otherwise it is discarded.

    Raises:
        OSError: ffmpeg cannot be started.
    """
    pipe, devnull = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen(
        [*_build_ffmpeg_command(log_level), *args],
        stdin=pipe if writes else devnull,
        stdout=pipe if reads else devnull,
        stderr=pipe,
    )


def stop_ffmpeg(process: subprocess.Popen[bytes]) -> None:
    """Kills a process of `start_ffmpeg` if it still runs, and closes its pipes."""
    process.kill()
    for pipe in (process.stdin, process.stdout, process.stderr):
        with suppress(OSError):  # unwritten data
            if pipe is not None:
                pipe.close()
    process.wait()


def build_passthrough_args() -> list[str]:
    """Builds the output option that neither repeats nor drops frames."""
    return (
        ["-fps_mode", "passthrough"] if "-fps_mode" in _get_ffmpeg_help("long") else ["-vsync", "0"]
    )


def has_filters(*names: str) -> bool:
    """Returns whether this ffmpeg has all of these filters."""
    return all(f"Filter {name}" in _get_ffmpeg_help(f"filter={name}") for name in names)


def describe_failure(stderr: str) -> str:
    """Returns the last line of ffmpeg's messages without memory addresses."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return format_value(
        re.sub(r"\[[^\]]* @ 0x[0-9a-f]+\]\s*", "", lines[-1]) if lines else "no reason", str
    )


def _make_file_url(path: Path) -> str:
    return f"file:{path.absolute()}"


def _build_ffmpeg_command(log_level: str) -> list[str]:
    import imageio_ffmpeg

    try:
        program = imageio_ffmpeg.get_ffmpeg_exe()
    except RuntimeError as error:
        raise OSError(f"there is no ffmpeg: {error}") from error
    return [program, "-hide_banner", "-nostdin", "-nostats", "-v", log_level]


def _get_ffmpeg_help(topic: str) -> str:
    return _run_ffmpeg_help(_build_ffmpeg_command("info")[0], topic)


@cache
def _run_ffmpeg_help(program: str, topic: str) -> str:
    result = subprocess.run(
        [program, "-hide_banner", "-h", topic], capture_output=True, check=False
    )
    return result.stdout.decode(errors="replace")
