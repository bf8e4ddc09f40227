"""tools/compare_videos.py on pairs whose answer is known."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import imageio.v2 as imageio
import numpy as np
import pytest

from tests.refusals import check_refusals, get_refusal
from tools.compare_videos import main

SIDE, FRAMES = 96, 9
VARIANTS: dict[str, tuple[str, ...] | None] = {  # name -> the begins of its warnings
    "same": (),
    "noise": None,
    "other_seed": None,
    "defects": ("black: frames 2", f"frozen: frames 5-{FRAMES - 1}"),
    "lost_part": ("areas lost their texture",),
    "lossy": ("blocky",),
}


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A red square that moves over a textured ground, and variants with one defect each."""
    folder = tmp_path_factory.mktemp("clips")

    def write(name: str, frames: list[np.ndarray], crf: int = 8) -> None:
        options = {"fps": 16, "codec": "libx264", "output_params": ["-crf", str(crf)]}
        with imageio.get_writer(folder / f"{name}.mp4", **options, macro_block_size=8) as writer:
            for frame in frames:
                writer.append_data(frame.clip(0, 255).astype(np.uint8))

    def draw_frames(seed: int = 0, shift: int = 0, noise: float = 0) -> list[np.ndarray]:
        random, added = np.random.default_rng(seed), np.random.default_rng(9)
        ground = random.integers(60, 200, 3) + random.normal(0, 18, (SIDE, SIDE, 1))
        frames = [ground.copy() for _ in range(FRAMES)]
        for time, frame in enumerate(frames):
            left_edge = 8 + 4 * (time + shift)
            frame[30:60, left_edge : left_edge + 24] = (220, 40, 30)
            frame += added.normal(0, noise, frame.shape) if noise else 0
        return frames

    defects, part = draw_frames(), draw_frames()
    defects[2][:] = 0
    defects[4:] = [defects[4]] * (FRAMES - 4)
    for frame in part:
        frame[48:] = 128
    write("same", draw_frames())
    write("other_seed", draw_frames(seed=3))
    write("noise", draw_frames(noise=8))
    write("defects", defects)
    write("lost_part", part)
    write("lossy", draw_frames(), 40)
    write("short", draw_frames()[:-1])
    write("join", draw_frames()[:6] + draw_frames(shift=6)[6:])
    (folder / "text.mp4").write_text("no video")
    return folder


def figures(file: Path, *argv: object) -> list[dict[str, Any]]:
    assert main([*map(str, argv), "--json", str(file)]) == 0
    return json.loads(file.read_text())["pairs"]


def test_variants_of_a_video(clips: Path, tmp_path: Path) -> None:
    """The figures fall from the same frames to another video; a black frame has the worst one."""
    pairs = {
        name: figures(tmp_path / "x.json", clips / "same.mp4", clips / f"{name}.mp4")[0]
        for name in VARIANTS
    }
    for names in (("same", "noise", "other_seed"), ("same", "lossy")):
        means = [pairs[name]["means"] for name in names]
        for figure in ("vmaf", "ssim", "psnr", "xpsnr"):
            values = [mean[figure] for mean in means]
            assert values == sorted(values, reverse=True) and len({*values}) == len(values), figure
    same, black = (pairs[name]["means"] for name in ("same", "defects"))
    assert same["psnr"] == 100 and black["worst_psnr"] < 10 and black["worst_vmaf"] < 5
    for name, begins in VARIANTS.items():
        reference, warnings = pairs[name]["suspicious"]
        assert not reference and (begins != () or not warnings), (name, reference, warnings)
        for begin in begins or ():
            assert any(text.startswith(begin) for text in warnings), (name, warnings)


def test_two_folders(clips: Path, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    shutil.copy(clips / "same.mp4", tmp_path / "a" / "defects.mp4")
    shutil.copy(clips / "defects.mp4", tmp_path / "b")
    (tmp_path / "a" / "more.mp4").write_bytes(b"")
    (pair,) = figures(tmp_path / "x.json", tmp_path / "a", tmp_path / "b")
    assert [Path(video).parts[-2:] for video in pair["videos"]] == [
        ("a", "defects.mp4"),
        ("b", "defects.mp4"),
    ]


def test_a_join(clips: Path, tmp_path: Path) -> None:
    """The square jumps by 28 pixels instead of 4."""
    pair = clips / "same.mp4", clips / "join.mp4"
    (record,) = figures(tmp_path / "x.json", *pair, "--joins", "6")
    smooth, jump = (
        float(lines[0].removeprefix("join at 6: ").split()[0]) for lines in record["suspicious"]
    )
    assert smooth < 1.2 and 1.3 < jump < 8


def test_arguments_that_are_refused(clips: Path) -> None:
    table = {
        "no video": ("missing.mp4",),
        "fewer frames": ("short.mp4",),
        "text": ("text.mp4",),
        "a folder": (".",),
        "joins of words": ("noise.mp4", "--joins", "a"),
        "a join behind the end": ("noise.mp4", "--joins", "99"),
    }
    same = str(clips / "same.mp4")
    messages = {
        name: get_refusal(main, [same, str(clips / other), *flags])
        for name, (other, *flags) in table.items()
    }
    check_refusals("tools: compare_videos.py", messages)
