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
def start(tiny: Tiny, image_path: Path) -> list[str]:
    """The command line without prompts."""
    argv = ["--task", "i2v-A14B", "--ckpt_dir", tiny("i2v-A14B"), "--image", image_path]
    argv += ["--size", "48*32", "--frame_num", "9", "--chain", "latent", *QUICK]
    argv += ["--sample_steps", "1", "--sample_guide_scale", "1"]
    return [*map(str, argv)]


@pytest.fixture(scope="module")
def asked(start: list[str]) -> list[str]:
    return [*start, "--clip_prompts", *PROMPTS]


@pytest.fixture(scope="module")
def whole(asked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "v.mp4"
    assert run_generate(*asked, "--save_file", out) == 0
    return out


@pytest.fixture(scope="module")
def kept(asked: list[str], whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same video, with its clips kept on disk."""
    out = tmp_path_factory.mktemp("kept") / "v.mp4"
    assert run_generate(*asked, "--save_file", out, "--save_latents") == 0
    assert out.read_bytes() == whole.read_bytes()
    return out


def test_a_video_of_clips(whole: Path) -> None:
    """9 frames, and 4 more for each further clip."""
    assert read_frames(whole).shape == (9 + 2 * 4, 32, 48, 3)
    assert sorted(path.name for path in whole.parent.iterdir()) == ["v.json", "v.mp4"]
    record = json.loads(whole.with_suffix(".json").read_text())
    assert record["video"]["frames"] == 17 and record["seed"] == 7
    assert record["settings"]["clip_prompts"] == PROMPTS
    assert (record["settings"]["num_clip"], record["settings"]["chain"]) == (3, "latent")


def test_a_killed_run_is_resumed(asked: list[str], whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "v.mp4"
    argv, clips = [*asked, "--save_file", str(out)], out.with_suffix(".clips")
    with Ranks([{}], generate.main, argv) as killed:
        killed.wait_for_output(0, "Clip 3 of 3")
        killed.processes[0].kill()
        assert killed.wait_for_exit() == [-signal.SIGKILL]
    mtimes_before = {path.name: path.stat().st_mtime_ns for path in clips.glob("000[12].*")}
    assert len(mtimes_before) == 4 and not out.exists()
    assert run_generate(*argv, "--save_latents") == 0
    assert out.read_bytes() == whole.read_bytes()
    mtimes_after = {path.name: path.stat().st_mtime_ns for path in clips.glob("000[12].*")}
    assert mtimes_after == mtimes_before  # the finished clips were not made again


def test_more_clips_of_an_existing_video(
    start: list[str], whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "v.mp4"
    argv = [*start, "--save_latents", "--save_file", out, "--clip_prompts"]
    assert run_generate(*argv, *PROMPTS[:2]) == 0
    assert read_frames(out).shape[0] == 13
    assert run_generate(*argv, *PROMPTS) == 0
    assert "2 of 3 clips are in" in capfd.readouterr().out
    assert (read_frames(out) == read_frames(whole)).all()
    assert run_generate(*argv, "one", "other", "three") == 0
    assert "clip 2 is generated again, because it differs in prompt" in capfd.readouterr().out
    assert (read_frames(out)[:9] == read_frames(whole)[:9]).all()
    assert (read_frames(out)[9:] != read_frames(whole)[9:17]).any()


def test_a_changed_image_makes_clips_again(
    start: list[str], image_path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Another image under the same name does; another placement of the weights does not."""
    image = tmp_path / "picture.png"
    shutil.copy(image_path, image)
    argv = [*start, "--image", image, "--save_latents", "--save_file", tmp_path / "v.mp4"]
    argv += ["--clip_prompts", *PROMPTS[:2]]
    assert run_generate(*argv) == 0
    assert run_generate(*argv, "--offload_model", "block") == 0
    assert "2 of 2 clips are in" in capfd.readouterr().out
    Image.new("RGB", (96, 64), (200, 40, 40)).save(image)
    assert run_generate(*argv) == 0
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
    change: str, asked: list[str], whole: Path, kept: Path, tmp_path: Path
) -> None:
    """The video equals that of an undisturbed run after each change on disk."""
    out = tmp_path / "v.mp4"
    shutil.copytree(kept.with_suffix(".clips"), out.with_suffix(".clips"))
    name, make = CHANGES[change]
    make(out.with_suffix(".clips") / name)
    assert run_generate(*asked, "--save_file", out) == 0
    assert out.read_bytes() == whole.read_bytes()
    assert not out.with_suffix(".clips").exists()


def test_of_large_states_the_last_one_is_kept(
    start: list[str], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """The last clip can be continued. Without it, nothing is left from which to continue."""
    out, states = tmp_path / "v.mp4", tmp_path / "v.clips"
    argv = [*start, "--save_latents", "--save_file", out, "--clip_prompts"]
    monkeypatch.setattr("wan.app.clip_store._MAX_KEPT_STATE", 0)
    assert run_generate(*argv, *PROMPTS[:2]) == 0
    assert run_generate(*argv, *PROMPTS) == 0
    assert "2 of 3 clips are in" in capfd.readouterr().out
    assert [len(load_file(states / f"000{n}.safetensors")) for n in (1, 2, 3)] == [0, 0, 1]
    (states / "0003.mp4").unlink()
    assert run_generate(*argv, *PROMPTS) == 0
    assert "clips 1 to 2 are generated again" in capfd.readouterr().out
    assert (read_frames(out) == read_frames(whole)).all()


@pytest.mark.parametrize("name", ["0002.safetensors", "0001.mp4", "only notes", "a file", "a link"])
def test_a_foreign_folder_of_clips(
    name: str, asked: list[str], kept: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The folder is refused before generation, and is not changed."""
    folder = tmp_path / "v.clips"
    if name == "a file":
        folder.write_text("precious")
    elif name == "a link":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    elif name == "only notes":
        folder.mkdir()
        (folder / "notes.txt").write_text("precious")
    else:
        shutil.copytree(kept.with_suffix(".clips"), folder)
        (folder / name).write_text("precious")
    mtimes_before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert run_generate(*asked, "--save_file", tmp_path / "v.mp4") == 2
    assert {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == mtimes_before
    assert len(capfd.readouterr().err.splitlines()) == 1


def test_other_files_in_the_folder_of_clips_stay(
    asked: list[str], whole: Path, kept: Path, tmp_path: Path
) -> None:
    out, folder = tmp_path / "v.mp4", tmp_path / "v.clips"
    shutil.copytree(kept.with_suffix(".clips"), folder)
    (folder / "notes.txt").write_text("precious")
    (folder / "0009.mp4").symlink_to(whole)
    assert run_generate(*asked, "--save_file", out) == 2  # a link where a clip may be written
    (folder / "0009.mp4").unlink()
    assert run_generate(*asked, "--save_file", out) == 0
    assert [path.read_text() for path in folder.iterdir()] == ["precious"]


@pytest.mark.parametrize(
    "flags", [["--offload_model", "false"], slow([]), slow(["--offload_model", "block"])], ids=str
)
def test_overlapped_decoding_changes_no_bit(
    flags: list[str], asked: list[str], whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "v.mp4"
    assert run_generate(*asked, "--overlap_decoding", *flags, "--save_file", out) == 0
    assert (read_frames(out) == read_frames(whole)).all()


@pytest.mark.slow
@pytest.mark.dist
def test_ranks_go_on_with_a_video_of_one_process(
    start: list[str], whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "v.mp4"
    argv = [*start, "--save_latents", "--save_file", out, "--clip_prompts"]
    assert run_generate(*argv, *PROMPTS[:2]) == 0
    result = torchrun(2, *argv, *PROMPTS, "--ulysses_size", "2")
    assert result.returncode == 0 and "2 of 3 clips are in" in result.stdout + result.stderr
    assert np.abs(read_frames(out).astype(int) - read_frames(whole)).mean() < 0.05


def test_a_prompt_file(start: list[str], whole: Path, tmp_path: Path) -> None:
    """Lines of several clips and of repeated clips; a contradictory line is refused."""
    lines = [
        {"prompt": PROMPTS, "save_file": "long.mp4"},
        {"prompt": "one", "clips": 2, "save_file": "two.mp4"},
        {"prompt": ["one", "two"], "clips": 3},
    ]
    (tmp_path / "l.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out"
    assert run_generate(*start, "--prompt_file", tmp_path / "l.jsonl", "--save_file", out) == 1
    assert (read_frames(out / "long.mp4") == read_frames(whole)).all()
    assert read_frames(out / "two.mp4").shape[0] == 13
    refused = json.loads((out / "l.summary.json").read_text())["refused"]
    assert list(refused) == ["3"] and "num_clip" in refused["3"]
