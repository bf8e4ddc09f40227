"""Features of videos of clips only: clips on disk, and resumed runs."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import Tiny, slow
from tests.dist import Ranks, torchrun
from tests.frames import follow_file
from tests.tasks.conftest import read_frames, run_generate
from tests.tasks.tasks import QUICK
from wan.cli import main as generate

PROMPTS = ["one", "two", "three"]


@pytest.fixture(scope="module")
def start(tiny: Tiny, image_path: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command line without prompts. Networks are kept, because loading them takes longest."""
    image = shutil.copy(image_path, tmp_path_factory.mktemp("image") / "picture.png")
    argv = ["--task", "i2v-A14B", "--ckpt_dir", tiny("i2v-A14B"), "--image", image]
    argv += ["--size", "48*32", "--frame_num", "9", "--chain", "latent", *QUICK]
    argv += ["--sample_steps", "1", "--sample_guide_scale", "1", "--offload_model", "false"]
    return [*map(str, argv)]


@pytest.fixture(scope="module")
def asked(start: list[str]) -> list[str]:
    return [*start, "--clip_prompts", *PROMPTS]


@pytest.fixture(scope="module")
def kept(asked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The video, with its clips kept on disk."""
    out = tmp_path_factory.mktemp("kept") / "v.mp4"
    assert run_generate(*asked, "--save_file", out, "--save_latents") == 0
    return out


def copy_clips(kept: Path, out: Path) -> None:
    shutil.copytree(kept.with_suffix(".clips"), out.with_suffix(".clips"))


def test_a_video_of_clips(kept: Path) -> None:
    """9 frames, and 4 more for each further clip."""
    assert read_frames(kept).shape == (9 + 2 * 4, 32, 48, 3)
    assert sorted(path.name for path in kept.parent.iterdir()) == ["v.clips", "v.json", "v.mp4"]
    record = json.loads(kept.with_suffix(".json").read_text())
    assert record["video"]["frames"] == 17 and record["seed"] == 7
    assert record["settings"]["clip_prompts"] == PROMPTS
    assert (record["settings"]["num_clip"], record["settings"]["chain"]) == (3, "latent")


def test_a_killed_run_is_resumed(asked: list[str], kept: Path, tmp_path: Path) -> None:
    """Its stream, which does not change the video, begins with the clips of the killed run."""
    out = tmp_path / "v.mp4"
    argv, clips = [*asked, "--save_file", str(out)], out.with_suffix(".clips")
    with Ranks([{}], generate.main, argv) as killed:
        killed.wait_for_output(0, "Clip 3 of 3")
        killed.processes[0].kill()
        assert killed.wait_for_exit() == [-signal.SIGKILL]
    mtimes_before = {path.name: path.stat().st_mtime_ns for path in clips.glob("000[12].*")}
    assert len(mtimes_before) == 4 and not out.exists()
    copy = tmp_path / "copy.mp4"
    with follow_file(out.with_suffix(".stream.mp4"), copy):
        assert run_generate(*argv, "--save_latents", "--stream") == 0
    assert out.read_bytes() == kept.read_bytes() and not out.with_suffix(".stream.mp4").exists()
    frames, expected = (read_frames(path).astype(int) for path in (copy, out))
    assert frames.shape == expected.shape and np.abs(frames - expected).mean() < 12  # noise
    mtimes_after = {path.name: path.stat().st_mtime_ns for path in clips.glob("000[12].*")}
    assert mtimes_after == mtimes_before  # the finished clips were not made again


def test_a_damaged_clip_is_made_again(asked: list[str], kept: Path, tmp_path: Path) -> None:
    """Of other changes tests/cli/test_kept_work.py has a table."""
    out = tmp_path / "v.mp4"
    copy_clips(kept, out)
    state = out.with_suffix(".clips") / "0002.safetensors"
    state.write_bytes(state.read_bytes()[:-8])
    assert run_generate(*asked, "--save_file", out) == 0
    assert out.read_bytes() == kept.read_bytes()
    assert not out.with_suffix(".clips").exists()


def _write_notes(folder: Path) -> None:
    folder.mkdir()
    (folder / "notes.txt").write_text("precious")


def _link_elsewhere(folder: Path) -> None:
    folder.with_name("elsewhere").mkdir()
    folder.symlink_to("elsewhere")


FOREIGN: dict[str, Callable[[Path], object]] = {
    "a file": lambda folder: folder.write_text("precious"),
    "a link": _link_elsewhere,
    "only notes": _write_notes,
    "no clip": lambda folder: (folder / "0001.mp4").write_text("precious"),
    "no state": lambda folder: (folder / "0002.safetensors").write_text("precious"),
    "a link where a clip may be written": lambda folder: (folder / "0009.mp4").symlink_to("x"),
}


@pytest.mark.parametrize("change", FOREIGN)
def test_a_foreign_folder_of_clips(
    change: str, asked: list[str], kept: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The folder is refused before generation, and is not changed."""
    if change not in ("a file", "a link", "only notes"):
        copy_clips(kept, tmp_path / "v.mp4")
    FOREIGN[change](tmp_path / "v.clips")
    mtimes_before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert run_generate(*asked, "--save_file", tmp_path / "v.mp4") == 2
    assert {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == mtimes_before
    assert len(capfd.readouterr().err.splitlines()) == 1


def test_other_files_in_the_folder_of_clips_stay(
    asked: list[str], kept: Path, tmp_path: Path
) -> None:
    out, folder = tmp_path / "v.mp4", tmp_path / "v.clips"
    copy_clips(kept, out)
    (folder / "notes.txt").write_text("precious")
    assert run_generate(*asked, "--save_file", out) == 0
    assert [path.read_text() for path in folder.iterdir()] == ["precious"]


@pytest.mark.parametrize("offload", ["true", slow("false"), slow("block")])
@pytest.mark.parametrize("overlap", [[], slow(["--overlap_decoding"])])
def test_overlapped_decoding_and_offloading_change_no_bit(
    overlap: list[str], offload: str, asked: list[str], kept: Path, tmp_path: Path
) -> None:
    """Of overlapped decoding tests/unit/test_long_videos.py has a quick one."""
    flags = [*overlap, "--offload_model", offload, "--save_file", tmp_path / "v.mp4"]
    assert run_generate(*asked, *flags) == 0
    assert (tmp_path / "v.mp4").read_bytes() == kept.read_bytes()


@pytest.mark.slow
@pytest.mark.dist
def test_ranks_go_on_with_a_video_of_one_process(
    start: list[str], kept: Path, tmp_path: Path
) -> None:
    out = tmp_path / "v.mp4"
    argv = [*start, "--save_latents", "--save_file", out, "--clip_prompts"]
    assert run_generate(*argv, *PROMPTS[:2]) == 0
    result = torchrun(2, *argv, *PROMPTS, "--ulysses_size", "2")
    assert result.returncode == 0 and "2 of 3 clips are in" in result.stdout + result.stderr
    assert np.abs(read_frames(out).astype(int) - read_frames(kept)).mean() < 0.05


def test_a_prompt_file(start: list[str], kept: Path, tmp_path: Path) -> None:
    """Lines of several clips and of repeated clips; a contradictory line is refused."""
    lines = [
        {"prompt": PROMPTS[:2], "save_file": "long.mp4"},
        {"prompt": "one", "num_clip": 2, "save_file": "two.mp4"},
        {"prompt": ["one", "two"], "num_clip": 3},
    ]
    (tmp_path / "l.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out"
    assert run_generate(*start, "--prompt_file", tmp_path / "l.jsonl", "--save_file", out) == 1
    expected, two = read_frames(kept), read_frames(out / "two.mp4")
    assert (read_frames(out / "long.mp4") == expected[:13]).all()
    assert len(two) == 13 and (two[:9] == expected[:9]).all()
    refused = json.loads((out / "l.summary.json").read_text())["refused"]
    assert list(refused) == ["3"] and "num_clip" in refused["3"]
