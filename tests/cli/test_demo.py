"""The trained demo checkpoint: found without --ckpt_dir, small, and it draws what it is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import imageio
import numpy as np
import pytest
from PIL import Image

from tests.conftest import slow
from tools.demo import evaluate
from tools.demo.scenes import caption
from tools.demo.score import look
from wan import WanI2V, WanT2V
from wan.checkpoint.layout import describe
from wan.cli import main as generate
from wan.configs import WAN_CONFIGS

pytestmark = pytest.mark.usefixtures("one_thread")
REPO = Path(__file__).parents[2]
DEMO = REPO / "examples" / "demo"
LORA = DEMO / "T2V-A14B-4steps-lora"
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
    own = json.loads((DEMO / "t2v-A14B" / "generation_config.json").read_text())
    settings = json.loads(Path("a.json").read_text())["settings"]
    assert settings["prompt"] == own["prompt"] and settings["sample_steps"] == 20
    assert video.shape == (9, 64, 64, 3)
    seen = look(video)[0]  # after the lossy file
    assert f"{seen.colour} {seen.shape} moves {seen.motion}" in settings["prompt"]


@pytest.mark.parametrize("task", ["t2v-A14B", "i2v-A14B"])
def test_heads_are_many_enough_for_real_chunks(task: str) -> None:
    checkpoint = describe(DEMO / task)
    assert checkpoint.heads == 24 and checkpoint.head_dim == 8  # 8 ranks: 3 chunks; 2 ranks: 10
    assert checkpoint.experts.keys() == {"high_noise", "low_noise"}


def test_the_files_stay_small() -> None:
    for folder, limit in ((DEMO, 24.5e6), (LORA, 2.5e6)):
        files = [p for p in folder.rglob("*") if p.is_file() and not p.is_symlink()]
        assert sum(p.stat().st_size for p in files) <= limit


@pytest.mark.parametrize(
    "setting",
    [evaluate.Setting(8, 1.0, prompts=10), slow(evaluate.Setting(20, 3.0, prompts=4))],
    ids=lambda setting: f"{setting.steps} steps",
)
def test_it_draws_what_the_prompt_says(setting: evaluate.Setting) -> None:
    """A sample of the model card's table; the scorer knows nothing of how clips were drawn."""
    model = WanT2V(WAN_CONFIGS["t2v-A14B"], DEMO / "t2v-A14B")
    found = evaluate.score_t2v(model, setting)
    assert found["colour"] >= 95 and found["motion"] >= 90 and found["shape"] >= 80, found


@pytest.mark.slow
def test_its_lora_draws_in_four_steps() -> None:
    """The recipe is recognised from the folder's name."""
    model = WanT2V("t2v-A14B", DEMO / "t2v-A14B", lora_dir=LORA)
    verdicts = []
    for number, scene in evaluate.held_out(10):
        video = model.generate(
            caption(scene), size=(64, 64), frame_num=9, seed=number, offload_model=False
        )
        verdicts.append(evaluate.right(scene, look(evaluate.as_pixels(video))))
    found = evaluate.rates(verdicts)
    assert found["colour"] >= 95 and found["motion"] >= 85 and found["shape"] >= 80, found


@pytest.mark.slow
def test_a_video_starts_with_the_image_it_is_given() -> None:
    model = WanI2V(WAN_CONFIGS["i2v-A14B"], DEMO / "i2v-A14B")
    found = evaluate.score_i2v(model, evaluate.Setting(8, 3.0, prompts=4, shift=5.0))
    assert found["first_frame_psnr"] >= 25 and found["colour"] == 100, found


@pytest.mark.slow
def test_the_vae_keeps_held_out_clips() -> None:
    file = DEMO / "t2v-A14B" / "Wan2.1_VAE.safetensors"
    assert evaluate.score_vae(file, 6)["mean_psnr"] >= 30


def test_the_example_image_is_one_the_demo_knows() -> None:
    with Image.open(IMAGE) as image:
        assert image.width == image.height <= 512
        pixels = np.asarray(image.convert("RGB").resize((64, 64)))
    (seen,) = look(pixels[None])
    prompt = json.loads((DEMO / "i2v-A14B" / "generation_config.json").read_text())["prompt"]
    assert f"{seen.colour} {seen.shape}" in prompt
