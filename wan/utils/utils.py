"""The official helpers around a video: sizes, masks, files."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wan.media.audio import add_audio
from wan.media.video_writer import save_video as save_one_video
from wan.settings.errors import InputError
from wan.settings.values import switch
from wan.tasks.video2video import best_output_size as best_output_size
from wan.utils.files import VIDEO_KIND, OutputKind, write_output

_IMAGE_KIND = OutputKind("an image", lambda path: path.suffix.lower() in (".png", ".jpg", ".jpeg"))


def save_video(
    tensor: Tensor,
    save_file: str | Path | None = None,
    fps: float = 30,
    suffix: str = ".mp4",
    nrow: int = 8,
    normalize: bool = True,
    value_range: tuple[float, float] = (-1, 1),
) -> None:
    """Writes a video [1,3,F,H,W] to an mp4, with the official frames; errors are raised.

    Args:
        save_file: The mp4; needed.
        suffix, nrow: No effect: one video, as an mp4.
        normalize: Only True.
        value_range: The values that are black and white.

    Raises:
        NotImplementedError: There are several videos, or `normalize` is False.
        InputError, WriteError: As for `wan.save_video`.
    """
    if save_file is None:
        raise InputError("save_file", None, "is missing", "name an mp4")
    video = _normalize(tensor, normalize, value_range)
    save_one_video(video * 2 - 1 if value_range != (-1, 1) else tensor[0], save_file, fps)


def save_image(
    tensor: Tensor,
    save_file: str | Path,
    nrow: int = 8,
    normalize: bool = True,
    value_range: tuple[float, float] = (-1, 1),
) -> str:
    """Writes an image [1,3,H,W] to a PNG or JPEG, rounded; returns the name of the file.

    The other arguments and the errors are those of `save_video`.
    """
    from PIL import Image

    path = Path(save_file)
    if not _IMAGE_KIND.matches(path):
        raise InputError("save_file", path, "must end in .png, .jpg or .jpeg")
    pixels = _normalize(tensor, normalize, value_range).mul(255).add(0.5).clamp(0, 255).byte()
    with write_output(path, _IMAGE_KIND) as temporary:
        Image.fromarray(pixels.permute(1, 2, 0).cpu().numpy()).save(temporary)
    return str(save_file)


def _normalize(tensor: Tensor, normalize: bool, value_range: tuple[float, float]) -> Tensor:
    """Returns the only item of a batch in [0, 1]."""
    if len(tensor) != 1:
        raise NotImplementedError(f"There are {len(tensor)} in a batch; save them one by one.")
    if not normalize:
        raise NotImplementedError("normalize=False is not supported; scale the values first.")
    low, high = value_range
    return (tensor[0].float().clamp(low, high) - low) / (high - low)


def str2bool(v: Any) -> bool:
    """Reads yes, true, t, y, 1 or their opposites, in any case, for argparse."""
    try:
        return bool(switch("", v))
    except InputError as error:
        raise argparse.ArgumentTypeError("Boolean value expected (True/False)") from error


def masks_like(
    tensor: list[Tensor], zero: bool = False, generator: object = None, p: float = 0.2
) -> tuple[list[Tensor], list[Tensor]]:
    """Makes two lists of masks of ones; with `zero` the first latent frame of each is 0.

    Args:
        tensor: Latents [Z,f,h,w].
        generator: None; noise on the masks is for training.
        p: No effect.
    """
    if generator is not None:
        raise NotImplementedError("generator is for training, which is not supported; drop it.")
    masks = [torch.ones_like(latent) for latent in tensor]
    if zero:
        for mask in masks:
            mask[:, 0] = 0
    return masks, [mask.clone() for mask in masks]


def merge_video_audio(video_path: str | Path, audio_path: str | Path) -> None:
    """Adds the audio of a file to an mp4 of this package, which it replaces; the shorter one ends.

    Raises:
        WriteError, OSError: The mp4 is none of this package, or ffmpeg failed.
    """
    with write_output(Path(video_path), VIDEO_KIND) as temporary:
        add_audio(Path(video_path), Path(audio_path), temporary)
