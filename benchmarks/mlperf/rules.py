"""Rules of MLPerf Inference v6.0 for Wan2.2-T2V-A14B: prompts, settings, quantities.

The numbers are those of the rules of the closed division and of the reference implementation's
configuration, https://github.com/mlcommons/inference (text_to_video/wan-2.2-t2v-a14b).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from wan.app.flag_parser import parse_flags
from wan.app.programs import make_argument_type
from wan.settings.errors import COMMAND_LINE_NAMING, InputError, name_settings
from wan.settings.values import read_path

DIMENSIONS = (
    "subject_consistency",
    "background_consistency",
    "motion_smoothness",
    "dynamic_degree",
    "appearance_style",
    "scene",
)
"""Dimensions of VBench; their mean, times 100, is the accuracy."""
LEAST_ACCURACY = 69.7752
"""99 % of the reference's accuracy."""
SAME_SAMPLE = 3
"""The sample that TEST04 repeats."""
MOST_GAIN = 0.10
"""How much faster the repeated sample of TEST04 may be than different samples."""
_PROMPT_RANGES = (
    range(257, 329),
    range(493, 583),
    range(776, 862),
)  # of those dimensions in VBench's list
NEGATIVE_PROMPT = (
    "vivid colors, overexposed, static, blurry details, subtitles, style, work of art, painting, "
    "picture, still, overall grayish, worst quality, low quality, JPEG artifacts, ugly, deformed, "
    "extra fingers, poorly drawn hands, poorly drawn face, deformed, disfigured, deformed limbs, "
    "fused fingers, static image, cluttered background, three legs, many people in the background, "
    "walking backwards"
)
"""Data of the reference, Apache License 2.0."""


@dataclass(frozen=True)
class Workload:
    """The videos of the tests, and how many a test requests.

    Attributes:
        entries: Entries of VBench's list: a prompt and its scored dimensions.
        size: (width, height) in pixels.
        frames: Frames of a video.
        steps: Denoising steps of a video.
        queries: Minimum number of queries in SingleStream: the rules require 50, the load
            generator's early stopping 64.
        seconds: Minimum duration of SingleStream.
    """

    entries: list[dict[str, Any]]
    size: tuple[int, int] = (1280, 720)
    frames: int = 81
    steps: int = 20
    queries: int = 64
    seconds: int = 600

    def make_flags(self) -> list[str]:
        """Returns the settings of the videos as flags of generate.py."""
        width, height = self.size
        settings = {
            "--size": f"{width}*{height}",
            "--frame_num": self.frames,
            "--sample_steps": self.steps,
            "--sample_guide_scale": "3,4",
            "--negative_prompt": NEGATIVE_PROMPT,
            "--base_seed": 42,
        }
        return [str(part) for pair in settings.items() for part in pair]

    def make_request_body(self, index: int) -> dict[str, Any]:
        """Returns the JSON body that MLPerf's client posts to /v1/videos/generations."""
        width, height = self.size
        return {
            "prompt": self.prompt(index),
            "negative_prompt": NEGATIVE_PROMPT,
            "size": f"{width}x{height}",
            "seconds": self.frames / 16,
            "fps": 16,
            "num_frames": self.frames,
            "num_inference_steps": self.steps,
            "guidance_scale": 4.0,
            "guidance_scale_2": 3.0,
            "boundary_ratio": 0.875,
            "seed": 42,
            "output_format": "mp4",
            "response_format": "video_bytes",
        }

    def prompt(self, index: int) -> str:
        """Returns the prompt of a sample."""
        return str(self.entries[index]["prompt_en"])


def load_workload(small: bool) -> Workload:
    """Returns the rules' videos, or a few small ones.

    Args:
        small: Six prompts, 64*64 x 9 frames, 4 steps, six queries.

    Raises:
        InputError: VBench's list is not installed.
    """
    package = find_spec("vbench")
    folders = (package.submodule_search_locations or []) if package else []
    files = [Path(location) / "VBench_full_info.json" for location in folders]
    if not files or not files[0].exists():
        remedy = "pip install --no-deps -r benchmarks/mlperf/requirements.txt"
        raise InputError("The prompts are in the package vbench, which is missing", remedy=remedy)
    listed = json.loads(files[0].read_text())
    chosen = [listed[index] for location in _PROMPT_RANGES for index in location]
    if any(not {*DIMENSIONS}.intersection(entry["dimension"]) for entry in chosen):
        raise InputError("This vbench has other prompts", remedy="install vbench 0.1.5")
    if small:
        return Workload(chosen[::41][:6], (64, 64), frames=9, steps=4, queries=6, seconds=0)
    return Workload(chosen)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that select the tests."""
    number = parser.add_argument
    both = ["SingleStream", "Offline"]
    number("--scenarios", nargs="+", choices=both, default=both)
    kinds = ["performance", "accuracy", "test04"]
    number("--tests", nargs="+", choices=kinds, default=kinds[:1])
    number("--small", action="store_true", help="six small videos, for a machine without GPUs")
    number("--cached", action="store_true", help="answer from a cache, which TEST04 must detect")
    number(
        "--out",
        type=make_argument_type(read_path),
        default=Path("mlperf"),
        help="folder of the results (mlperf)",
    )


def check_flags(flags: Sequence[str]) -> None:
    """Refuses flags of generate.py that the closed division does not allow.

    Raises:
        InputError: A flag skips a part of the computation.
    """
    with name_settings(COMMAND_LINE_NAMING):
        settings = parse_flags(flags).values
        for name in ("step_cache", "use_attentioncache", "use_rainfusion", "use_prompt_extend"):
            if settings.get(name, "none") not in ("none", False):
                why = "is not allowed in MLPerf's closed division"
                raise InputError(f"`{name}`", None, why, "drop it")
