"""Makes a thumbnail and a sprite sheet of a finished video."""

from __future__ import annotations

import threading
from contextlib import suppress
from itertools import islice
from pathlib import Path

from PIL import Image

from wan.media.video_reader import read_video
from wan.serve.folders import remove_job_files
from wan.utils.files import make_marked_kind, write_output

_COLUMNS, _ROWS, _WIDTH = 4, 2, 320
_JPEG = make_marked_kind("a JPEG", b"\xff\xd8\xff")
_WRITE_LOCK = threading.Lock()


def make_picture(video: Path, variant: str, num_frames: int) -> Path:
    """Returns the path of a JPEG of a video; creates the file on the first call.

    Args:
        video: An mp4 file.
        variant: "thumbnail" for the first frame, "spritesheet" for several frames.
        num_frames: Frames of the video.

    Raises:
        OSError, ValueError: The video was deleted or cannot be read.
    """
    path = make_picture_path(video, variant)
    with _WRITE_LOCK:  # concurrent requests create it once
        if not path.exists():
            _write_picture(video, path, variant, num_frames)
        if not video.exists():  # deleted meanwhile; the folder may exist again
            remove_job_files(video.parent, lambda name: name != path.name)
            with suppress(OSError):
                video.parent.rmdir()
            raise FileNotFoundError(video)
    return path


def make_picture_path(video: Path, variant: str) -> Path:
    """Returns the path of a JPEG of a video, such as `thumbnail-1.jpg` of `video-1.mp4`."""
    return video.with_name(video.name.replace("video", variant)).with_suffix(".jpg")


def _write_picture(video: Path, path: Path, variant: str, num_frames: int) -> None:
    count = 1 if variant == "thumbnail" else _COLUMNS * _ROWS
    sampled_frames = read_video(video, "save_file").iter_frames(max(num_frames // count, 1))
    thumbnails = [_shrink_frame(Image.fromarray(frame)) for frame in islice(sampled_frames, count)]
    if not thumbnails:
        raise ValueError(f"{video} has no frame")
    width, height = thumbnails[0].size
    columns = min(count, _COLUMNS)
    sheet = Image.new("RGB", (width * columns, height * -(-count // columns)))
    for index in range(count):
        frame = thumbnails[min(index, len(thumbnails) - 1)]
        sheet.paste(frame, (index % columns * width, index // columns * height))
    with write_output(path, _JPEG) as temporary:
        sheet.save(temporary, "JPEG", quality=88)


def _shrink_frame(frame: Image.Image) -> Image.Image:
    height = max(round(frame.height * _WIDTH / frame.width), 1)
    return frame.resize((_WIDTH, height)) if frame.width > _WIDTH else frame
