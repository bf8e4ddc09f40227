"""Notices about a run, names of videos, and the demo checkpoints in the repository."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path

from wan.app.record import read_generation_config
from wan.app.run import Run
from wan.pipeline.setup import Setup
from wan.settings.command import Output
from wan.settings.layers import Layer
from wan.settings.presets import Preset
from wan.tasks.base import VideoParams
from wan.utils import env

DEMO_FOLDER = Path(__file__).resolve().parents[2] / "examples" / "demo"  # trained checkpoints


def find_random_demo(preset: Preset) -> Path:
    """Returns the folder of the task's randomly initialized demo checkpoint."""
    return env.find_cache_dir() / f"demo-{preset.task}-v1"


def has_random_weights(run: Run) -> bool:
    """Returns whether the checkpoint of a run is a randomly initialized demo: videos are noise."""
    return Path(run.settings["ckpt_dir"]) == find_random_demo(run.setup.preset)


def make_video_file_name(task: str, params: VideoParams) -> str:
    """Returns `task_WxH_start-of-prompt_seed_time.mp4`.

    Only letters, digits, `_`, `-` and `.` of the prompt are used, so that the name is valid on
    every file system.
    """
    slug = re.sub(r"[^\w.-]+", "_", params.prompt[:200]).strip("_.")
    while len(slug.encode("utf-8")) > 50:
        slug = slug[:-1]
    timestamp = datetime.now().strftime("%Y%m%d_%H%M%S")
    width, height = params.video_size
    parts = (task, f"{width}x{height}", slug, str(params.base_seed), timestamp)
    return "_".join(filter(None, parts)) + ".mp4"


def make_run_notices(
    params: VideoParams, output: Output, demo_folder: Path | None, defaults: Layer
) -> list[str]:
    """Returns notices about a demo checkpoint, an untrained size and an existing output file."""
    notices, preset = [], params.preset
    if demo_folder is not None:
        note = "It is randomly initialized, so the video is noise: a test of the installation."
        if not DEMO_FOLDER.is_dir():  # installed without the repository
            note += " The trained demo, examples/demo, comes with a clone of the repository."
        if demo_folder.parent == DEMO_FOLDER:
            readme = DEMO_FOLDER / "README.md"
            note = f"It draws plain shapes that move; {readme} lists the words for prompts."
        missing = f"No --ckpt_dir and no ./{preset.folder}"
        notices.append(f"{missing}: using the demo checkpoint {demo_folder}. {note}")
    size, sizes, model = "*".join(map(str, params.size)), preset.trained_sizes, preset.task
    if demo_folder is not None and demo_folder.parent == DEMO_FOLDER:
        sizes, model = ("*".join(map(str, defaults.values["size"])),), "the demo"
    if size not in sizes and params.size != defaults.values.get("size"):
        notices.append(f"{size} is not a size {model} was trained on ({', '.join(sizes)}).")
    if output.save_file.exists():
        notices.append(f"{output.save_file} exists and will be replaced.")
    return notices


def make_demo_size_notices(params: VideoParams, folder: Path | None) -> list[str]:
    """Returns a notice if a video of a trained demo in the repository is larger than the demo's."""
    if folder is None or folder.resolve().parent != DEMO_FOLDER:
        return []
    width, height = read_generation_config(folder).values["size"]
    video_width, video_height = params.video_size
    if video_width * video_height <= 1.1 * width * height:  # an image has another aspect ratio
        return []
    size, trained_size = f"{video_width}*{video_height}", f"{width}*{height}"
    return [f"{size} is not a size the demo was trained on ({trained_size})."]


def make_length_notices(setup: Setup, params: VideoParams) -> tuple[str, ...]:
    """Returns a notice if a video, or its clips, are longer than those of the training.

    The published default is the length on which the networks were trained, unless a checkpoint's
    generation_config.json has a larger one. A causal network generates videos of any length.
    """
    name = "frame_num" if params.preset.infer_frames is None else "infer_frames"
    frames, longest = getattr(params, name), getattr(params.preset, name)
    if (folder := setup.checkpoint.folder) is not None:
        longest = max(longest, read_generation_config(folder).values.get(name, 0))
    if frames <= longest or params.preset.keeps_kv:
        return ()
    unit = "frames a clip" if params.has_clips else "frames"
    return (
        f"{frames} {unit} are more than the {longest} that the network was trained on: the first "
        "ones may flash, and motion may repeat or stop.",
    )
