"""Digests of a video's inputs, which ranks compare: different inputs have different digests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.inputs import copy_changed_file
from tools import make_character, make_sound
from wan.media import audio as media
from wan.tasks import animate, speech2video, vace
from wan.tasks.base import Inputs


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of Animate's preprocessing, with a sound and two pictures in it."""
    folder = tmp_path_factory.mktemp("inputs") / "files"
    make_character.write_character_folder(folder, (48, 32), 5)
    make_sound.write_wav(folder / "voice.wav", 1.3)
    for name, grey in (("a.png", 60), ("b.png", 200)):
        Image.new("RGB", (20, 30), (grey,) * 3).save(folder / name)
    return folder


def read_vace_inputs(folder: Path) -> Inputs:
    video, mask = folder / "src_bg.mp4", folder / "src_mask.mp4"
    return vace.read_vace_files(video, mask, [folder / "a.png", folder / "b.png"])


INPUT_MAKERS: dict[str, tuple[Callable[[Path], Inputs], tuple[str, ...]]] = {
    "vace": (read_vace_inputs, ("src_bg.mp4", "src_mask.mp4", "a.png", "b.png")),
    "animate": (
        lambda folder: animate.read_animate_folder(folder, replace_character=True),
        animate.ANIMATE_FILES,
    ),
    "pose": (
        lambda folder: speech2video.SpeechInputs(files=(folder / "src_pose.mp4",)),
        ("src_pose.mp4",),
    ),
}


def test_each_file_counts(files: Path, tmp_path: Path) -> None:
    """A byte more in any file changes the digest; another folder does not."""
    for name, (make, parts) in INPUT_MAKERS.items():
        digests = [make(files).compute_digests()["files"]]
        unchanged = copy_changed_file(files, tmp_path / name / "copy")
        assert make(unchanged).compute_digests()["files"] == digests[0]
        for part in parts:
            copy = copy_changed_file(files, tmp_path / name / part, part)
            digests.append(make(copy).compute_digests()["files"])
        assert len({*digests}) == 1 + len(parts), name


def test_values_in_memory_count_too(files: Path) -> None:
    """Audio samples, pixels and tensors; VACE's reference pictures in memory, and their order."""
    pictures = [Image.open(files / name).convert("RGB") for name in ("a.png", "b.png")]
    values = torch.zeros(2, 3)
    audio = media.read_audio(files / "voice.wav")
    louder = media.Audio(audio.path, audio.samples * np.float32(1.5))
    pairs: list[tuple[str, Any, Any]] = [
        ("reference_images", tuple(pictures), tuple(pictures[::-1])),
        ("reference_images", tuple(pictures), tuple(pictures[:1])),
        ("audio", audio, louder),
        *((name, *pictures) for name in ("image", "last_image")),
    ]
    tensors = ("prompt_embeds", "negative_prompt_embeds", "initial_latents", "clip_state")
    pairs += [(name, values, values + 1) for name in tensors]
    pairs += [(name, values, values.T.contiguous()) for name in tensors]
    pairs += [(name, values, values.double()) for name in tensors]
    for name, first, second in pairs:
        make = {"reference_images": vace.VaceInputs, "audio": speech2video.SpeechInputs}.get(
            name, Inputs
        )
        digests = [
            make(**{name: value}).compute_digests()[name] for value in (first, first, second)
        ]
        assert digests[0] == digests[1] != digests[2], name
        assert name not in make().compute_digests()
