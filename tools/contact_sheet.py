"""Draws one image of several videos: a strip of frames for each, above its prompt or name.

    python tools/contact_sheet.py --out sheet.png [--gif all.gif] [--names] a.mp4 b.mp4 ...

The prompts are read from the records that generate.py writes with its videos.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

if not __package__:  # started as a script: only tools/ is on the path, its parent is needed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from wan.app.flag_parser import Parser
from wan.app.programs import make_output_path_type, run_program
from wan.media.video_reader import read_video
from wan.settings.errors import InputError, escape_controls
from wan.utils.files import make_marked_kind, write_output

FRAMES = 9  # frames of a strip
SIDE = 96  # pixels of a frame's longer side
_GAP, _TEXT = 4, 20
_PROGRAM = "tools/contact_sheet.py"
SHEET = make_marked_kind("a sheet of tools/contact_sheet.py", f"Software\0{_PROGRAM}".encode())
ANIMATION = make_marked_kind("an animation of tools/contact_sheet.py", _PROGRAM.encode())
_PAPER, _INK = (255, 255, 255), (20, 20, 20)


def read_frames(video: Path) -> list[Image.Image]:
    """Reads the frames of a video, in RGB."""
    return [Image.fromarray(frame) for frame in read_video(video, "videos").iter_frames()]


def read_prompt(video: Path) -> str:
    """Reads the prompt from the video's record; without a record returns the file's name."""
    record = video.with_suffix(".json")
    if not record.is_file():
        return video.name
    return str(json.loads(record.read_text(encoding="utf-8"))["settings"]["prompt"])


def make_contact_sheet(videos: Sequence[Path], names: bool = False) -> Image.Image:
    """Draws the strips of the videos, one below the other, with their names or prompts."""
    strips = [_make_strip(video, video.stem if names else read_prompt(video)) for video in videos]
    sheet = Image.new("RGB", (max(s.width for s in strips), sum(s.height for s in strips)), _PAPER)
    top = 0
    for strip in strips:
        sheet.paste(strip, (0, top))
        top += strip.height
    return sheet


def _make_strip(video: Path, caption: str) -> Image.Image:
    frames = read_frames(video)
    chosen = np.linspace(0, len(frames) - 1, min(FRAMES, len(frames))).round().astype(int)
    scaled = [_scale_frame(frames[index]) for index in chosen]
    width, height = scaled[0].size
    strip = Image.new("RGB", (FRAMES * (width + _GAP) + _GAP, height + _GAP + _TEXT), _PAPER)
    for column, frame in enumerate(scaled):
        strip.paste(frame, (_GAP + column * (width + _GAP), _GAP))
    font = ImageFont.load_default(size=13)
    caption = escape_controls(caption)
    ImageDraw.Draw(strip).text((_GAP, height + _GAP), caption, fill=_INK, font=font)
    return strip


def _scale_frame(frame: Image.Image) -> Image.Image:
    scale = SIDE / max(frame.size)
    return frame.resize((round(frame.width * scale), round(frame.height * scale)))


def make_animation(videos: Sequence[Path], columns: int = 3) -> list[Image.Image]:
    """Draws the videos side by side, frame by frame; shorter videos hold their last frame."""
    all_frames = [[_scale_frame(frame) for frame in read_frames(video)] for video in videos]
    width, height = (max(f[0].size[i] for f in all_frames) + _GAP for i in (0, 1))
    rows = -(-len(videos) // columns)
    pictures = []
    for time in range(max(map(len, all_frames))):
        picture = Image.new("RGB", (columns * width + _GAP, rows * height + _GAP), _PAPER)
        for number, frames in enumerate(all_frames):
            row, column = divmod(number, columns)
            frame = frames[min(time, len(frames) - 1)]
            picture.paste(frame, (_GAP + column * width, _GAP + row * height))
        pictures.append(picture.quantize(128))
    return pictures


def write_contact_sheet(
    videos: Sequence[Path],
    out: Path,
    gif: Path | None = None,
    *,
    names: bool = False,
    milliseconds: int = 125,
) -> None:
    """Writes the sheet (PNG) and, if `gif` is a path, an endless GIF.

    Args:
        milliseconds: Duration of a frame of the GIF.
    """
    mark = PngInfo()
    mark.add_text("Software", _PROGRAM)
    with write_output(out, SHEET) as temporary:
        make_contact_sheet(videos, names).save(temporary, "PNG", optimize=True, pnginfo=mark)
    if gif is not None:
        first, *other_frames = make_animation(videos)
        moving = {
            "save_all": True,
            "append_images": other_frames,
            "duration": milliseconds,
            "loop": 0,
        }
        with write_output(gif, ANIMATION) as temporary:
            first.save(temporary, "GIF", comment=_PROGRAM.encode(), **moving)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("videos", type=Path, nargs="+")
    parser.add_argument(
        "--out", type=make_output_path_type(SHEET), required=True, help="PNG file to write"
    )
    parser.add_argument(
        "--gif",
        type=make_output_path_type(ANIMATION),
        help="also write the videos side by side as a GIF",
    )
    parser.add_argument("--names", action="store_true", help="label with file names, not prompts")
    options = parser.parse_args(argv)
    for video in options.videos:
        if not video.is_file():
            parser.error(f"{video} does not exist; give videos of generate.py")
    try:
        write_contact_sheet(options.videos, options.out, options.gif, names=options.names)
    except InputError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(run_program(main))
