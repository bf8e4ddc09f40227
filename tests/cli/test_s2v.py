"""Whole runs of s2v-14B: clips, sound in the mp4, records, poses, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import wave
from pathlib import Path
from typing import Any

import imageio
import imageio_ffmpeg
import numpy as np
import pytest
import torch

from tests.conftest import slow
from tests.dist import GENERATE, TORCHRUN
from tests.inputs import changed_contents
from tools.make_sound import write
from wan.cli import main as generate
from wan.modules.s2v import WanModel_S2V

FFMPEG = imageio_ffmpeg.get_ffmpeg_exe()


def run(*argv: object) -> int:
    return generate.main([str(argument) for argument in argv])


def frames(path: Path) -> np.ndarray:
    return np.stack(list(imageio.get_reader(path).iter_data()))


def streams(path: Path) -> str:
    return subprocess.run([FFMPEG, "-i", str(path)], capture_output=True, text=True).stderr


def samples(path: Path) -> np.ndarray:
    """The sound of a file at 16 kHz."""
    command = [FFMPEG, "-v", "error", "-i", str(path), "-ac", "1", "-ar", "16000", "-f", "s16le"]
    done = subprocess.run([*command, "-"], capture_output=True, check=True)
    return np.frombuffer(done.stdout, "<i2").astype(float)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1.3 seconds: two clips of 12 frames."""
    return write(tmp_path_factory.mktemp("sounds") / "voice.wav", 1.3)


@pytest.fixture(scope="module")
def asked(tiny, image_path: Path, sound: Path) -> list[str]:
    flags = ["--task", "s2v-14B", "--ckpt_dir", tiny("s2v-14B"), "--image", image_path]
    flags += ["--audio", sound, "--prompt", "a cat speaks", "--base_seed", "7"]
    return [*map(str, flags), "--size", "96*64", "--sample_steps", "2", "--infer_frames", "12"]


@pytest.fixture(scope="module")
def plain(asked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("plain") / "plain.mp4"
    assert run(*asked, "--save_file", out) == 0
    return out


def test_a_video_with_its_sound(plain: Path, sound: Path) -> None:
    """12 - 3 and 12 frames; the shorter of picture and sound ends it, at 16 frames a second."""
    assert frames(plain).shape[0] in (20, 21)
    said = streams(plain)
    assert "16 fps" in said and "Audio: aac" in said
    ours, theirs = samples(plain), samples(sound)
    length = min(len(ours), len(theirs)) - 4000
    shifts = [abs(np.corrcoef(ours[s : s + length], theirs[:length])[0, 1]) for s in (0, 3000)]
    assert shifts[0] > 0.9 > shifts[1]
    record = json.loads(plain.with_suffix(".json").read_text())
    settings = record["settings"]
    assert record["video"] == {"frames": 21, "width": 64, "height": 64, "fps": 16}
    assert (settings["num_clip"], settings["infer_frames"]) == (2, 12)
    assert Path(settings["audio"]) == sound and "frame_num" not in settings
    assert {"sound", "text", "conditioning", "denoising", "decoding"} <= set(record["seconds"])
    assert not [p for p in plain.parent.iterdir() if p.name not in ("plain.mp4", "plain.json")]


def test_a_record_repeats_it(plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "again.mp4"
    assert run("--from_json", plain.with_suffix(".json"), "--save_file", out) == 0
    assert (frames(out) == frames(plain)).all()


def test_the_sound_can_be_cut_to_the_picture(asked: list[str], sound: Path, tmp_path: Path) -> None:
    out = tmp_path / "sync.mp4"
    assert run(*asked, "--num_clip", "1", "--audio_sync", "--save_file", out) == 0
    ours, theirs = samples(out), samples(sound)
    length, cut = 6000, 3000  # 3/16 s
    right = abs(np.corrcoef(ours[:length], theirs[cut : cut + length])[0, 1])
    wrong = abs(np.corrcoef(ours[:length], theirs[:length])[0, 1])
    assert right > 0.9 > wrong and frames(out).shape[0] == 9


@pytest.mark.parametrize(
    "flags",
    [
        ["--offload_model", "block"],
        slow(["--offload_model", "false"]),
        slow(["--text_kv_cache", "false"]),
        slow(["--offload_model", "block", "--text_kv_cache", "false"]),
    ],
    ids=str,
)
def test_what_changes_no_bit(
    flags: list[str], asked: list[str], plain: Path, tmp_path: Path
) -> None:
    assert run(*asked, *flags, "--save_file", tmp_path / "v.mp4") == 0
    assert (frames(tmp_path / "v.mp4") == frames(plain)).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "exact"),
    [
        (["--ulysses_size", "2", "--comm_type", "1"], True),
        (["--cfg_size", "2", "--dit_fsdp", "--t5_fsdp"], True),
        (["--ring_size", "2", "--vae_parallel"], False),
    ],
    ids=str,
)
def test_two_ranks(
    flags: list[str], exact: bool, asked: list[str], plain: Path, tmp_path: Path
) -> None:
    out = tmp_path / "v.mp4"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    subprocess.run(
        [*torchrun, GENERATE, *asked, *flags, "--save_file", str(out)],
        env=TORCHRUN | {"PATH": "/usr/bin:/bin"},
        check=True,
        timeout=300,
    )
    off = np.abs(frames(out).astype(int) - frames(plain))
    assert (off.max() == 0) if exact else (off.max() <= 25 and off.mean() < 1)


@pytest.mark.slow
def test_a_step_cache_begins_anew_with_each_clip(asked: list[str], tmp_path: Path) -> None:
    flags = ["--step_cache", "steps:1,3", "--sample_steps", "6", "--step_cache_force"]
    assert run(*asked, *flags, "--save_file", tmp_path / "v.mp4") == 0
    cache = json.loads((tmp_path / "v.json").read_text())["step_cache"]
    assert cache["computed"]["cond"] == [0, 1, 3]  # of the last clip


def test_poses_and_the_picture_as_first_frame(
    asked: list[str], plain: Path, tmp_path: Path
) -> None:
    pose, out = tmp_path / "pose.mp4", tmp_path / "v.mp4"
    writer = imageio_ffmpeg.write_frames(str(pose), (96, 64), fps=16)
    writer.send(None)
    for i in range(10):
        frame = np.zeros((64, 96, 3), np.uint8)
        frame[20:40, 6 * i : 6 * i + 20] = 255
        writer.send(frame)
    writer.close()
    flags = ["--pose_video", pose, "--start_from_ref", "--num_clip", "1"]
    assert run(*asked, *flags, "--save_file", out) == 0
    assert frames(out).shape[0] == 12
    assert run(*asked, *flags[:2], "--num_clip", "1", "--save_file", tmp_path / "w.mp4") == 0
    posed = frames(tmp_path / "w.mp4")
    assert np.abs(posed.astype(int) - frames(plain)[:9]).max() > 20


@pytest.mark.slow
def test_a_prompt_file(asked: list[str], plain: Path, tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    more = json.dumps({"prompt": "a cat speaks", "num_clip": 1, "base_seed": 7})
    lines.write_text(f"a cat speaks\n{more}\n")
    at = asked.index("--prompt")
    flags = [*asked[:at], *asked[at + 2 :]]
    assert run(*flags, "--prompt_file", lines, "--save_file", tmp_path / "out") == 0
    whole, short = sorted((tmp_path / "out").glob("*.mp4"))
    assert (frames(whole) == frames(plain)).all()
    assert (frames(short) == frames(plain)[:9]).mean() > 0.5  # x264 looks ahead


def test_clips_before_a_failure_are_kept(
    asked: list[str], plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clip 3 of 3 fails; the first two are there, with their sound, and nothing else is."""
    calls, forward = [0], WanModel_S2V.forward

    def failing(self: Any, *args: Any, **more: Any) -> Any:
        calls[0] += 1
        if calls[0] > 2 * 2 * 2:
            raise OSError(28, "No space left on device")
        return forward(self, *args, **more)

    monkeypatch.setattr(WanModel_S2V, "forward", failing)
    at = asked.index("--infer_frames")
    flags = [*asked[:at], "--infer_frames", "8"]
    assert run(*flags, "--save_file", tmp_path / "v.mp4") == 1
    (kept,) = tmp_path.iterdir()
    assert kept.name == "v.clips-1-2.mp4" and "Audio: aac" in streams(kept)
    assert frames(kept).shape[0] == 8 + 8 - 3


BAD: dict[str, tuple[list[str], str]] = {
    "no sound at all": ([], "follows a sound; give one with --audio"),
    "no such file": (["--audio", "nowhere.wav"], "does not exist; give a sound"),
    "an address": (["--audio", "https://x.org/a.wav"], "is an address, not a file"),
    "a folder": (["--audio", "."], "is not a file"),
    "an empty file": (["--audio", "empty.wav"], "is empty (0 bytes)"),
    "a text": (["--audio", "text.wav"], "cannot be read as a sound"),
    "a truncated wav": (["--audio", "short.wav"], "give"),
    "a video without sound": (["--audio", "mute.mp4"], "has no sound in it"),
    "silence": (["--audio", "silent.wav"], "is silent"),
    "11 minutes": (["--audio", "long.wav"], "is longer than 10 minutes"),
    "no clip": (["--audio", "a.wav", "--num_clip", "0"], "from 1 to"),
    "clips of 10": (["--audio", "a.wav", "--infer_frames", "10"], "use 8 or 12"),
    "frame_num": (["--audio", "a.wav", "--frame_num", "81"], "drop it"),
    "fps": (["--audio", "a.wav", "--fps", "24"], "would part picture and sound"),
    "a pose that is a wav": (["--audio", "a.wav", "--pose_video", "a.wav"], "cannot be read as a"),
    "a pose that is missing": (["--audio", "a.wav", "--pose_video", "x.mp4"], "does not exist"),
    "latents": (["--audio", "a.wav", "--save_latents"], "decoded one after the other"),
    "a last image": (["--audio", "a.wav", "--last_image", "cat.png"], "is not for the task"),
    "sync": (["--audio", "a.wav", "--audio_sync", "--start_from_ref"], "begin together"),
    "masks": (["--audio", "a.wav", "--use_rainfusion"], "masks the tokens of one video"),
    "a published curve": (["--audio", "a.wav", "--step_cache", "mag"], "curve"),
    "speech": (["--enable_tts"], "speech is not made here"),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, image_path: Path) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    write(folder / "a.wav", 1.3)
    (folder / "empty.wav").touch()
    (folder / "text.wav").write_text("no sound")
    (folder / "short.wav").write_bytes((folder / "a.wav").read_bytes()[:46])
    shutil.copy(image_path, folder / "cat.png")
    for name, seconds in (("silent", 1), ("long", 660)):
        with wave.open(str(folder / f"{name}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(8000)
            file.writeframes(bytes(2 * 8000 * seconds))
    writer = imageio_ffmpeg.write_frames(str(folder / "mute.mp4"), (64, 64), fps=16)
    writer.send(None)
    for _ in range(4):
        writer.send(np.zeros((64, 64, 3), np.uint8))
    writer.close()
    return folder


@pytest.mark.parametrize("name", BAD)
def test_refused(
    name: str,
    asked: list[str],
    files: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags, words = BAD[name]
    monkeypatch.chdir(files)
    at = asked.index("--audio")
    assert run(*asked[:at], *asked[at + 2 :][:4], *flags, "--save_file", "v.mp4") == 2
    said = capfd.readouterr().err.strip().splitlines()
    assert len(said) == 1 and words in said[0] and re.search(r"[.?]$", said[0])


@pytest.mark.parametrize(
    "flags", [["--audio", "a.wav"], ["--num_clip", "2"], ["--infer_frames", "8"]], ids=str
)
def test_other_tasks_refuse_them(
    flags: list[str], tiny, files: Path, capfd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    assert run("--ckpt_dir", tiny("t2v-A14B"), *flags, "--size", "64*64") == 2
    assert "s2v-14B" in capfd.readouterr().err


def test_notices_about_rates(asked: list[str], files: Path, capfd, monkeypatch) -> None:
    """8 kHz is telephone quality; a pose video of 25 frames a second gives 12.5."""
    monkeypatch.chdir(files)
    write(files / "telephone.wav", 1.3, rate=8000)
    writer = imageio_ffmpeg.write_frames("pose25.mp4", (64, 64), fps=25)
    writer.send(None)
    for _ in range(4):
        writer.send(np.zeros((64, 64, 3), np.uint8))
    writer.close()
    flags = ["--audio", "telephone.wav", "--pose_video", "pose25.mp4", "--plan"]
    assert run(*asked, *flags) == 0
    said = capfd.readouterr()
    assert "8000 samples a second" in said.out and "1.28 times" in said.out
    assert "2 clips of 12 frames" in said.out
    assert "sound encoder: wav2vec2-large-xlsr-53-english; runs in fp32 on the CPU" in said.out


@pytest.mark.slow
@torch.no_grad()
def test_the_official_class(tiny, image_path: Path, sound: Path, plain: Path) -> None:
    import wan

    model = wan.WanS2V("s2v-14B", tiny("s2v-14B"), precision="fp32")
    given = {"infer_frames": 12, "sampling_steps": 2, "seed": 7, "max_area": 96 * 64}
    more = {"shift": 3.0, "guide_scale": 4.5, "num_repeat": None}
    video = model.generate("a cat speaks", str(image_path), str(sound), **given, **more)
    assert video is not None and video.shape == (3, 21, 64, 64)
    coded, ours = frames(plain)[0].mean(axis=2), video[:, 0].mean(dim=0).numpy()
    assert np.corrcoef(ours.ravel(), coded.ravel())[0, 1] > 0.95  # the mp4 is lossy
    latents = model.generate(
        "a cat speaks", str(image_path), str(sound), **given, **more, output_type="latent"
    )
    assert latents is not None and latents.shape == (16, 6, 8, 8)
    calls = [{"seed": seed, "num_repeat": 1} for seed in (7, 8)]
    shared = {"input_prompt": "a", "ref_image_path": str(image_path), "audio_path": str(sound)}
    one, other = model.generate_many(calls, **shared, infer_frames=12, sampling_steps=2)
    assert one is not None and other is not None and one.shape[1] == 9
    assert not torch.equal(one, other)
    with pytest.raises(ValueError, match="starts from an image"):
        model.generate("a", None, str(sound))
    with pytest.raises(ValueError, match="speech is not made here"):
        model.generate("a", str(image_path), str(sound), enable_tts=True)


@pytest.mark.parametrize("flag", ["--image", "--audio", "--pose_video"])
def test_ranks_compare_the_files(flag: str, asked: list[str], tmp_path: Path) -> None:
    imageio.mimwrite(tmp_path / "pose.mp4", np.zeros((12, 64, 96, 3), np.uint8), fps=16)
    argv = [*asked, "--pose_video", str(tmp_path / "pose.mp4")]
    assert changed_contents(argv, flag, tmp_path) == {f"the content of {flag}"}
