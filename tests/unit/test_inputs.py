"""Digests of a video's inputs, which ranks compare: different inputs have different digests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from wan.media.audio import Audio
from wan.tasks import speech2video, vace
from wan.tasks.base import Inputs


def test_each_file_counts(tmp_path: Path) -> None:
    """A byte more in any file changes the digest; another folder does not."""

    def compute_digest(folder: str, changed: str = "") -> str:
        (tmp_path / folder).mkdir()
        paths = [tmp_path / folder / name for name in ("a", "b")]
        for path in paths:
            path.write_text(f"{path.name} changed" if path.name == changed else path.name)
        return Inputs(files=(*paths,)).compute_digests()["files"]

    digests = compute_digest("1"), compute_digest("2", "a"), compute_digest("3", "b")
    assert len({*digests}) == 3 and compute_digest("4") == digests[0]


def test_values_in_memory_count_too() -> None:
    """Audio samples, pixels and tensors; VACE's reference pictures in memory, and their order."""
    pictures = [Image.new("RGB", (20, 30), (grey,) * 3) for grey in (60, 200)]
    values, samples = torch.zeros(2, 3), np.ones(9, np.float32)
    audio, louder = (Audio(Path("voice.wav"), scale * samples) for scale in (1, 1.5))
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
