"""Animate-2: frames, sizes and clips as in diffusers, its audio, its recipe, and bad input."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import imageio
import numpy as np
import pytest
from diffusers.modular_pipelines.wan_animate_2.encoders import (
    WanAnimate2ProcessImagesInputStep,
    WanAnimate2ProcessVideosInputStep,
    get_frame_indices,
)
from diffusers.modular_pipelines.wan_animate_2.video_processor import WanAnimate2VideoProcessor
from imageio_ffmpeg import get_ffmpeg_exe
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.conftest import Refusals, Tiny
from tests.pipelines import resolve_argv, resolve_plan
from tests.refusals import get_refusal
from tests.tasks.conftest import TaskRun
from tests.tasks.tasks import write_moving_box, write_picture
from tools import make_sound
from wan.checkpoint.layout import inspect_checkpoint
from wan.media.audio import has_audio
from wan.media.video_reader import read_frames_at, read_video
from wan.settings.command import NetworkFiles
from wan.settings.errors import COMMAND_LINE_NAMING, InputError
from wan.settings.presets import PRESETS
from wan.tasks.animate2 import (
    compute_content_offset,
    compute_frame_indices,
    fit_into,
    letterbox_frames,
    make_zigzag_indices,
    resample_driving_video,
)
from wan.tasks.base import NO_INPUTS, get_task, make_video_params

pytestmark = pytest.mark.xdist_group("tasks")
PRESET = PRESETS["animate2-14B"]


@pytest.mark.parametrize("video_fps", [10, 12.5, 23.976, 24, 25, 29.97, 30, 50, 59.94, 120])
@pytest.mark.parametrize("fps", [16, 24])
def test_frames_at_another_rate(video_fps: float, fps: int) -> None:
    """Those of diffusers; at the same rate all frames, of which its rounding may drop the last."""
    for count in (1, 2, 7, 49, 100, 1001):
        expected = [*range(count)]
        if video_fps != fps:
            expected = get_frame_indices(count, video_fps, fps)
        assert compute_frame_indices(count, video_fps, fps) == expected, count


def test_a_video_of_variable_rate_is_resampled_by_its_time_stamps(tmp_path: Path) -> None:
    """Ten frames at 30 per second, then ten at 15: 1 s, each frame nearest to its time."""
    levels = np.arange(20, dtype=np.uint8)[:, None, None, None] * 12
    frames = np.broadcast_to(levels, (20, 32, 32, 3))
    video, stamps = tmp_path / "video.mkv", [*range(10), *range(10, 30, 2)]
    _write_variable_rate(video, frames, stamps)
    resampled = resample_driving_video(read_video(video, "", 24.0), 24.0)
    shown = read_frames_at(resampled, range(resampled.num_frames))[:, 0, 0, 0] / 12
    times = np.asarray(stamps) / 30
    for index, level in enumerate(shown):
        assert abs(times[round(level)] - index / 24) <= 1 / 30 + 0.5 / 24
    assert resampled.num_frames in (23, 24, 25)


def test_the_rate_of_a_checkpoint_is_that_of_its_flag(tiny: Tiny, tmp_path: Path) -> None:
    """A driving video of variable rate has the same frames; s2v's rate follows from its audio."""
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    for file in tiny("animate2-14B").iterdir():
        (checkpoint / file.name).symlink_to(file)
    config = json.loads((checkpoint / "generation_config.json").read_text())
    (checkpoint / "generation_config.json").unlink()
    (checkpoint / "generation_config.json").write_text(json.dumps(config | {"fps": 16}))
    ticks = [*np.cumsum(np.random.default_rng(1).choice([1, 2, 3, 5], 40)).tolist()]
    _write_variable_rate(tmp_path / "video.mkv", np.zeros((40, 32, 32, 3), np.uint8), ticks)
    argv = ["--task", "animate2-14B", "--ckpt_dir", str(checkpoint), "--size", "64*64"]
    argv += ["--image", write_picture(tmp_path / "cat.png", size=(64, 64))]
    argv += ["--src_video", str(tmp_path / "video.mkv")]
    by_config, by_flag = (resolve_argv([*argv, *more]) for more in ((), ("--fps", "16")))
    assert by_config.params == replace(by_flag.params, base_seed=by_config.params.base_seed)
    videos = [run.load_inputs().driving_video for run in (by_config, by_flag)]
    indices = [[*resample_driving_video(video, 16).indices] for video in videos]
    assert indices[0] == indices[1]
    with pytest.raises(InputError, match="would break the sync with the audio"):
        get_task("s2v").complete_settings(PRESETS["s2v-14B"], {}, NO_INPUTS, {"fps": 24.0})


def _write_variable_rate(video: Path, frames: np.ndarray, stamps: list[int]) -> None:
    """Writes frames at time stamps in thirtieths of a second."""
    with imageio.get_writer(
        video,
        fps=30,
        codec="ffv1",
        macro_block_size=8,
        output_params=["-vf", f"setpts='{_make_table(stamps)}/30/TB'", "-fps_mode", "vfr"],
    ) as writer:
        for frame in frames:
            writer.append_data(np.ascontiguousarray(frame))


def _make_table(values: list[int]) -> str:
    """Returns an expression of ffmpeg: values[N]."""
    return "+".join(f"eq(N,{n})*{value}" for n, value in enumerate(values))


@pytest.mark.parametrize(("num_frames", "clip", "overlap"), [(8, 5, 1), (9, 5, 1), (23, 13, 5)])
def test_zigzag_and_clips(num_frames: int, clip: int, overlap: int) -> None:
    """The frames of all clips are those of diffusers' padded video."""
    pixels = np.zeros((num_frames, 16, 16, 3), np.float32)
    pixels += np.arange(num_frames, dtype=np.float32)[:, None, None, None] / 64
    block = WanAnimate2ProcessVideosInputStep()
    state = block.init_pipeline()(
        driving_video=pixels,
        segment_frame_length=clip,
        prev_segment_conditioning_frames=overlap,
        height=16,
        width=16,
    )
    padded = (state.get("driving_video_pixels")[0, 0, :, 0, 0] + 1) * 32
    params = make_video_params(
        PRESET,
        {
            "size": (16, 16),
            "frame_num": clip,
            "refert_num": overlap,
            "num_clip": state.get("num_segments"),
            "num_source_frames": num_frames,
        },
    )
    for index in range(params.num_clip or 0):
        start = index * (clip - overlap)
        expected = padded[start : start + clip].round().int().tolist()
        assert make_zigzag_indices(start, clip, num_frames) == expected
    assert params.num_frames == num_frames == state.get("real_frame_len")


def test_a_short_video_runs_back_and_forth() -> None:
    """Where diffusers has too few frames to pad with."""
    assert make_zigzag_indices(0, 13, 3) == [0, 1, 2, 2, 1, 0, 0, 1, 2, 2, 1, 0, 0]
    assert make_zigzag_indices(4, 4, 2) == [0, 1, 1, 0]


@pytest.mark.parametrize(
    "image", [(640, 800), (1000, 1500), (90, 71), (333, 200), (1920, 1080), (100, 1000), (17, 31)]
)
def test_sizes_and_borders(image: tuple[int, int]) -> None:
    """The frame, the part of it that is kept, and the pixels are those of diffusers."""
    picture = Image.effect_noise(image, 90).convert("RGB")
    block = WanAnimate2ProcessImagesInputStep()
    state = block.init_pipeline()(image=picture, width=160, height=96)
    params = make_video_params(PRESET, {"size": (160, 96), "frame_num": 5}, image)
    assert params.frame_size == (state.get("width"), state.get("height"))
    top, left, rows, columns = state.get("crop_region")
    assert compute_content_offset(params) == (left, top)
    assert params.video_size == (columns // 2 * 2, rows // 2 * 2)
    for resampling in ("BICUBIC", "BILINEAR"):
        processor = WanAnimate2VideoProcessor(resample=resampling.lower())
        width, height = params.frame_size
        expected = processor.preprocess(picture, height, width, resize_mode="fill")[0]
        pixels = letterbox_frames([picture], params.frame_size, resampling)[:, 0]
        assert (pixels - expected).abs().max() < 1e-6


def test_no_side_of_a_driving_frame_vanishes() -> None:
    assert fit_into((2000, 2), (160, 96)) == (160, 1)
    assert fit_into((2, 2000), (160, 96)) == (1, 96)


@pytest.fixture
def one(asked: Callable[[str], TaskRun]) -> TaskRun:
    return asked("animate2")


def test_its_record(one: TaskRun) -> None:
    record = json.loads(one.video.with_suffix(".json").read_text())
    settings = record["settings"]
    assert (settings["num_clip"], settings["frame_num"], settings["refert_num"]) == (2, 5, 1)
    assert settings["log_scale"] == 0 and {x["setting"] for x in record["inputs"]} == {
        "image",
        "src_video",
    }


def test_the_audio_of_the_driving_video(one: TaskRun, tmp_path: Path) -> None:
    """All frames stay where the audio is shorter, also at a low rate."""
    sound = make_sound.write_wav(tmp_path / "voice.wav", 0.1)
    video = write_moving_box(tmp_path / "video.mp4", count=5, fps=2)
    with_audio, out = tmp_path / "with.mp4", tmp_path / "v.mp4"
    command = [get_ffmpeg_exe(), "-i", video, "-i", sound, "-c:v", "copy", with_audio]
    subprocess.run([*map(str, command)], check=True, capture_output=True)
    assert has_audio(with_audio) and not has_audio(video)
    flags = ["--src_video", with_audio, "--fps", "2", "--sample_steps", "1"]
    assert len(one.make_frames(out, *flags)) == 5
    assert has_audio(out) and not has_audio(one.video)


def test_recipes(tiny: Tiny, tmp_path: Path) -> None:
    """A distilled checkpoint is recognized by its name; the base model's settings are its own."""
    folder = tmp_path / "Wan2.2-Animate-2-14B-Distilled-Diffusers"
    folder.symlink_to(tiny("animate2-14B", "diffusers"))
    argv = ["--task", "animate2-14B", "--image", write_picture(tmp_path / "cat.png")]
    argv += ["--src_video", write_moving_box(tmp_path / "video.mp4"), "--size", "96*64"]
    expected = {"none": ("dpm++", 40, 5, 3, 0), "auto": ("dpm++", 10, 5, 1, -1.3)}
    for recipe, values in expected.items():
        params = resolve_plan(*argv, "--ckpt_dir", folder, "--recipe", recipe).params
        actual = params.sample_solver, params.sample_shift, params.sample_guide_scale[0]
        assert (*actual, params.log_scale) == (values[0], *values[2:])
    assert resolve_plan(*argv, "--recipe", "none").params.sample_steps == 40
    assert resolve_plan(*argv, "--recipe", "animate2-10step").params.sample_steps == 10


def run_notices(argv: list[object], *more: object) -> str:
    return " ".join(map(COMMAND_LINE_NAMING.render, resolve_plan(*argv, *more).notices))


def test_files_of_other_programs(tiny: Tiny, tmp_path: Path) -> None:
    """One file with a folder of the other networks; official names need the file's name."""
    others, official = tiny("animate2-14B", "diffusers"), tiny("animate2-14B") / "wan_animate_2"
    config = json.loads((official / "config.json").read_text())
    tensors = load_file(official / "wan_animate_2_bf16.safetensors")
    flat = {name.replace(".block.", "."): tensor for name, tensor in tensors.items()}
    for name, stored, expected in (
        ("distilled", {f"model.diffusion_model.{n}": x for n, x in tensors.items()}, "animate2"),
        ("wan2.2_Animate-2_fp8", flat, "animate2"),
        ("wan2.1_i2v", flat, "i2v"),
    ):
        file = tmp_path / name / f"{name}.safetensors"
        file.parent.mkdir()
        save_file(stored, file)
        (file.parent / "config.json").write_text(json.dumps(config | {"model_type": "i2v"}))
        checkpoint = inspect_checkpoint(others, NetworkFiles(dit=file))
        assert (checkpoint.kind, checkpoint.config["model_type"]) == (expected, expected), name
        assert checkpoint.config["num_heads"] == 40
    (file.parent / "config.json").write_text(json.dumps({"refer_offset_w": 0}))
    renamed = file.rename(file.with_name("animate2.safetensors"))
    message = get_refusal(lambda: inspect_checkpoint(others, NetworkFiles(dit=renamed)))
    assert "refer_offset_w is 0, but must be -1" in message


def test_other_rates_and_lengths(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """--fps is the rate at which the driving video is read, and the mp4's."""
    argv = ["--task", "animate2-14B", "--image", write_picture(tmp_path / "cat.png", size=(64, 96))]
    argv += ["--src_video", write_moving_box(tmp_path / "video.mp4", count=30, fps=30)]
    for more, (frames, clips) in {
        (): (24, 1),
        ("--fps", 16): (16, 1),
        ("--frame_num", 9): (24, 3),
        ("--frame_num", 9, "--num_clip", 2): (17, 2),
        ("--frame_num", 9, "--refert_num", 5): (24, 5),
    }.items():
        run = resolve_plan(*argv, *more)
        assert (run.params.num_frames, run.params.num_clip) == (frames, clips), more
        assert run.output.fps == (16 if "--fps" in more else 24)
        assert math.prod(run.params.video_size) <= 640 * 800
        notices = [notice for notice in run.notices if notice.startswith("The driving video")]
        assert len(notices) == (more in ((), ("--fps", 16))), more
    assert "has 16 frames, and 1 clip(s) of 81" in run_notices(argv, "--fps", 16)
    assert "--frame_num 17 is enough" in run_notices(argv, "--fps", 16)
    assert "--frame_num 13 is enough" in run_notices(argv, "--frame_num", 17)
    assert "fills only 50 %" in caplog.text


FLAGS = {
    "no image": {"--image": None},
    "no driving video": {"--src_video": None},
    "an image that does not exist": {"--image": "none.png"},
    "an image that is a video": {"--image": "video.mp4"},
    "an image of a few pixels": {"--image": "tiny.png"},
    "a narrow image": {"--image": "narrow.png"},
    "a driving video that does not exist": {"--src_video": "none.mp4"},
    "a driving video that is an image": {"--src_video": "text.mp4"},
    "an empty driving video": {"--src_video": "empty.mp4"},
    "a folder": {"--src_video": "."},
    "latents": {"--src_video": "latents.safetensors"},
    "a driving video of one frame": {"--src_video": "one.mp4"},
    "as many frames before as in the video": {"--src_video": "five.mp4", "--refert_num": "5"},
    "as many frames before as in a clip": {"--frame_num": "5", "--refert_num": "5"},
    "frames before": {"--refert_num": "2"},
    "clips of one frame": {"--frame_num": "1"},
    "clips of an even number of frames": {"--frame_num": "36"},
    "no clip": {"--num_clip": "0"},
    "a rate of 0": {"--fps": "0"},
    "log_scale": {"--log_scale": "nan"},
    "a folder of Animate": {"--src_root_path": "."},
    "a strength": {"--strength": "0.5"},
    "a mask": {"--src_mask": "video.mp4"},
    "a last image": {"--last_image": "cat.png"},
    "a sound": {"--audio": "video.mp4"},
    "saved latents": {"--save_latents": "true"},
    "a recipe of other tasks": {"--recipe": "lightning-4step"},
    "another checkpoint": {"--ckpt_dir": "other"},
    "masks": {"--use_rainfusion": "true"},
}


def test_refusals(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusals: Refusals
) -> None:
    monkeypatch.chdir(tmp_path)
    write_picture(tmp_path / "cat.png")
    write_picture(tmp_path / "tiny.png", size=(9, 40))
    write_picture(tmp_path / "narrow.png", size=(16, 9000))
    for name, count in {"video": 9, "one": 1, "five": 5}.items():
        write_moving_box(tmp_path / f"{name}.mp4", count=count, fps=24)
    (tmp_path / "text.mp4").write_bytes(b"x" * 999)
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "latents.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    (tmp_path / "other").symlink_to(tiny("t2v-1.3B"))
    usual = {"--task": "animate2-14B", "--image": "cat.png", "--src_video": "video.mp4"}
    usual |= {"--ckpt_dir": str(tiny("animate2-14B")), "--size": "64*48"}
    cases = {}
    for case, flags in FLAGS.items():
        argv = {name: x for name, x in (usual | flags).items() if x is not None}
        cases[case] = [word for pair in argv.items() for word in pair]
    refusals("animate2", cases)
    other = ["--task", "t2v-1.3B", "--log_scale", "1"]
    refusals("animate2: with another task", {"log_scale": other})
