"""Images in, videos and latents out; files are complete or absent."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps
from safetensors.torch import load_file, save
from torch import Tensor


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A temporary name beside `path` that becomes `path` when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def to_uint8(frames_3FHW: Tensor) -> Tensor:
    """[F,H,W,3] uint8 from [-1, 1], scaled and truncated as the official code does."""
    scaled = frames_3FHW.float().clamp(-1, 1).add(1).div(2).mul(255)
    return scaled.to(torch.uint8).permute(1, 2, 3, 0).cpu()


def save_video(video_3FHW: Tensor, path: Path, fps: float) -> None:
    """Write an mp4 with the official encoder settings: libx264, quality 8, yuv420p.

    The sides must be multiples of 16, which all sizes of the models are; the encoder would rescale
    others.
    """
    import imageio

    with written_whole(path) as temporary:
        writer = imageio.get_writer(temporary, format="FFMPEG", fps=fps, codec="libx264", quality=8)
        try:
            for frame in video_3FHW.split(1, dim=1):
                writer.append_data(to_uint8(frame)[0].numpy())
        finally:
            writer.close()
        # The encoder's exit code is not looked at by the library; a full disk shows only here.
        count = _frames_in(temporary)
        if count != video_3FHW.shape[1]:
            raise OSError(
                f"{path} could not be written: the encoder kept {count} of "
                f"{video_3FHW.shape[1]} frames; is the disk full?"
            )


def _frames_in(path: Path) -> int:
    """Frames of a video file; 0 for a file that is none."""
    import imageio_ffmpeg

    try:
        return int(imageio_ffmpeg.count_frames_and_secs(path)[0])
    except (OSError, RuntimeError):
        return 0


def read_image(path: Path) -> Image.Image:
    """The image in RGB, turned as its EXIF data says it is shown."""
    with Image.open(path) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


def save_latents(latents_Zfhw: Tensor, path: Path, settings: dict[str, Any]) -> None:
    """Latents with the settings of their run, from which `--decode_latents` continues."""
    with written_whole(path) as temporary:
        tensors = {"latents": latents_Zfhw.cpu().contiguous()}
        temporary.write_bytes(save(tensors, metadata={"settings": json.dumps(settings)}))


def load_latents(path: Path) -> Tensor:
    """Latents [Z,f,h,w] that `save_latents` wrote."""
    return load_file(path)["latents"]
