"""Features of animate-14B only: its folder, relighting, replacing a character in a scene."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.conftest import Refusals
from tests.tasks.conftest import Asked
from tests.tasks.tasks import moving_box

pytestmark = pytest.mark.xdist_group("tasks")


@pytest.fixture
def one(asked: Callable[[str], Asked]) -> Asked:
    return asked("animate")


def test_its_record(one: Asked) -> None:
    settings = json.loads(one.video.with_suffix(".json").read_text())["settings"]
    assert (settings["num_clip"], settings["frame_num"], settings["refert_num"]) == (2, 5, 1)


@pytest.mark.slow
def test_a_relighting_lora(one: Asked, tmp_path: Path) -> None:
    """A LoRA of zeros changes no bit, and it is in the record."""
    folder, out = tmp_path / "checkpoint", tmp_path / "v.mp4"
    shutil.copytree(one.folder, folder)
    pair = {"blocks.0.ffn.0.lora_A.weight": torch.ones(4, 240)}
    pair["blocks.0.ffn.0.lora_B.weight"] = torch.zeros(480, 4)
    torch.save({"state_dict": pair}, folder / "relighting_lora.ckpt")
    made = one.made(out, "--ckpt_dir", folder, "--use_relighting_lora")
    assert (made == one.frames).all()
    record = json.loads(out.with_suffix(".json").read_text())
    assert record["settings"]["use_relighting_lora"]
    assert record["lora"]["dit"][0]["file"] == str(folder / "relighting_lora.ckpt")


@pytest.mark.slow
def test_a_character_is_put_into_a_scene(one: Asked, tmp_path: Path) -> None:
    made = one.made(tmp_path / "v.mp4", "--replace_flag")
    assert made.shape == one.frames.shape and (made != one.frames).any()


Change = Callable[[Path], object]


def removed(*names: str) -> Change:
    def change(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return change


def replaced(name: str, content: bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(content)


def redrawn(*names: str, size: tuple[int, int] = (48, 32), count: int = 8) -> Change:
    """Rewrites some videos with another size or length."""

    def change(folder: Path) -> None:
        for name in names:
            moving_box(folder / name, (512, 512) if name == FACE else size, count)

    return change


def a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("x")


def a_folder_for_a_picture(folder: Path) -> None:
    (folder / REF).unlink()
    (folder / REF).mkdir()


POSE, FACE, REF = "src_pose.mp4", "src_face.mp4", "src_ref.png"
BG, MASK = "src_bg.mp4", "src_mask.mp4"
FOLDERS: dict[str, Change] = {
    "no folder": shutil.rmtree,
    "a file": a_file,
    "empty": removed(POSE, FACE, REF, BG, MASK),
    "no pose": removed(POSE),
    "no face": removed(FACE),
    "no picture": removed(REF),
    "no background": removed(BG),
    "no mask": removed(MASK),
    "empty pose": replaced(POSE, b""),
    "empty mask": replaced(MASK, b""),
    "pose is text": replaced(POSE, b"x" * 999),
    "face is text": replaced(FACE, b"x" * 999),
    "picture is text": replaced(REF, b"x" * 999),
    "picture is empty": replaced(REF, b""),
    "picture is a folder": a_folder_for_a_picture,
    "sides": redrawn(POSE, size=(48, 16)),
    "small mask": redrawn(MASK, size=(32, 32)),
    "small face": lambda folder: shutil.copy(folder / POSE, folder / FACE),
    "short face": redrawn(FACE, count=6),
    "long background": redrawn(BG, count=9),
    "one frame": redrawn(POSE, FACE, BG, MASK, count=1),
    "truncated": lambda folder: replaced(POSE, (folder / POSE).read_bytes()[:300])(folder),
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


def test_what_is_refused(
    one: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusals: Refusals
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
