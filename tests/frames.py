"""Reads the frames of videos, independently of the package."""

from __future__ import annotations

import subprocess
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
