"""Features of videos of clips only: clips on disk, and resumed runs."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.conftest import Tiny, slow
from tests.dist import Ranks, torchrun
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
    out = tmp_path / "v.mp4"
    argv, clips = [*asked, "--save_file", str(out)], out.with_suffix(".clips")
    with Ranks([{}], generate.main, argv) as killed:
        killed.wait_for_output(0, "Clip 3 of 3")
        killed.processes[0].kill()
        assert killed.wait_for_exit() == [-signal.SIGKILL]
    mtimes_before = {path.name: path.stat().st_mtime_ns for path in clips.glob("000[12].*")}
    assert len(mtimes_before) == 4 and not out.exists()
    assert run_generate(*argv, "--save_latents") == 0
    assert out.read_bytes() == kept.read_bytes()
    mtimes_after = {path.name: path.stat().st_mtime_ns for path in clips.glob("000[12].*")}
    assert mtimes_after == mtimes_before  # the finished clips were not made again


def test_other_prompts_of_an_existing_video(
    start: list[str], kept: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "v.mp4"
    copy_clips(kept, out)
    argv = [*start, "--save_latents", "--save_file", out, "--clip_prompts"]
    assert run_generate(*argv, *PROMPTS, "four") == 0
    assert "3 of 4 clips are in" in capfd.readouterr().out
    expected = read_frames(kept)
    assert len(read_frames(out)) == 21 and (read_frames(out)[:17] == expected).all()
    assert run_generate(*argv, "one", "other") == 0
    assert "clip 2 is generated again, because it differs in prompt" in capfd.readouterr().out
    changed = read_frames(out)
    assert (changed[:9] == expected[:9]).all() and (changed[9:] != expected[9:13]).any()


def test_a_changed_image_makes_clips_again(
    asked: list[str], kept: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Another image under the same name does; another placement of the weights does not."""
    image, out = Path(asked[asked.index("--image") + 1]), tmp_path / "v.mp4"
    copy_clips(kept, out)
    argv = [*asked, "--save_latents", "--save_file", out]
    assert run_generate(*argv, "--offload_model", "block") == 0
    assert "3 of 3 clips are in" in capfd.readouterr().out
    original = image.read_bytes()
    try:
        Image.new("RGB", (96, 64), (200, 40, 40)).save(image)
        assert run_generate(*argv, "--clip_prompts", "one") == 0
    finally:
        image.write_bytes(original)
    reason = "because it differs in the content of --image"
    assert f"clip 1 is generated again, {reason}" in capfd.readouterr().out


def _halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def _exchange(path: Path) -> None:
    """Replaces a clip by another clip of the same run."""
    shutil.copy(path.with_name(f"0001{path.suffix}"), path)


def _alter(how: str) -> Callable[[Path], None]:
    """Returns a function that changes the tensor of a clip state and keeps its metadata."""

    def alter(path: Path) -> None:
        with safe_open(path, "pt") as file:
            metadata, end = file.metadata(), file.get_tensor("end")
        tensors = {
            "no end": {"x": end},
            "shape": {"end": torch.zeros(1, 2, 3)},
            "dtype": {"end": end.int()},
            "values": {"end": end + 1e-3},
        }
        save_file(tensors[how], path, metadata=metadata)

    return alter


CHANGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "half a state": ("0002.safetensors", _halve),
    "no clip": ("0002.mp4", Path.unlink),
    "values": ("0002.safetensors", _alter("values")),
    "no state": ("0002.safetensors", Path.unlink),
    "another state": ("0002.safetensors", _exchange),
    "another clip": ("0002.mp4", _exchange),
    **{how: ("0002.safetensors", _alter(how)) for how in ("no end", "shape", "dtype")},
}
DEFAULT = {"half a state", "no clip", "values", "another clip"}


@pytest.mark.parametrize("change", [name if name in DEFAULT else slow(name) for name in CHANGES])
def test_changed_clips_are_made_again(
    change: str, asked: list[str], kept: Path, tmp_path: Path
) -> None:
    """The video equals that of an undisturbed run after each change on disk."""
    out = tmp_path / "v.mp4"
    copy_clips(kept, out)
    name, make = CHANGES[change]
    make(out.with_suffix(".clips") / name)
    assert run_generate(*asked, "--save_file", out) == 0
    assert out.read_bytes() == kept.read_bytes()
    assert not out.with_suffix(".clips").exists()


def test_of_large_states_the_last_one_is_kept(
    start: list[str], kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """The last clip can be continued. Without it, nothing is left from which to continue."""
    out, states = tmp_path / "v.mp4", tmp_path / "v.clips"
    argv = [*start, "--save_latents", "--save_file", out, "--clip_prompts"]
    monkeypatch.setattr("wan.app.clip_store._MAX_KEPT_STATE", 0)
    assert run_generate(*argv, *PROMPTS[:1]) == 0
    assert run_generate(*argv, *PROMPTS[:2]) == 0
    assert "1 of 2 clips are in" in capfd.readouterr().out
    assert [len(load_file(states / f"000{n}.safetensors")) for n in (1, 2)] == [0, 1]
    (states / "0002.mp4").unlink()
    assert run_generate(*argv, *PROMPTS[:2]) == 0
    assert "clips 1 to 1 are generated again" in capfd.readouterr().out
    assert (read_frames(out) == read_frames(kept)[:13]).all()


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
        {"prompt": PROMPTS, "save_file": "long.mp4"},
        {"prompt": "one", "clips": 2, "save_file": "two.mp4"},
        {"prompt": ["one", "two"], "clips": 3},
    ]
    (tmp_path / "l.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out"
    assert run_generate(*start, "--prompt_file", tmp_path / "l.jsonl", "--save_file", out) == 1
    expected, two = read_frames(kept), read_frames(out / "two.mp4")
    assert (read_frames(out / "long.mp4") == expected).all()
    assert len(two) == 13 and (two[:9] == expected[:9]).all()
    refused = json.loads((out / "l.summary.json").read_text())["refused"]
    assert list(refused) == ["3"] and "num_clip" in refused["3"]
