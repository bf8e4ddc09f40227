"""The columns of the table in `test_promises.py`: each task, with small inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

import imageio
import numpy as np
from PIL import Image

import wan
from tools import make_character, make_sound

PROMPT = "a cat walks"
STEPS = ["--sample_steps", "2", "--sample_shift", "3", "--sample_guide_scale", "2"]
QUICK = [*STEPS, "--sample_solver", "unipc", "--base_seed", "7"]
CALL: Mapping[str, Any] = {  # the same in Python
    "sampling_steps": 2,
    "shift": 3.0,
    "guide_scale": 2.0,
    "sample_solver": "unipc",
    "seed": 7,
}
Inputs = dict[str, Path]
"""The input files of a video, by flag."""


@dataclass(frozen=True)
class Task:
    """How a small video of one task is requested: on the command line and in Python.

    Attributes:
        checkpoint: Name of the task and of its tiny checkpoint.
        settings: By flag, in addition to QUICK, the prompt and the inputs.
        inputs: Writes the input files.
        shape: (frames, height, width) of the video.
        python: The class that generates the video.
        python_names: Its keywords that differ from the flags.
        python_call: Its further keywords.
        prompts: Of the video, or of its clips.
        latents: Whether the latents of the whole video can be saved.
    """

    checkpoint: str
    settings: Mapping[str, Any]
    shape: tuple[int, int, int]
    python: type
    inputs: Callable[[Path], Inputs] = lambda _: {}
    python_names: Mapping[str, str] = field(default_factory=dict)
    python_call: Mapping[str, Any] = field(default_factory=dict)
    fps: int = 16
    prompts: tuple[str, ...] = (PROMPT,)
    latents: bool = True

    @property
    def flags(self) -> list[str]:
        words = []
        for name, value in self.settings.items():
            words += [f"--{name}", "*".join(map(str, value)) if name == "size" else str(value)]
        return words

    @property
    def prompt_flags(self) -> list[str]:
        return ["--prompt" if len(self.prompts) == 1 else "--clip_prompts", *self.prompts]

    @property
    def line(self) -> dict[str, Any]:
        """The line of a prompt file."""
        return {"prompt": self.prompts[0] if len(self.prompts) == 1 else [*self.prompts]}

    def generate(self, model: Any, inputs: Inputs, **more: Any) -> Any:
        """Generates the video with an object of the class; returns its tensor."""
        call = {"input_prompt": self.prompts[0], **self.settings}
        if len(self.prompts) > 1:
            call |= {"input_prompt": "", "clip_prompts": [*self.prompts]}
        for flag, path in inputs.items():
            call[flag[2:]] = Image.open(path) if path.suffix == ".png" else str(path)
        parameters = signature(model.generate).parameters
        if "max_area" in parameters:
            call["max_area"] = math.prod(call.pop("size"))
        names = {"image": "img", **self.python_names}
        renamed = {names.get(name, name): x for name, x in call.items()}
        return model.generate(**CALL | renamed | self.python_call | more)


def write_picture(path: Path, colour: int = 0, size: tuple[int, int] = (96, 64)) -> Path:
    """Writes an image of a gradient with noise."""
    rng, (width, height) = np.random.default_rng(colour), size
    pixels = np.linspace(0, 200, width)[None, :, None] + 55 * rng.random((height, width, 3))
    Image.fromarray(pixels.astype(np.uint8)).save(path)
    return path


def write_moving_box(
    path: Path, size: tuple[int, int] = (64, 48), count: int = 9, fps: float = 16
) -> Path:
    """Writes a video of a bright box that moves over a gradient."""
    rows, columns = np.mgrid[: size[1], : size[0]]
    frames: list[Any] = []
    for index in range(count):
        box = (abs(columns - 12 - 3 * index) < 9) & (abs(rows - size[1] // 2) < 11)
        pixels = np.where(box, 255, 2 * columns + rows).clip(0, 255).astype(np.uint8)
        frames.append(np.repeat(pixels[..., None], 3, axis=-1))
    imageio.mimwrite(path, frames, fps=fps, macro_block_size=8)
    return path


def _image(folder: Path) -> Inputs:
    return {"--image": write_picture(folder / "cat.png")}


def _both_ends(folder: Path) -> Inputs:
    return {**_image(folder), "--last_image": write_picture(folder / "end.png", 1)}


def _sources(folder: Path) -> Inputs:
    return {
        "--src_video": write_moving_box(folder / "video.mp4"),
        "--src_mask": write_moving_box(folder / "mask.mp4"),
        "--src_ref_images": write_picture(folder / "cat.png"),
    }


def _source(folder: Path) -> Inputs:
    return {"--src_video": write_moving_box(folder / "video.mp4")}


def _source_and_image(folder: Path) -> Inputs:
    return {**_image(folder), **_source(folder)}


def _driven_image(folder: Path) -> Inputs:
    video = write_moving_box(folder / "video.mp4", count=10, fps=30)  # 8 frames at 24 per second
    return {**_image(folder), "--src_video": video}


def _sound(folder: Path) -> Inputs:
    return {**_image(folder), "--audio": make_sound.write_wav(folder / "voice.wav", 1.3)}


def _character(folder: Path) -> Inputs:
    make_character.write_character_folder(folder / "moves", (48, 32), 8)
    return {"--src_root_path": folder / "moves"}


SMALL = {"size": (48, 32), "frame_num": 5}
WIDE = {"size": (64, 32), "frame_num": 5}
STOCHASTIC = {**SMALL, "sample_solver": "lcm"}  # each clip samples noise for two steps
FROM_SOURCE = {**WIDE, "strength": 0.5}
S2V = {"size": (96, 64), "infer_frames": 12}  # 12 - 3 and 12 frames
BLOCKS = {"size": (48, 32), "frame_num": 21, "sample_guide_scale": 1, "sample_solver": "dmd"}
LONG = {"size": (48, 32), "frame_num": 9, "chain": "latent"}
TASKS: dict[str, Task] = {
    "t2v": Task("t2v-A14B", WIDE, (5, 32, 64), wan.WanT2V),
    "i2v": Task("i2v-A14B", SMALL, (5, 32, 48), wan.WanI2V, _image),
    "ti2v": Task("ti2v-5B", WIDE, (5, 32, 64), wan.WanTI2V, _image, fps=24),
    "first and last": Task("flf2v-14B", SMALL, (5, 32, 48), wan.WanI2V, _both_ends),
    "vace": Task("vace-1.3B", SMALL, (5, 32, 48), wan.WanVace, _sources),
    "video to video": Task("t2v-A14B", FROM_SOURCE, (5, 32, 64), wan.WanT2V, _source),
    "image and video": Task("ti2v-5B", FROM_SOURCE, (5, 32, 64), wan.WanTI2V, _source_and_image),
    "s2v": Task(
        *("s2v-14B", S2V, (21, 64, 64), wan.WanS2V, _sound),
        python_names={"image": "ref_image_path", "audio": "audio_path"},
        python_call={"num_repeat": None},
        latents=False,
    ),
    "animate": Task(  # two clips, as the next ones
        *("animate-14B", {"frame_num": 5}, (8, 32, 48), wan.WanAnimate, _character),
        python_names={"frame_num": "clip_len"},
        fps=30,
        latents=False,
    ),
    "animate2": Task(
        *("animate2-14B", STOCHASTIC, (8, 32, 48), wan.WanAnimate2, _driven_image),
        fps=24,
        latents=False,
    ),
    "causal": Task(  # two blocks
        *("causal-1.3B", BLOCKS, (21, 32, 48), wan.WanCausal),
        python_names={"sample_guide_scale": "guide_scale"},
    ),
    "long": Task(
        *("i2v-A14B", LONG, (13, 32, 48), wan.WanI2V, _image),
        prompts=(PROMPT, "a cat sits"),
        latents=False,
    ),
}
