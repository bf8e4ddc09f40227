"""Draws a folder of Animate inputs, for runs of animate-14B without the preprocessing.

    python tools/make_character.py OUT [--size 128*128] [--frames 12]

A stick figure waves (src_pose.mp4), a face moves its mouth (src_face.mp4), the character wears a
coat (src_ref.png), and a ball rolls through a striped room in which the figure is black
(src_bg.mp4, src_mask.mp4).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from PIL.PngImagePlugin import PngInfo

from wan.app.flag_parser import Parser
from wan.app.programs import run_program
from wan.media.video_writer import write_video
from wan.settings.command import Output
from wan.settings.errors import COMMAND_LINE_NAMING, InputError, name_settings
from wan.settings.presets import FACE_SIZE
from wan.settings.values import integer
from wan.settings.values import read_size as read_size
from wan.utils.files import VIDEO_KIND, check_output, make_marked_kind, write_output

FPS = 30
_PROGRAM = "tools/make_character.py"
REFERENCE = make_marked_kind("a picture of make_character.py", f"Software\0{_PROGRAM}".encode())
_COLOURS = ("red", "lime", "blue", "yellow", "magenta", "cyan")
_UNITS = 256  # units of a side of the drawings, before resizing

Draw = Callable[[ImageDraw.ImageDraw, float], None]
"""Draws a square of `_UNITS` units at a time from 0 to 1."""


def draw_figure(
    draw: ImageDraw.ImageDraw, time: float, colours: tuple[str, ...] = _COLOURS, width: int = 6
) -> None:
    """Draws a figure whose arm goes up and down."""
    arm = 0.8 * math.sin(2 * math.pi * time)
    hand = 128 + 72 * math.cos(arm), 115 - 72 * math.sin(arm)
    limbs = [(128, 102, 128, 166), (128, 166, 102, 236), (128, 166, 154, 236)]
    limbs += [(128, 115, 72, 154), (128, 115, *hand)]  # type: ignore[list-item]
    for limb, colour in zip(limbs, colours, strict=False):
        draw.line(limb, fill=colour, width=width)
    draw.ellipse((104, 46, 152, 96), fill=colours[-1])


def draw_character(draw: ImageDraw.ImageDraw, time: float) -> None:
    """Draws the character."""
    draw.rectangle((0, 0, _UNITS, _UNITS), fill="lightsteelblue")
    draw.rectangle((96, 96, 160, 180), fill="firebrick")
    draw_figure(draw, 0, ("firebrick", "black", "black", "firebrick", "firebrick", "peachpuff"), 16)


def draw_face(draw: ImageDraw.ImageDraw, time: float) -> None:
    """Draws a face whose mouth opens."""
    draw.ellipse((26, 16, 230, 240), fill="peachpuff")
    for x in (92, 164):
        draw.ellipse((x - 12, 90, x + 12, 114), fill="navy")
    mouth = 8 + 22 * abs(math.sin(3 * math.pi * time))
    draw.ellipse((98, 176 - mouth, 158, 176 + mouth), fill="darkred")


def draw_room(draw: ImageDraw.ImageDraw, time: float) -> None:
    """Draws a ball that rolls through a striped room, black where the figure is to be."""
    for x_left in range(0, _UNITS, 32):
        draw.rectangle((x_left, 0, x_left + 15, _UNITS), fill="darkseagreen")
    x = 20 + 216 * time
    draw.ellipse((x - 16, 216, x + 16, 248), fill="orange")
    draw_figure(draw, time, ("black",) * 6, 40)


def draw_mask(draw: ImageDraw.ImageDraw, time: float) -> None:
    """Draws white where the figure is to be."""
    draw_figure(draw, time, ("white",) * 6, 40)


def write_character_folder(out: Path, size: tuple[int, int], frames: int) -> None:
    """Writes the five files of a folder.

    Args:
        out: The folder; created if missing.
        size: (width, height) of all files but the face, multiples of 16.
        frames: Frames of each video.
    """
    videos: dict[str, Draw] = {
        "pose": draw_figure,
        "face": draw_face,
        "bg": draw_room,
        "mask": draw_mask,
    }
    reference = out / "src_ref.png"
    for name in videos:
        check_output(out / f"src_{name}.mp4", VIDEO_KIND, "OUT")
    check_output(reference, REFERENCE, "OUT")
    mark = PngInfo()
    mark.add_text("Software", _PROGRAM)
    for name, draw in videos.items():
        sides = (FACE_SIZE, FACE_SIZE) if name == "face" else size
        each = [_draw_frame(draw, index / frames, sides) for index in range(frames)]
        video = torch.from_numpy(np.stack(each)).permute(3, 0, 1, 2).float() / 127.5 - 1
        write_video(video, Output(save_file=out / f"src_{name}.mp4", fps=FPS))
    with write_output(reference, REFERENCE) as temporary:
        Image.fromarray(_draw_frame(draw_character, 0, size)).save(temporary, "PNG", pnginfo=mark)


def _draw_frame(draw: Draw, time: float, size: tuple[int, int]) -> np.ndarray:
    square = Image.new("RGB", (_UNITS, _UNITS))
    draw(ImageDraw.Draw(square), time)
    return np.asarray(square.resize(size, Image.Resampling.LANCZOS))


@name_settings(COMMAND_LINE_NAMING)
def main(arguments: list[str] | None = None) -> None:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", default="128*128", help="WIDTH*HEIGHT, multiples of 16")
    parser.add_argument("--frames", default="12", help="frames of each video, at least 2 (12)")
    options = parser.parse_args(arguments)
    size = read_size("`size`", options.size)
    if size[0] % 16 or size[1] % 16:
        raise InputError("`size`", options.size, "is not in multiples of 16", "try 128*128")
    write_character_folder(options.out, size, integer(2, 10_000)("`frames`", options.frames))


if __name__ == "__main__":
    sys.exit(run_program(main))
