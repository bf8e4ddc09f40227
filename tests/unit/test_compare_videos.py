"""tools/compare_videos.py on pairs whose answer is known."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import imageio.v2 as imageio
import numpy as np
import pytest

from tests.dist import REPO
from tests.refusals import check_refusals, get_refusal
from tools.compare_videos import main

SIDE, FRAMES = 96, 9
VARIANTS = ("same", "shifted", "other_seed", "noise", "black", "frozen", "lost_part", "lossy")


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

    black, frozen, part = draw_frames(), draw_frames(), draw_frames()
    black[6][:] = 0
    frozen[4:] = [frozen[4]] * (FRAMES - 4)
    for frame in part:
        frame[48:] = 128
    write("same", draw_frames())
    write("shifted", draw_frames(shift=1))
    write("other_seed", draw_frames(seed=3))
    write("noise", draw_frames(noise=8))
    write("black", black)
    write("frozen", frozen)
    write("lost_part", part)
    write("lossy", draw_frames(), 40)
    write("short", draw_frames()[:-1])
    write("join", draw_frames()[:6] + draw_frames(shift=6)[6:])
    (folder / "text.mp4").write_text("no video")
    return folder


def figures(file: Path, *argv: object) -> list[dict[str, Any]]:
    assert main([*map(str, argv), "--json", str(file)]) == 0
    return json.loads(file.read_text())["pairs"]


@pytest.fixture(scope="module")
def compared(clips: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The figures of each variant against the video "same", compared as two folders."""
    folder = tmp_path_factory.mktemp("compared")
    (folder / "a").mkdir()
    (folder / "b").mkdir()
    for name in VARIANTS:
        shutil.copy(clips / "same.mp4", folder / "a" / f"{name}.mp4")
        shutil.copy(clips / f"{name}.mp4", folder / "b")
    pairs = figures(folder / "all.json", folder / "a", folder / "b")
    return {Path(pair["videos"][1]).stem: pair for pair in pairs}


def test_the_order_of_the_figures(compared: dict[str, dict[str, Any]]) -> None:
    """The figures fall from the same frames to another video; a black frame has the worst one."""
    assert compared.keys() == {*VARIANTS}
    for names in (
        ("same", "noise", "other_seed"),
        ("same", "lossy"),
        ("same", "shifted", "other_seed"),
    ):
        means = [compared[name]["means"] for name in names]
        for figure in ("vmaf", "ssim", "psnr", "xpsnr"):
            values = [mean[figure] for mean in means]
            assert values == sorted(values, reverse=True) and len({*values}) == len(values), figure
    same, black = (compared[name]["means"] for name in ("same", "black"))
    assert same["psnr"] == 100 and black["worst_psnr"] < 10 and black["worst_vmaf"] < 5


def test_suspicious_frames_and_areas(compared: dict[str, dict[str, Any]]) -> None:
    begins = {"black": "black: frames 6", "frozen": f"frozen: frames 5-{FRAMES - 1}"}
    begins |= {"lost_part": "areas lost their texture", "lossy": "blocky"}
    wrong = {}
    for name in ("same", "shifted", *begins):
        reference, warnings = compared[name]["suspicious"]
        begin = begins.get(name)
        as_expected = (
            any(warning.startswith(begin) for warning in warnings) if begin else not warnings
        )
        if reference or not as_expected:
            wrong[name] = reference, warnings
    assert not wrong


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
        "joins of words": ("black.mp4", "--joins", "a"),
        "a join behind the end": ("black.mp4", "--joins", "99"),
    }
    same = str(clips / "same.mp4")
    messages = {
        name: get_refusal(main, [same, str(clips / other), *flags])
        for name, (other, *flags) in table.items()
    }
    check_refusals("tools: compare_videos.py", messages)


def test_folders_and_their_page_from_the_command_line(clips: Path, tmp_path: Path) -> None:
    """As a script, from any folder."""
    for folder, names in (("a", ("same", "black")), ("b", ("same", "noise"))):
        (tmp_path / folder).mkdir()
        for number, name in enumerate(names):
            shutil.copy(clips / f"{name}.mp4", tmp_path / folder / f"{number}.mp4")
    (tmp_path / "a" / "more.mp4").write_bytes(b"")
    command = [sys.executable, str(REPO / "tools" / "compare_videos.py"), "a", "b"]
    process = subprocess.run(
        [*command, "--page", "page.html"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert process.returncode == 0, process.stderr
    assert "mean of 2" in process.stdout and "a/1.mp4: black: frames 6" in process.stdout
    assert "Only in one folder: more.mp4" in process.stderr
    text = (tmp_path / "page.html").read_text()
    assert text.count("<img") == 4 and "A: black: frames 6" in text
