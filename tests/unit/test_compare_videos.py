"""tools/compare_videos.py on pairs whose answer is known."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import imageio.v2 as imageio
import numpy as np
import pytest

from tests.dist import REPO
from tools.compare_videos import main
from wan.settings.errors import InputError

SIDE, FRAMES = 96, 12


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A red square that moves over a textured ground, and the same with one thing wrong."""
    folder = tmp_path_factory.mktemp("clips")

    def write(name: str, frames: list[np.ndarray], crf: int = 8) -> None:
        options = {"fps": 16, "codec": "libx264", "output_params": ["-crf", str(crf)]}
        with imageio.get_writer(folder / f"{name}.mp4", **options, macro_block_size=8) as writer:
            for frame in frames:
                writer.append_data(frame.clip(0, 255).astype(np.uint8))

    def drawn(seed: int = 0, shift: int = 0, noise: float = 0) -> list[np.ndarray]:
        random, added = np.random.default_rng(seed), np.random.default_rng(9)
        ground = random.integers(60, 200, 3) + random.normal(0, 18, (SIDE, SIDE, 1))
        frames = [ground.copy() for _ in range(FRAMES)]
        for time, frame in enumerate(frames):
            left = 8 + 4 * (time + shift)
            frame[30:60, left : left + 24] = (220, 40, 30)
            frame += added.normal(0, noise, frame.shape) if noise else 0
        return frames

    black, frozen, part = drawn(), drawn(), drawn()
    black[6][:] = 0
    frozen[4:] = [frozen[4]] * (FRAMES - 4)
    for frame in part:
        frame[48:] = 128
    write("same", drawn())
    write("shifted", drawn(shift=1))
    write("other_seed", drawn(seed=3))
    write("noise_2", drawn(noise=2))
    write("noise_8", drawn(noise=8))
    write("black", black)
    write("frozen", frozen)
    write("lost_part", part)
    write("lossy_30", drawn(), 30)
    write("lossy_40", drawn(), 40)
    write("short", drawn()[:-1])
    write("join", drawn()[:6] + drawn(shift=6)[6:])
    (folder / "text.mp4").write_text("no video")
    return folder


def compared(clips: Path, name: str, tmp_path: Path, *flags: str) -> dict[str, Any]:
    out = tmp_path / f"{name}.json"
    pair = (str(clips / "same.mp4"), str(clips / f"{name}.mp4"))
    assert main([*pair, "--json", str(out), *flags]) == 0
    (found,) = json.loads(out.read_text())["pairs"]
    return found


def test_the_order_of_the_figures(clips: Path, tmp_path: Path) -> None:
    """From the same frames to another video; a black frame shows in the worst one."""
    orders = (
        ("same", "noise_2", "noise_8", "other_seed"),
        ("same", "lossy_30", "lossy_40"),
        ("same", "shifted", "other_seed"),
    )
    for names in orders:
        means = [compared(clips, name, tmp_path)["means"] for name in names]
        for figure in ("vmaf", "ssim", "psnr", "xpsnr"):
            values = [mean[figure] for mean in means]
            assert values == sorted(values, reverse=True) and len({*values}) == len(values), figure
    same, black = (compared(clips, name, tmp_path)["means"] for name in ("same", "black"))
    assert same["psnr"] == 100 and black["worst_psnr"] < 10 and black["worst_vmaf"] < 5


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("same", ""),
        ("shifted", ""),
        ("black", "black: frames 6"),
        ("frozen", f"frozen: frames 5-{FRAMES - 1}"),
        ("lost_part", "areas lost their texture"),
        ("lossy_40", "blocky"),
    ],
)
def test_what_is_suspicious(name: str, said: str, clips: Path, tmp_path: Path) -> None:
    reference, found = compared(clips, name, tmp_path)["suspicious"]
    assert not reference
    assert any(one.startswith(said) for one in found) if said else not found, found


def test_a_join(clips: Path, tmp_path: Path) -> None:
    """The square jumps by 28 pixels instead of 4."""
    _, found = compared(clips, "join", tmp_path, "--joins", "6")["suspicious"]
    ratio = float(found[0].removeprefix("join at 6: ").split()[0])
    assert 1.3 < ratio < 8
    smooth, _ = compared(clips, "same", tmp_path, "--joins", "6")["suspicious"]
    assert float(smooth[0].removeprefix("join at 6: ").split()[0]) < 1.2


def test_folders_and_their_page(
    clips: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, names in (("a", ("same", "black")), ("b", ("same", "noise_8"))):
        (tmp_path / folder).mkdir()
        for number, name in enumerate(names):
            content = (clips / f"{name}.mp4").read_bytes()
            (tmp_path / folder / f"{number}.mp4").write_bytes(content)
    (tmp_path / "a" / "more.mp4").write_bytes(b"")
    page = tmp_path / "page.html"
    assert main([str(tmp_path / "a"), str(tmp_path / "b"), "--page", str(page)]) == 0
    told = capsys.readouterr()
    assert "mean of 2" in told.out and "Only in one folder: more.mp4" in told.err
    text = page.read_text()
    assert text.count("<img") == 4 and "A: black: frames 6" in text


@pytest.mark.parametrize(
    ("other", "flags", "said"),
    [
        ("missing.mp4", (), "does not exist"),
        ("short.mp4", (), "cannot be compared: 96x96 with 12 frames and 96x96 with 11 frames"),
        ("text.mp4", (), "is no video that ffmpeg can read"),
        (".", (), "give two of a kind"),
        ("black.mp4", ("--joins", "a"), "must be numbers of frames"),
        ("black.mp4", ("--joins", "99"), "There is no join at frame 99 of 12"),
    ],
)
def test_what_is_refused(other: str, flags: tuple[str, ...], said: str, clips: Path) -> None:
    with pytest.raises(InputError, match=said):
        main([str(clips / "same.mp4"), str(clips / other), *flags])


def test_as_a_user_starts_it(clips: Path, tmp_path: Path) -> None:
    """As a script, from any folder."""
    command = [sys.executable, REPO / "tools" / "compare_videos.py"]
    videos = [clips / "same.mp4", clips / "black.mp4"]
    done = subprocess.run(
        [*map(str, [*command, *videos])], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "black: frames 6" in done.stdout, done.stderr
