"""The trained demo checkpoint: it is the default, it is small, and it follows its prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import imageio
import numpy as np
import pytest
from PIL import Image

from tests.conftest import slow
from tests.frames import read_frames
from tests.pipelines import resolve_argv
from tools.demo import evaluate
from tools.demo.render import render_scene
from tools.demo.scenes import make_caption
from tools.demo.score import detect_shapes, find_foreground
from wan import WanCausal, WanI2V, WanT2V, WanVace
from wan.app.notices import make_demo_size_notices
from wan.cli import main as generate
from wan.configs import WAN_CONFIGS

pytestmark = pytest.mark.usefixtures("one_thread")
REPO = Path(__file__).parents[2]
DEMO = REPO / "examples" / "demo"
LORA = DEMO / "T2V-A14B-4steps-lora"
CONTROL = REPO / "examples" / "control"
IMAGE = REPO / "examples" / "star.png"


def test_without_a_checkpoint_a_run_takes_the_demo_and_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    assert generate.main(["--save_file", "a.mp4", "--base_seed", "1"]) == 0
    out = capfd.readouterr().out
    assert f"using the demo checkpoint {DEMO / 't2v-A14B'}. It draws plain shapes" in out
    assert "is not a size" not in out and not (tmp_path / "cache").exists()
    with imageio.get_reader("a.mp4") as reader:
        video: Any = np.stack(list(reader.iter_data()))
        assert reader.get_meta_data()["fps"] == 8
    generation_config = json.loads((DEMO / "t2v-A14B" / "generation_config.json").read_text())
    settings = json.loads(Path("a.json").read_text())["settings"]
    assert settings["prompt"] == generation_config["prompt"] and settings["sample_steps"] == 20
    assert video.shape == (9, 64, 64, 3)
    detected = detect_shapes(video)[0]  # after the lossy file
    assert f"{detected.colour} {detected.shape} moves {detected.motion}" in settings["prompt"]


def test_a_video_that_is_a_little_larger_is_no_reason_for_a_notice() -> None:
    """The aspect ratio of an image may make it so."""
    folder = DEMO / "t2v-A14B"
    for size, number in (("64*64", 0), ("272*16", 0), ("96*64", 1)):
        params = resolve_argv(["--ckpt_dir", folder, "--size", size]).params
        assert len(make_demo_size_notices(params, folder)) == number, size


def test_the_files_stay_small() -> None:
    for folder, limit in ((DEMO, 33e6), (LORA, 2.5e6)):
        files = [p for p in folder.rglob("*") if p.is_file() and not p.is_symlink()]
        assert sum(p.stat().st_size for p in files) <= limit


@pytest.mark.parametrize(
    "setting",
    [
        evaluate.Setting(8, 1.0, prompts=3),
        slow(evaluate.Setting(8, 1.0, prompts=10)),
        slow(evaluate.Setting(20, 3.0, prompts=4)),
    ],
    ids=lambda setting: f"{setting.steps} steps, {setting.prompts} prompts",
)
def test_the_demo_draws_the_prompt(setting: evaluate.Setting) -> None:
    """Checks a sample of the model card's table; the scorer is independent of the renderer."""
    model = WanT2V(WAN_CONFIGS["t2v-A14B"], DEMO / "t2v-A14B")
    rates = evaluate.score_t2v(model, setting)
    assert rates["colour"] >= 95 and rates["motion"] >= 90 and rates["shape"] >= 80, rates


@pytest.mark.slow
def test_its_lora_draws_in_four_steps() -> None:
    """The recipe is recognized by the folder's name."""
    model = WanT2V("t2v-A14B", DEMO / "t2v-A14B", lora_dir=LORA)
    verdicts = []
    for number, scene in evaluate.list_held_out_scenes(10):
        video = model.generate(
            make_caption(scene), size=(64, 64), frame_num=9, seed=number, offload_model=False
        )
        verdicts.append(evaluate.judge_shapes(scene, detect_shapes(evaluate.to_pixels(video))))
    rates = evaluate.compute_rates(verdicts)
    assert rates["colour"] >= 95 and rates["motion"] >= 85 and rates["shape"] >= 80, rates


@pytest.mark.slow
def test_a_video_starts_with_its_input_image() -> None:
    model = WanI2V(WAN_CONFIGS["i2v-A14B"], DEMO / "i2v-A14B")
    scores = evaluate.score_i2v(model, evaluate.Setting(8, 3.0, prompts=4, shift=5.0))
    assert scores["first_frame_psnr"] >= 25 and scores["colour"] == 100, scores


@pytest.mark.slow
def test_the_vae_keeps_held_out_clips() -> None:
    file = DEMO / "t2v-A14B" / "Wan2.1_VAE.safetensors"
    assert evaluate.score_vae(file, 6)["mean_psnr"] >= 30


def test_the_example_image_is_one_the_demo_knows() -> None:
    with Image.open(IMAGE) as image:
        assert image.width == image.height <= 512
        pixels = np.asarray(image.convert("RGB").resize((64, 64)))
    (detected,) = detect_shapes(pixels[None])
    prompt = json.loads((DEMO / "i2v-A14B" / "generation_config.json").read_text())["prompt"]
    assert f"{detected.colour} {detected.shape}" in prompt


def test_the_causal_student_is_the_default_and_draws_the_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    monkeypatch.chdir(tmp_path)
    prompt = "a small white circle moves right on a brown background"  # never trained on
    flags = ["--task", "causal-1.3B", "--prompt", prompt, "--save_file", "a.mp4"]
    assert generate.main([*flags, "--base_seed", "1"]) == 0
    out = capfd.readouterr().out
    assert f"using the demo checkpoint {DEMO / 'causal-1.3B'}. It draws plain shapes" in out
    assert json.loads(Path("a.json").read_text())["settings"]["local_attn_size"] == 9
    video = read_frames(Path("a.mp4"))
    assert video.shape == (81, 64, 64, 3)
    (detected,) = detect_shapes(video)
    assert f"{detected.colour} {detected.shape} moves {detected.motion}" in prompt


def test_the_page_has_the_scores_of_the_causal_student() -> None:
    rows = json.loads((DEMO / "scores.json").read_text())["causal"]
    page = (REPO / "docs" / "causal.md").read_text()
    assert [row["frame_num"] for row in rows] == [81, 237, 237]
    for row in rows:
        video = [str(row[x]) for x in ("frame_num", "local_attn_size", "sink_size", "prompts")]
        rates = (" / ".join(f"{x:.0f}" for x in row[y].values()) for y in ("first", "last"))
        cells = *video, *rates
        assert f"| {' | '.join(cells)} |" in page, cells


@pytest.mark.slow
def test_the_causal_student_draws_its_prompts() -> None:
    """Of 25 shapes; the standard error of such a sample is 5 %."""
    model = WanCausal("causal-1.3B", DEMO / "causal-1.3B")
    video = {"frame_num": 81, "local_attn_size": 9}
    rates = evaluate.score_causal(model, 20, video)["first"]
    assert min(rates.values()) >= 80, rates


def test_a_shape_is_replaced_where_the_mask_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    """The new shape moves as the old one; the demo and its settings are the defaults."""
    monkeypatch.chdir(tmp_path)
    files = [CONTROL / "source.mp4", CONTROL / "mask.mp4"]
    flags = ["--task", "vace-A14B", "--src_video", str(files[0]), "--src_mask", str(files[1])]
    flags += ["--sample_steps", "8", "--save_file", "a.mp4", "--base_seed", "1"]
    assert generate.main(flags) == 0
    assert "using the demo checkpoint" in capfd.readouterr().out
    source, generated = (read_frames(Path(file)) for file in (files[0], "a.mp4"))
    prompt = json.loads(Path("a.json").read_text())["settings"]["prompt"]
    (old_shape,), (new_shape,) = detect_shapes(source), detect_shapes(generated)
    assert f"{new_shape.colour} {new_shape.shape}" in prompt
    assert f"{old_shape.colour} {old_shape.shape}" not in prompt
    tracks = [
        np.array([np.argwhere(mask).mean(0) for mask in find_foreground(video.astype(np.float32))])
        for video in (source, generated)
    ]
    assert np.linalg.norm(tracks[0] - tracks[0][0], axis=-1).max() > 8, "it moves"
    assert np.linalg.norm(tracks[0] - tracks[1], axis=-1).max() < 3


@pytest.mark.slow
def test_frames_between_control_frames(tmp_path: Path) -> None:
    model = WanVace("vace-A14B", DEMO / "vace-A14B")
    for number, scene in evaluate.list_held_out_scenes(4):
        wanted = render_scene(scene, 9, 64)
        mask = np.full_like(wanted, 255)
        kept = ([0], [8], [0, 8], [0, 4, 8])[number]
        mask[kept] = 0
        source = np.where(mask > 0, np.uint8(128), wanted)
        files = [str(tmp_path / name) for name in ("source.mp4", "mask.mp4")]
        for file, frames in zip(files, (source, mask), strict=True):
            imageio.mimwrite(file, list(frames), fps=16, quality=10)
        video = model.generate(
            make_caption(scene),
            *files,
            size=(64, 64),
            frame_num=9,
            seed=number,
            sampling_steps=20,
            guide_scale=1.0,
            shift=12.0,
            offload_model=False,
        )
        assert evaluate.compute_psnr(evaluate.to_pixels(video)[kept], wanted[kept]) >= 24
