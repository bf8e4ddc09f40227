"""Where the results go."""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from wan.checkpoint.files import read_json
from wan.cli import env
from wan.settings.errors import InputError
from wan.settings.request import Request


@dataclass(frozen=True)
class Output:
    """The video's path (.mp4); the JSON record and the latents stand beside it under its name.

    keep_latents: the denoised latents stay on disk; otherwise they go once the video is written.
    """

    save_file: Path
    fps: float
    keep_latents: bool = False

    def __post_init__(self) -> None:
        check_writable(self.save_file)

    @property
    def record(self) -> Path:
        return self.save_file.with_suffix(".json")

    @property
    def latents(self) -> Path:
        return self.save_file.with_suffix(".latents.safetensors")

    @property
    def unfinished(self) -> Path:
        """Where the latents wait while the video is not written yet; no other run's name."""
        return self.save_file.with_suffix(f".{os.getpid()}.latents.safetensors")


def check_writable(path: Path) -> None:
    """The path must name an mp4 in a folder that exists or can be made (where rank 0 runs)."""
    if env.rank() != 0:
        return
    if path.suffix.lower() != ".mp4":
        raise InputError(f"--save_file {path} must end in .mp4, the only format written.")
    if path.is_dir():
        raise InputError(f"--save_file {path} is a folder; add a file name.")
    if len(os.fsencode(path.name)) > 200:
        raise InputError(f"--save_file has a name of {len(path.name)} characters; shorten it.")
    record = path.with_suffix(".json")
    if record.exists() and "settings" not in read_json(record):
        raise InputError(
            f"--save_file {path} would replace {record}, which is no record of generate.py; "
            "choose another name."
        )
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    try:
        with tempfile.TemporaryFile(dir=parent):  # permission bits alone do not tell, nor does root
            pass
    except OSError as error:
        raise InputError(
            f"--save_file {path} cannot be written: {parent} is not a writable folder "
            f"({error.strerror}); choose another one."
        ) from error


def generated_name(task: str, request: Request) -> str:
    """`task_WxH_start-of-prompt_seed_time.mp4`, safe as a file name on every system.

    The official name keeps `*`, quotes and line breaks; here letters, digits, `-` and `.` stay.
    """
    words = re.sub(r"[^\w.-]+", "_", request.prompt).strip("_.")
    while len(words.encode("utf-8")) > 50:
        words = words[:-1]
    stamp = datetime.now().strftime("%Y%m%d_%H%M%S")
    width, height = request.video_size
    parts = (task, f"{width}x{height}", words, str(request.seed), stamp)
    return "_".join(filter(None, parts)) + ".mp4"
