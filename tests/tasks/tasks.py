"""The columns of the table in `test_promises.py`: each task, with small inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import imageio
import numpy as np
from PIL import Image

import wan
from tools import make_character, make_sound

PROMPT = "a cat walks"
CLIP_PROMPTS = ["a cat walks", "a cat sits"]
STEPS = ["--sample_steps", "2", "--sample_shift", "3", "--sample_guide_scale", "2"]
QUICK = [*STEPS, "--sample_solver", "unipc", "--base_seed", "7"]
CALL: Mapping[str, Any] = {  # the same in Python
    "sampling_steps": 2,
    "shift": 3.0,
    "guide_scale": 2.0,
    "sample_solver": "unipc",
    "seed": 7,
}
BODY: Mapping[str, Any] = {  # and over HTTP
    "prompt": PROMPT,
    "num_inference_steps": 2,
    "flow_shift": 3.0,
    "guidance_scale": 2.0,
    "sample_solver": "unipc",
    "seed": 7,
}
Inputs = dict[str, Path]
"""The input files of a video, by flag."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """How a small video of one task is requested: command line, Python and HTTP.

    Attributes:
        checkpoint: Name of the task and of its tiny checkpoint.
        flags: In addition to QUICK, the prompt and the inputs.
        inputs: Writes the input files.
        shape: (frames, height, width) of the video.
        call: Generates the video with the Python class; returns its tensor.
        body: Of a request, in addition to BODY and the inputs.
        line: Of a prompt file, for the same video.
        compared: Flags, each with a file name if it is a folder, whose contents ranks compare.
        latents: Whether the latents of the whole video can be saved.
    """

    checkpoint: str
    flags: list[str]
    inputs: Callable[[Path], Inputs]
    shape: tuple[int, int, int]
    call: Callable[[Any, Inputs], Any]
    python: type
    fps: int = 16
    body: Mapping[str, Any] = field(default_factory=dict)
    line: Mapping[str, Any] = field(default_factory=lambda: {"prompt": PROMPT})
    prompt: tuple[str, ...] = ("--prompt", PROMPT)
    compared: tuple[tuple[str, str], ...] = ()
    latents: bool = True


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


TASKS: dict[str, Task] = {
    "t2v": Task(
        checkpoint="t2v-A14B",
        flags=["--size", "64*32", "--frame_num", "5"],
        inputs=lambda _: {},
        shape=(5, 32, 64),
        python=wan.WanT2V,
        call=lambda model, _: model.generate(PROMPT, size=(64, 32), frame_num=5, **CALL),
        body={"size": "64x32", "num_frames": 5},
    ),
    "i2v": Task(
        checkpoint="i2v-A14B",
        flags=["--size", "48*32", "--frame_num", "5"],
        inputs=_image,
        shape=(5, 32, 48),
        python=wan.WanI2V,
        call=lambda model, given: model.generate(
            PROMPT, Image.open(given["--image"]), max_area=48 * 32, frame_num=5, **CALL
        ),
        body={"size": "48x32", "num_frames": 5},
        compared=(("--image", ""),),
    ),
    "ti2v": Task(
        checkpoint="ti2v-5B",
        flags=["--size", "64*32", "--frame_num", "5"],
        inputs=_image,
        shape=(5, 32, 64),
        fps=24,
        python=wan.WanTI2V,
        call=lambda model, given: model.generate(
            PROMPT, Image.open(given["--image"]), max_area=64 * 32, frame_num=5, **CALL
        ),
        body={"size": "64x32", "num_frames": 5},
        compared=(("--image", ""),),
    ),
    "first and last": Task(
        checkpoint="flf2v-14B",
        flags=["--size", "48*32", "--frame_num", "5"],
        inputs=_both_ends,
        shape=(5, 32, 48),
        python=wan.WanI2V,
        call=lambda model, given: model.generate(
            PROMPT,
            Image.open(given["--image"]),
            max_area=48 * 32,
            frame_num=5,
            last_image=Image.open(given["--last_image"]),
            **CALL,
        ),
        body={"size": "48x32", "num_frames": 5},
        compared=(("--image", ""), ("--last_image", "")),
    ),
    "vace": Task(
        checkpoint="vace-1.3B",
        flags=["--size", "48*32", "--frame_num", "5"],
        inputs=_sources,
        shape=(5, 32, 48),
        python=wan.WanVace,
        call=lambda model, given: model.generate(
            PROMPT,
            str(given["--src_video"]),
            str(given["--src_mask"]),
            [Image.open(given["--src_ref_images"])],
            size=(48, 32),
            frame_num=5,
            **CALL,
        ),
        body={"size": "48x32", "num_frames": 5},
        compared=(("--src_video", ""), ("--src_mask", ""), ("--src_ref_images", "")),
    ),
    "video to video": Task(
        checkpoint="t2v-A14B",
        flags=["--size", "64*32", "--frame_num", "5", "--strength", "0.5"],
        inputs=_source,
        shape=(5, 32, 64),
        python=wan.WanT2V,
        call=lambda model, given: model.generate(
            PROMPT,
            size=(64, 32),
            frame_num=5,
            src_video=str(given["--src_video"]),
            strength=0.5,
            **CALL,
        ),
        body={"size": "64x32", "num_frames": 5, "strength": 0.5},
        compared=(("--src_video", ""),),
    ),
    "image and video": Task(
        checkpoint="ti2v-5B",
        flags=["--size", "64*32", "--frame_num", "5", "--strength", "0.5"],
        inputs=_source_and_image,
        shape=(5, 32, 64),
        python=wan.WanTI2V,
        call=lambda model, given: model.generate(
            PROMPT,
            Image.open(given["--image"]),
            max_area=64 * 32,
            frame_num=5,
            src_video=str(given["--src_video"]),
            strength=0.5,
            **CALL,
        ),
        body={"size": "64x32", "num_frames": 5, "strength": 0.5},
        compared=(("--image", ""), ("--src_video", "")),
    ),
    "s2v": Task(
        checkpoint="s2v-14B",
        flags=["--size", "96*64", "--infer_frames", "12"],  # 12 - 3 and 12 frames
        inputs=_sound,
        shape=(21, 64, 64),
        python=wan.WanS2V,
        call=lambda model, given: model.generate(
            PROMPT,
            str(given["--image"]),
            str(given["--audio"]),
            max_area=96 * 64,
            infer_frames=12,
            num_repeat=None,
            **CALL,
        ),
        body={"size": "96x64", "infer_frames": 12},
        compared=(("--image", ""), ("--audio", "")),
        latents=False,
    ),
    "animate": Task(
        checkpoint="animate-14B",
        flags=["--frame_num", "5"],  # two clips
        inputs=_character,
        shape=(8, 32, 48),
        fps=30,
        python=wan.WanAnimate,
        call=lambda model, given: model.generate(
            str(given["--src_root_path"]), input_prompt=PROMPT, clip_len=5, **CALL
        ),
        body={"num_frames": 5},
        compared=tuple(("--src_root_path", f"src_{name}") for name in ("ref.png", "pose.mp4")),
        latents=False,
    ),
    "animate2": Task(
        checkpoint="animate2-14B",
        flags=["--size", "48*32", "--frame_num", "5"],  # two clips
        inputs=_driven_image,
        shape=(8, 32, 48),
        fps=24,
        python=wan.WanAnimate2,
        call=lambda model, given: model.generate(
            PROMPT,
            Image.open(given["--image"]),
            str(given["--src_video"]),
            size=(48, 32),
            frame_num=5,
            **CALL,
        ),
        body={"size": "48x32", "num_frames": 5},
        compared=(("--image", ""), ("--src_video", "")),
        latents=False,
    ),
    "long": Task(
        checkpoint="i2v-A14B",
        flags=["--size", "48*32", "--frame_num", "9", "--chain", "latent"],
        inputs=_image,
        shape=(13, 32, 48),
        python=wan.WanI2V,
        call=lambda model, given: model.generate(
            CLIP_PROMPTS[0],
            Image.open(given["--image"]),
            max_area=48 * 32,
            frame_num=9,
            clip_prompts=CLIP_PROMPTS,
            chain="latent",
            **CALL,
        ),
        body={"size": "48x32", "num_frames": 9, "chain": "latent", "prompt": CLIP_PROMPTS},
        line={"prompt": CLIP_PROMPTS},
        prompt=("--clip_prompts", *CLIP_PROMPTS),
        compared=(("--image", ""),),
        latents=False,
    ),
}
