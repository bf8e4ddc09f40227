"""What to generate: one video, with every value resolved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from wan.settings import values
from wan.settings.errors import InputError
from wan.settings.geometry import check_size, size_covered, size_from_area, token_grid
from wan.settings.presets import TRAIN_TIMESTEPS, Preset

SOLVERS = ("unipc", "dpm++")
READERS: dict[str, values.Reader] = {
    "prompt": values.text,
    "negative_prompt": values.text,
    "size": values.size,
    "frame_num": values.frame_num,
    "sample_steps": values.integer(1, TRAIN_TIMESTEPS),
    "sample_shift": values.positive(1000),
    "sample_solver": values.choice(*SOLVERS),
    "guide_scale": values.guide_scale,
    "noise_device": values.choice("cpu", "device"),
}
"""How each field is checked, from Python and (under its flag's name) from the command line."""


@dataclass(frozen=True)
class Request:
    """One video. `size` is (width, height) in pixels; with a picture only its area counts.

    guide_scale: (low noise, high noise). boundary: share of the 1000 training timesteps from which
    the high-noise expert works, None for a single network. seed: non-negative.
    Raises InputError when the values do not fit the task.
    """

    preset: Preset
    prompt: str
    negative_prompt: str
    image_size: tuple[int, int] | None
    size: tuple[int, int]
    frame_num: int
    sample_steps: int
    sample_shift: float
    sample_solver: str
    guide_scale: tuple[float, float]
    boundary: float | None
    seed: int
    noise_device: str = "cpu"

    def __post_init__(self) -> None:
        for name, read in READERS.items():
            object.__setattr__(self, name, read(name, getattr(self, name)))
        low, high = self.guide_scale
        if self.boundary is None and low != high:
            raise InputError(
                f"--sample_guide_scale is {low:g},{high:g}, but {self.preset.task} has one "
                "network; give one number."
            )
        if self.image_size is None:
            check_size(self.preset, self.size, self.frame_num)
        else:
            check_size(self.preset, self.video_size, self.frame_num)

    @property
    def video_size(self) -> tuple[int, int]:
        """(width, height) of the video that comes out."""
        if self.image_size is None:
            return self.size
        area = self.size[0] * self.size[1]
        rule = size_from_area if self.preset.kind == "i2v" else size_covered
        return rule(self.preset, self.image_size, area)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Tokens along frame, height and width."""
        return token_grid(self.preset, self.video_size, self.frame_num)


def check_image(path: Path) -> tuple[int, int]:
    """Width and height of a readable still picture, as it is shown (EXIF rotation applied)."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    if not path.is_file():
        raise InputError(f"--image {path} does not exist or is not a file; give a picture.")
    if path.stat().st_size == 0:
        raise InputError(f"--image {path} is empty (0 bytes); give a picture.")
    try:
        with Image.open(path) as image:
            frames = getattr(image, "n_frames", 1)
            if frames > 1:
                raise InputError(
                    f"--image {path} is animated ({frames} frames); give a still picture."
                )
            image.load()
            return ImageOps.exif_transpose(image).size
    except (OSError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise InputError(
            f"--image {path} cannot be read as a picture ({error}); give a PNG or JPEG."
        ) from None
