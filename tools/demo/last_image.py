"""Teaches the demo checkpoint to end a video with a given image, as a LoRA for each i2v expert.

    python -m tools.demo.last_image --state STATE --clips 1200
    python -m tools.demo.last_image --state STATE --expert high_noise    (and low_noise)
    python -m tools.demo.last_image --state STATE --out examples/demo/I2V-A14B-last-image-lora
    python -m tools.demo.last_image --score examples/demo/I2V-A14B-last-image-lora

The checkpoint was trained on first frames alone. Scenes are training scenes; the scores use
held-out ones. Half of the steps drop the caption, so that the network learns to use the images.
Legend: N clips, B clips of a step, Z latent channels, f h w latent frames/height/width.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from tools.demo.dit import draw_sigmas
from tools.demo.evaluate import compute_psnr, list_held_out_scenes, to_pixels
from tools.demo.latents import render_training_clip
from tools.demo.lora import BATCH, TOKENS, add_lora, encode_prompts, run_training_program
from tools.demo.render import render_scene
from tools.demo.scenes import Scene, make_caption, make_random_scene
from tools.demo.training import Training, save_atomically
from wan import WanI2V
from wan.settings.presets import PRESETS

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo" / "i2v-A14B"
FRAMES, RANK, SEED, DROPPED = 9, 16, 5000, 0.5


def load_base_model(**options: Any) -> Any:
    return WanI2V("i2v-A14B", DEMO, precision="fp32", **options)


@torch.inference_mode()
def encode_end_clips(state: Path, count: int) -> None:
    """Writes latents of clips and of their ends, [N,16,f,h,w] each, unless the file exists."""
    file = state / "ends.pt"
    if file.exists():
        return
    encode, clean, ends = load_base_model()._pipeline.vae.get().encode, [], []
    for index in range(count):
        video = render_training_clip(SEED, index, FRAMES)
        clean.append(encode(video))
        between = torch.zeros_like(video[:, 1:-1])
        ends.append(encode(torch.cat((video[:, :1], between, video[:, -1:]), dim=1)))
    save_atomically((torch.stack(clean), torch.stack(ends)), file)


def train_last_image_lora(state: Path, part: str, steps: int, peak: float) -> None:
    """Trains a LoRA by flow matching as in `tools.demo.dit`, given the first and last frame."""
    torch.manual_seed(0)
    model = load_base_model()
    network = add_lora(model, part, RANK)
    clean, ends = torch.load(state / "ends.pt", mmap=True)
    texts = [
        make_caption(make_random_scene(SEED, i), np.random.default_rng([SEED, i]))
        for i in range(len(clean))
    ]
    prompt_embeds = encode_prompts(model, [*texts, ""])
    mask = torch.zeros(BATCH, 4, *clean.shape[2:])
    mask[:, :, 0] = mask[:, 3, -1] = 1
    training = Training(network, state / f"ends_{part}.pt", steps=steps, peak=peak)
    while not training.is_finished:
        random = np.random.default_rng([7, training.step])
        rows = torch.from_numpy(random.integers(len(clean), size=BATCH))
        noise = torch.from_numpy(random.standard_normal(clean[rows].shape, dtype=np.float32))
        sigma = draw_sigmas(random, BATCH, PRESETS["i2v-A14B"], part)
        x = torch.lerp(clean[rows], noise, sigma.view(-1, 1, 1, 1, 1))
        y = torch.cat((mask, ends[rows]), dim=1)
        text = [prompt_embeds[-1 if random.random() < DROPPED else row] for row in rows.tolist()]
        velocities = network(list(x), 1000 * sigma, text, TOKENS, list(y))
        training.update(F.mse_loss(torch.stack(velocities), noise - clean[rows]))


def score_last_image(folder: Path, prompts: int) -> None:
    """Prints PSNRs to held-out clips, with and without caption, last image and LoRA."""
    print("| Given | LoRA | PSNR of the first frame, dB | of the last frame | of the clip |")
    print("|---|---|---|---|---|")
    for loading in ({}, {"lora_dir": str(folder)}):
        model = load_base_model(**loading)
        for with_caption in (True, False):
            for with_last in (True,) if loading else (False, True):
                psnrs = [
                    _measure_psnrs(model, *row, with_caption, with_last)
                    for row in list_held_out_scenes(prompts)
                ]
                conditions = [*(["caption"] if with_caption else []), "first image"]
                conditions += ["last image"] if with_last else []
                means = " | ".join(f"{mean:.1f}" for mean in np.mean(psnrs, axis=0))
                lora = "yes" if loading else "no"
                print(f"| {', '.join(conditions)} | {lora} | {means} |", flush=True)


def _measure_psnrs(
    model: Any, number: int, scene: Scene, with_caption: bool, with_last: bool
) -> list[float]:
    clip = render_scene(scene, FRAMES, 64)
    first, last = Image.fromarray(clip[0]), Image.fromarray(clip[-1])
    options: dict[str, Any] = {"last_image": last} if with_last else {}
    if not with_caption:
        options["guide_scale"] = 1.0
    video: Any = model.generate(
        make_caption(scene) if with_caption else ".",
        first,
        max_area=64 * 64,
        frame_num=FRAMES,
        seed=number,
        sampling_steps=20,
        **options,
    )
    pixels = to_pixels(video)
    pairs = (pixels[:1], clip[:1]), (pixels[-1:], clip[-1:]), (pixels, clip)
    return [compute_psnr(mine, true) for mine, true in pairs]


if __name__ == "__main__":
    sys.exit(
        run_training_program(
            (__doc__ or "").splitlines()[0],
            "ends",
            encode_end_clips,
            train_last_image_lora,
            score_last_image,
            steps=2000,
        )
    )
