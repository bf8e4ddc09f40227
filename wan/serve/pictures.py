"""Makes a thumbnail and a sprite sheet of a finished video."""

from __future__ import annotations

import threading
from contextlib import suppress
from itertools import islice
from pathlib import Path

from PIL import Image

from wan.output_files import make_marked_kind, write_output
from wan.pipeline.video_reader import read_video
from wan.serve.folders import remove_files

_COLUMNS, _ROWS, _WIDTH = 4, 2, 320
_JPEG = make_marked_kind("a JPEG", b"\xff\xd8\xff")
_DRAWING = threading.Lock()


def picture(video: Path, kind: str, frames: int) -> Path:
    """Returns the path of a JPEG of a video; creates the file on the first call.

    Args:
        video: An mp4 file.
        kind: "thumbnail" for the first frame, "spritesheet" for several frames.
        num_frames: Frames of the video.

    Raises:
        OSError, ValueError: The video was deleted or cannot be read.
    """
    path = video.with_name(f"{kind}.jpg")
    with _DRAWING:  # concurrent requests create it once
        if not path.exists():
            _draw(video, path, kind, frames)
        if not video.exists():  # deleted meanwhile; the folder may exist again
            remove_files(video.parent, lambda name: name != path.name)
            with suppress(OSError):
                video.parent.rmdir()
            raise FileNotFoundError(video)
    return path


def _draw(video: Path, path: Path, kind: str, frames: int) -> None:
    count = 1 if kind == "thumbnail" else _COLUMNS * _ROWS
    every = read_video(video, "save_file").iter_frames(max(frames // count, 1))
    small = [_small(Image.fromarray(frame)) for frame in islice(every, count)]
    if not small:
        raise ValueError(f"{video} has no frame")
    width, height = small[0].size
    columns = min(count, _COLUMNS)
    sheet = Image.new("RGB", (width * columns, height * -(-count // columns)))
    for place in range(count):
        frame = small[min(place, len(small) - 1)]
        sheet.paste(frame, (place % columns * width, place // columns * height))
    with write_output(path, _JPEG) as temporary:
        sheet.save(temporary, "JPEG", quality=88)


def _small(frame: Image.Image) -> Image.Image:
    height = max(round(frame.height * _WIDTH / frame.width), 1)
    return frame.resize((_WIDTH, height)) if frame.width > _WIDTH else frame
