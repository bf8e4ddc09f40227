"""Animate-2: whole runs against diffusers' modular pipelines, with the same random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models.transformers.transformer_wan_animate_2 import MLPProj
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, CLIPVisionModel, UMT5EncoderModel

import wan
from tests.conftest import Tiny, slow
from tests.numerics.test_diffusers import make_official_scheduler
from tests.tasks.tasks import write_moving_box, write_picture
from wan.media.video_reader import read_frames_at, read_video

TOLERANCE = 1e-4
PROMPT = "a cat walks"
STEPS, SEED = 2, 5


class Scheduler:
    """diffusers' solver with the official noise schedule."""

    def __init__(self) -> None:
        self.scheduler = make_official_scheduler("dpm++", 5.0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)

    def step(self, *args: Any, generator: object, **kwargs: Any) -> tuple[Tensor]:
        return self.scheduler.step(*args, **kwargs)  # it draws no noise


def load_transformer(folder: Path) -> Any:
    """Loads the DiT of diffusers, whose class has no argument for the channels of CLIP features."""
    config = json.loads((folder / "config.json").read_text())
    dit = diffusers.WanAnimate2Transformer3DModel(
        **{key: value for key, value in config.items() if not key.startswith("_")}
    )
    state = load_file(folder / "diffusion_pytorch_model.safetensors")
    dit.img_emb = MLPProj(state["img_emb.proj.1.weight"].shape[1], config["dim"])
    dit.load_state_dict(state)
    return dit.float().eval()


def make_diffusers_video(
    folder: Path, is_distilled: bool, image: Image.Image, frames: list[Image.Image], **call: Any
) -> Tensor:
    """Returns the video, [F,3,H,W] in [0, 1]."""
    name = f"WanAnimate2{'Distilled' if is_distilled else ''}Blocks"
    pipe = getattr(diffusers.modular_pipelines, name)().init_pipeline()
    pipe.update_components(
        transformer=load_transformer(folder / "transformer"),
        vae=diffusers.AutoencoderKLWan.from_pretrained(folder / "vae"),
        text_encoder=UMT5EncoderModel.from_pretrained(folder / "text_encoder").float(),
        tokenizer=AutoTokenizer.from_pretrained(folder / "tokenizer"),
        image_encoder=CLIPVisionModel.from_pretrained(folder / "image_encoder").float(),
    )
    pipe.scheduler = Scheduler()
    videos = pipe(
        prompt=PROMPT,
        image=image,
        driving_video=frames,
        num_inference_steps=STEPS,
        generator=torch.Generator().manual_seed(SEED),
        output_type="pt",
        output="videos",
        **call,
    )
    return videos[0]


@pytest.mark.parametrize(
    ("is_distilled", "refert_num"), [(False, 1), slow(True, 1), slow(False, 5)]
)
@pytest.mark.usefixtures("eager_masks")
def test_whole_run(tiny: Tiny, tmp_path: Path, is_distilled: bool, refert_num: int) -> None:
    """Two clips of an image with borders; the video has another rate and ends within a clip."""
    picture = write_picture(tmp_path / "cat.png", size=(90, 71))
    driving_video, frame_num = tmp_path / "drive.mp4", 4 + refert_num
    write_moving_box(driving_video, (64, 48), count=10, fps=30)
    video = read_video(driving_video, "")
    frames = [*map(Image.fromarray, read_frames_at(video, range(video.num_frames)))]
    image = Image.open(picture).convert("RGB")
    expected = make_diffusers_video(
        tiny("animate2-14B", "diffusers"),
        is_distilled,
        image,
        frames,
        width=80,
        height=48,
        segment_frame_length=frame_num,
        prev_segment_conditioning_frames=refert_num,
        driving_video_fps=video.fps,
    )
    model = wan.WanAnimate2("animate2-14B", tiny("animate2-14B"), precision="fp32")
    call = {
        "size": (80, 48),
        "frame_num": frame_num,
        "refert_num": refert_num,
        "sampling_steps": STEPS,
        "guide_scale": 1.0 if is_distilled else 3.0,
        "seed": SEED,
    }
    output = model.generate(PROMPT, image, str(driving_video), **call).transpose(0, 1) / 2 + 0.5
    rows, columns = output.shape[2:]
    assert output.shape[0] == 8 and 0 <= expected.shape[2] - rows <= 1  # an mp4 has even sides
    assert (output - expected[:, :, :rows, :columns]).abs().max() <= TOLERANCE
