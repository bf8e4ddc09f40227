"""Features of animate-14B only: its folder, relighting, replacing a character in a scene."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Refusals
from tests.tasks.conftest import TaskRun
from tests.tasks.tasks import write_moving_box

pytestmark = pytest.mark.xdist_group("tasks")


@pytest.fixture
def one(asked: Callable[[str], TaskRun]) -> TaskRun:
    return asked("animate")


@pytest.mark.slow
def test_a_character_is_put_into_a_scene(one: TaskRun, tmp_path: Path) -> None:
    output = one.make_frames(tmp_path / "v.mp4", "--replace_flag")
    assert output.shape == one.frames.shape and (output != one.frames).any()


Change = Callable[[Path], object]


def remove_files(*names: str) -> Change:
    def change(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return change


def replace_file(name: str, content: bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(content)


def redraw_videos(*names: str, size: tuple[int, int] = (48, 32), count: int = 8) -> Change:
    """Rewrites some videos with another size or length."""

    def change(folder: Path) -> None:
        for name in names:
            write_moving_box(folder / name, (512, 512) if name == FACE else size, count)

    return change


def replace_folder_by_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("x")


def replace_picture_by_folder(folder: Path) -> None:
    (folder / REF).unlink()
    (folder / REF).mkdir()


POSE, FACE, REF = "src_pose.mp4", "src_face.mp4", "src_ref.png"
BG, MASK = "src_bg.mp4", "src_mask.mp4"
FOLDERS: dict[str, Change] = {
    "no folder": shutil.rmtree,
    "a file": replace_folder_by_file,
    "empty": remove_files(POSE, FACE, REF, BG, MASK),
    "no pose": remove_files(POSE),
    "no face": remove_files(FACE),
    "no picture": remove_files(REF),
    "no background": remove_files(BG),
    "no mask": remove_files(MASK),
    "empty pose": replace_file(POSE, b""),
    "empty mask": replace_file(MASK, b""),
    "pose is text": replace_file(POSE, b"x" * 999),
    "face is text": replace_file(FACE, b"x" * 999),
    "picture is text": replace_file(REF, b"x" * 999),
    "picture is empty": replace_file(REF, b""),
    "picture is a folder": replace_picture_by_folder,
    "sides": redraw_videos(POSE, size=(48, 16)),
    "small mask": redraw_videos(MASK, size=(32, 32)),
    "small face": lambda folder: shutil.copy(folder / POSE, folder / FACE),
    "short face": redraw_videos(FACE, count=6),
    "long background": redraw_videos(BG, count=9),
    "one frame": redraw_videos(POSE, FACE, BG, MASK, count=1),
    "truncated": lambda folder: replace_file(POSE, (folder / POSE).read_bytes()[:300])(folder),
}
FLAGS = {
    "another size": ["--size", "64*64"],
    "as many frames before as in a clip": ["--refert_num", "5"],
    "frames before": ["--refert_num", "77"],
    "an image": ["--image", "a.png"],
    "a sound": ["--audio", "a.wav"],
    "latents": ["--save_latents"],
    "frames of s2v": ["--infer_frames", "8"],
    "masks": ["--use_rainfusion"],
    "no relighting LoRA": ["--use_relighting_lora"],
}


def test_refusals(
    one: TaskRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusals: Refusals
) -> None:
    monkeypatch.chdir(tmp_path)
    cases = {}
    for kind, change in FOLDERS.items():
        folder = tmp_path / kind
        shutil.copytree(one.inputs["--src_root_path"], folder)
        change(folder)
        cases[kind] = [*one.argv, "--src_root_path", kind, "--replace_flag"]
    refusals("animate: folders", cases)
    refusals("animate: flags", {case: [*one.argv, *flags] for case, flags in FLAGS.items()})
    other = ["--task", "t2v-1.3B", "--src_root_path", "x"]
    refusals("animate: with another task", {"its folder": other})
