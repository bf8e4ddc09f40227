"""Features of s2v-14B only: audio in the mp4, clips, poses, and refusals."""

from __future__ import annotations

import json
import shutil
import subprocess
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import imageio
import imageio_ffmpeg
import numpy as np
import pytest
import torch

import wan
from tests.conftest import Refusals, Tiny
from tests.tasks.conftest import TaskRun, run_generate
from tools.make_sound import write_wav

pytestmark = pytest.mark.xdist_group("tasks")
FFMPEG = imageio_ffmpeg.get_ffmpeg_exe()


@pytest.fixture
def one(asked: Callable[[str], TaskRun]) -> TaskRun:
    return asked("s2v")


def read_stream_info(path: Path) -> str:
    return subprocess.run([FFMPEG, "-i", str(path)], capture_output=True, text=True).stderr


def read_samples(path: Path) -> np.ndarray:
    """Reads the audio of a file at 16 kHz."""
    command = [FFMPEG, "-v", "error", "-i", str(path), "-ac", "1", "-ar", "16000", "-f", "s16le"]
    result = subprocess.run([*command, "-"], capture_output=True, check=True)
    return np.frombuffer(result.stdout, "<i2").astype(float)


def correlate(sound: np.ndarray, reference: np.ndarray, start: int, length: int) -> float:
    """Returns the correlation of a sound with a reference that starts at a sample."""
    return abs(np.corrcoef(sound[:length], reference[start : start + length])[0, 1])


def test_a_video_with_its_sound(one: TaskRun) -> None:
    """16 frames per second; the video is as long as the shorter of frames and audio."""
    stream_info, sound = read_stream_info(one.video), read_samples(one.inputs["--audio"])
    assert "16 fps" in stream_info and "Audio: aac" in stream_info
    video_sound = read_samples(one.video)
    length = min(len(video_sound), len(sound)) - 4000
    assert (
        correlate(video_sound, sound, 0, length) > 0.9 > correlate(sound, video_sound, 3000, length)
    )
    record = json.loads(one.video.with_suffix(".json").read_text())
    settings = record["settings"]
    assert (settings["num_clip"], settings["infer_frames"]) == (2, 12)
    assert "frame_num" not in settings and "sound" in record["seconds"]


def test_poses_and_a_sound_cut_to_the_picture(one: TaskRun, tmp_path: Path) -> None:
    """The first three frames, 3/16 s, are not shown."""
    pose, out = tmp_path / "pose.mp4", tmp_path / "v.mp4"
    drawn = np.zeros((10, 64, 96, 3), np.uint8)
    for i, frame in enumerate(drawn):
        frame[20:40, 6 * i : 6 * i + 20] = 255
    imageio.mimwrite(pose, [*drawn], fps=16)
    flags = ["--pose_video", pose, "--num_clip", "1", "--audio_sync"]
    posed = one.make_frames(out, *flags).astype(int)
    assert len(posed) == 9 and np.abs(posed - one.frames[:9]).max() > 20
    video_sound, sound = read_samples(out), read_samples(one.inputs["--audio"])
    assert correlate(video_sound, sound, 3000, 6000) > 0.9 > correlate(video_sound, sound, 0, 6000)


BAD: dict[str, list[str]] = {
    "no sound at all": [],
    "no such file": ["--audio", "nowhere.wav"],
    "an address": ["--audio", "https://x.org/a.wav"],
    "a folder": ["--audio", "."],
    "an empty file": ["--audio", "empty.wav"],
    "a text": ["--audio", "text.wav"],
    "a truncated wav": ["--audio", "short.wav"],
    "a video without sound": ["--audio", "mute.mp4"],
    "silence": ["--audio", "silent.wav"],
    "11 minutes": ["--audio", "long.wav"],
    "no clip": ["--audio", "a.wav", "--num_clip", "0"],
    "clips of 10": ["--audio", "a.wav", "--infer_frames", "10"],
    "frame_num": ["--audio", "a.wav", "--frame_num", "81"],
    "fps": ["--audio", "a.wav", "--fps", "24"],
    "a pose that is a wav": ["--audio", "a.wav", "--pose_video", "a.wav"],
    "a pose that is missing": ["--audio", "a.wav", "--pose_video", "x.mp4"],
    "latents": ["--audio", "a.wav", "--save_latents"],
    "a last image": ["--audio", "a.wav", "--last_image", "cat.png"],
    "sync": ["--audio", "a.wav", "--audio_sync", "--start_from_ref"],
    "masks": ["--audio", "a.wav", "--use_rainfusion"],
    "a published curve": ["--audio", "a.wav", "--step_cache", "mag"],
    "speech": ["--enable_tts"],
}
S2V_FLAGS = {flag: [flag, value] for flag, value in (("--audio", "a.wav"), ("--num_clip", "2"))} | {
    "--infer_frames": ["--infer_frames", "8"]
}


def mute_video(path: Path, fps: int) -> None:
    imageio.mimwrite(path, [np.zeros((64, 64, 3), np.uint8)] * 4, fps=fps)


def test_refusals(
    tiny: Tiny,
    image_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refusals: Refusals,
) -> None:
    monkeypatch.chdir(tmp_path)
    sound = write_wav(tmp_path / "a.wav", 1.3)
    (tmp_path / "empty.wav").touch()
    (tmp_path / "text.wav").write_text("no sound")
    (tmp_path / "short.wav").write_bytes(sound.read_bytes()[:46])
    shutil.copy(image_path, tmp_path / "cat.png")
    for name, seconds in (("silent", 1), ("long", 660)):
        with wave.open(f"{name}.wav", "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(8000)
            file.writeframes(bytes(2 * 8000 * seconds))
    mute_video(tmp_path / "mute.mp4", 16)
    start = ["--task", "s2v-14B", "--ckpt_dir", tiny("s2v-14B"), "--image", "cat.png"]
    start += ["--prompt", "a cat speaks", "--base_seed", "7", "--save_file", "v.mp4"]
    refusals("s2v", {case: [*start, *flags] for case, flags in BAD.items()})
    other = ["--ckpt_dir", tiny("t2v-A14B"), "--size", "64*64"]
    refusals("s2v: with other tasks", {case: [*other, *more] for case, more in S2V_FLAGS.items()})


def test_notices_about_rates(
    one: TaskRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """8 kHz is telephone quality; a pose video of 25 frames a second gives 12.5."""
    sound = write_wav(tmp_path / "telephone.wav", 1.3, rate=8000)
    mute_video(tmp_path / "pose25.mp4", 25)
    poses = ["--pose_video", tmp_path / "pose25.mp4"]
    assert run_generate(*one.argv, "--audio", sound, *poses, "--plan") == 0
    captured = capfd.readouterr()
    assert "8000 samples a second" in captured.out and "1.28 times" in captured.out
    assert "2 clips of 12 frames" in captured.out
    assert "sound encoder: wav2vec2-large-xlsr-53-english; runs in fp32 on the CPU" in captured.out


def test_the_official_class(one: TaskRun) -> None:
    """Several videos in one call, latents as output, and invalid arguments."""
    model = wan.WanS2V("s2v-14B", one.checkpoint, precision="fp32")
    files = {"ref_image_path": one.inputs["--image"], "audio_path": one.inputs["--audio"]}
    shared: dict[str, Any] = {name: str(path) for name, path in files.items()}
    shared |= {"input_prompt": "a", "max_area": 96 * 64, "num_repeat": 1, "infer_frames": 12}
    shared |= {"sampling_steps": 1, "output_type": "latent"}
    first, other = model.generate_many([{"seed": 7}, {"seed": 8}], **shared)
    assert first is not None and other is not None and first.shape == (16, 3, 8, 8)
    assert not torch.equal(first, other)
    for missing in ({"ref_image_path": None}, {"enable_tts": True}):
        with pytest.raises(ValueError):
            model.generate(**{**shared, **missing})
