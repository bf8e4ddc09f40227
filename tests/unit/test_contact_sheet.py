"""The contact sheet: frames in order, the prompt under them, a GIF that moves."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tools import contact_sheet
from wan.media.video_writer import write_video
from wan.settings.command import Output


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two videos that go from black to one colour; the first has a record."""
    folder, paths = tmp_path_factory.mktemp("videos"), []
    for name, channel, frames in (("a", 0, 9), ("b", 2, 17)):
        clip = torch.full((3, frames, 64, 64), -1.0)
        clip[channel] = torch.linspace(-1, 1, frames)[:, None, None]
        paths.append(folder / f"{name}.mp4")
        write_video(clip, Output(paths[-1], fps=8))
    (folder / "a.json").write_text(json.dumps({"settings": {"prompt": "red comes"}}))
    return paths


def test_strips(videos: list[Path]) -> None:
    """Each shows frames from first to last, with the prompt or the name under it."""
    picture = contact_sheet.make_contact_sheet(videos)
    sheet, grey = np.asarray(picture).astype(int), np.asarray(picture.convert("L"))
    step, row = contact_sheet.SIDE + 4, contact_sheet.SIDE + 24
    assert sheet.shape == (2 * row, 9 * step + 4, 3)
    for strip, channel in ((0, 0), (1, 2)):
        centres = sheet[strip * row + 50, 50 : 9 * step : step, channel]
        assert len(centres) == 9 and (np.diff(centres) > 10).all()
        assert centres[0] < 12 and centres[-1] > 235
    assert [contact_sheet.read_prompt(video) for video in videos] == ["red comes", "b.mp4"]
    ink = np.nonzero((grey[contact_sheet.SIDE + 5 : row] < 100).any(0))[0]
    assert ink[0] < 10 and 40 < ink[-1] < 120  # nine letters at the left


def test_the_gif_holds_every_frame(videos: list[Path], tmp_path: Path) -> None:
    gif = tmp_path / "new" / "all.gif"
    contact_sheet.write_contact_sheet(videos, tmp_path / "new" / "sheet.png", gif)
    with Image.open(gif) as animation:
        assert animation.n_frames == 17 and animation.info["loop"] == 0  # type: ignore[attr-defined]
        for time in (9, 16):
            animation.seek(time)
            frame = np.asarray(animation.convert("RGB")).astype(int)
            assert frame[50, 50, 0] > 235  # the shorter video stays on its last frame
    assert frame[50, 150, 2] > 235
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["all.gif", "sheet.png"]
