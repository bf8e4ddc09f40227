"""Reads the frames of videos, independently of the package."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import imageio_ffmpeg
import numpy as np


def read_frames(path: Path) -> np.ndarray:
    """Returns all frames of a video, uint8 [F,H,W,3]; `imageio` starts ffmpeg more slowly."""
    command = [
        imageio_ffmpeg.get_ffmpeg_exe(),
        "-v",
        "error",
        "-nostdin",
        "-threads",
        "1",
        "-i",
        str(path),
    ]
    command += ["-f", "image2pipe", "-c:v", "ppm", "-"]
    images = subprocess.run(command, capture_output=True, check=True).stdout
    _, width, height, _ = images[:30].split(maxsplit=3)
    size = int(height), int(width), 3
    header = len(b"P6\n%s %s\n255\n" % (width, height))
    frames = np.frombuffer(images, np.uint8).reshape(-1, header + np.prod(size))
    return frames[:, header:].reshape(-1, *size)


@contextmanager
def follow_file(path: Path, copy: Path) -> Iterator[None]:
    """Copies a file that appears and grows in the block, also after it is removed."""
    has_ended = threading.Event()

    def follow() -> None:
        while not path.exists() and not has_ended.is_set():
            time.sleep(0.002)
        with path.open("rb") as file, copy.open("wb") as target:
            is_last = False
            while not is_last:
                is_last = has_ended.wait(0.002)
                target.write(file.read())

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
