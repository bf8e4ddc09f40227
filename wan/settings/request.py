"""Sizes: pixels, latents and tokens of a video, with the official rules for images (pure).

What to generate: one video, with every value resolved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from wan.settings import values
from wan.settings.errors import InputError
from wan.settings.presets import MAX_POSITIONS, TRAIN_TIMESTEPS, Preset


def latent_shape(preset: Preset, size: tuple[int, int], frame_num: int) -> tuple[int, int, int]:
    """(frames, height, width) of the latents of frame_num frames of size (width, height)."""
    t, h, w = preset.vae_stride
    return (frame_num - 1) // t + 1, size[1] // h, size[0] // w


def token_grid(preset: Preset, size: tuple[int, int], frame_num: int) -> tuple[int, int, int]:
    """(frames, height, width) in tokens."""
    f, h, w = (
        n // p
        for n, p in zip(latent_shape(preset, size, frame_num), preset.patch_size, strict=True)
    )
    return f, h, w


def check_size(preset: Preset, size: tuple[int, int], frame_num: int, name: str = "--size") -> None:
    """Width and height must be whole tokens, and no axis longer than the network's positions."""
    width, height = size
    multiple = preset.size_multiple
    if width % multiple or height % multiple:
        near = "*".join(str(max(multiple, round(n / multiple) * multiple)) for n in size)
        raise InputError(
            f"{name} is {width}*{height}; for {preset.task} width and height must be multiples of "
            f"{multiple}: try {near}."
        )
    for axis, tokens in zip(
        ("frames", "height", "width"), token_grid(preset, size, frame_num), strict=True
    ):
        if tokens > MAX_POSITIONS:
            raise InputError(
                f"{name} {width}*{height} with {frame_num} frames makes {tokens} tokens along "
                f"{axis}; the network has {MAX_POSITIONS} positions: choose a smaller video."
            )


def size_from_area(preset: Preset, image: tuple[int, int], area: int) -> tuple[int, int]:
    """The (width, height) of an i2v video: the image's aspect ratio at about `area` pixels.

    Official rule: latent sides are floored to whole latents, then to whole tokens.
    """
    ratio = image[1] / image[0]
    stride, patch = preset.vae_stride[1], preset.patch_size[1]
    sides = (math.sqrt(area / ratio), math.sqrt(area * ratio))
    width, height = (int(side // stride // patch * patch) * stride for side in sides)
    return _not_flat(image, (width, height))


def size_covered(preset: Preset, image: tuple[int, int], area: int) -> tuple[int, int]:
    """The (width, height) of a ti2v video that an image is scaled to cover and cropped to.

    Official rule: whole tokens within `area`, either the width or the height fixed first; the
    candidate closer to the image's aspect ratio wins, height first on a tie.
    """
    multiple, ratio = preset.size_multiple, image[0] / image[1]
    ideal_width = math.sqrt(area * ratio)
    ideal_height = area / ideal_width

    def whole(side: float) -> int:
        return int(side // multiple * multiple)

    width, height = whole(ideal_width), whole(ideal_height)
    candidates = [(whole(area / height), height) if height else (0, 0)]
    candidates.append((width, whole(area / width)) if width else (0, 0))

    def distortion(candidate: tuple[int, int]) -> float:
        if not all(candidate):
            return math.inf
        found = candidate[0] / candidate[1]
        return max(ratio / found, found / ratio)

    return _not_flat(image, min(candidates, key=distortion))


def _not_flat(image: tuple[int, int], size: tuple[int, int]) -> tuple[int, int]:
    if not all(size):
        raise InputError(
            f"The image is {image[0]}x{image[1]}; at the chosen --size one side of the video "
            "would vanish: crop the image or choose a larger --size."
        )
    return size


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
    """One video. `size` is (width, height) in pixels; with an image only its area counts.

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
