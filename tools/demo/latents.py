"""Encodes the training clips of the DiTs with the trained VAE.

    python -m tools.demo.latents --state STATE [--images]

--images writes image-to-video's conditions: latents of the first frame followed by gray frames.
Legend: N clips, F frames, f h w latent frames/height/width.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tools.demo import autoencoder
from tools.demo.render import render_scene
from tools.demo.scenes import make_random_scene
from tools.demo.training import get_device, load_averaged_weights, save_atomically
from wan.app.flag_parser import Parser
from wan.app.programs import run_program

CLIPS = {9: 8000, 17: 1500, 33: 800, 249: 100}  # frames -> number of clips
IMAGES = {9: 3000, 17: 500, 33: 250, 249: 30}  # the clips among them that train i2v
SEED = {frames: 1000 + frames for frames in CLIPS}


def make_official_vae(state: Path) -> dict[str, Tensor]:
    """Makes the trained VAE's weights under diffusers' names, with the official latent statistics.

    The official normalization is fixed, so each channel's mean and deviation over training clips
    are folded into the 1x1 convolutions before and after the latent.
    """
    vae = autoencoder.make_autoencoder()
    vae.load_state_dict(load_averaged_weights(state / "vae.pt"))
    clips = autoencoder.make_windows(seed=4, count=128)
    with torch.no_grad():
        pixels = clips.permute(0, 4, 1, 2, 3).float() / 127.5 - 1
        latents = vae.encode(pixels).latent_dist.mode()
        std, mean = torch.std_mean(latents, dim=(0, 2, 3, 4))
        scale = torch.tensor(vae.config.latents_std) / std
        shift = torch.tensor(vae.config.latents_mean) - mean * scale
        into, out = vae.quant_conv, vae.post_quant_conv
        into.weight[:16] *= scale.view(16, 1, 1, 1, 1)
        into.bias[:16] = into.bias[:16] * scale + shift
        out.bias -= (out.weight[:, :, 0, 0, 0] * (shift / scale)).sum(1)
        out.weight /= scale.view(1, 16, 1, 1, 1)
    return {name: tensor.bfloat16().float() for name, tensor in vae.state_dict().items()}


def render_training_clip(seed: int, index: int, frames: int) -> Tensor:
    """Renders a training clip, float [3,F,H,W] in [-1, 1]."""
    scene = make_random_scene(seed, index)
    video = torch.from_numpy(render_scene(scene, frames, autoencoder.SIDE))
    return video.permute(3, 0, 1, 2).float() / 127.5 - 1


@torch.no_grad()
def encode_clips(state: Path, frames: int, images: bool) -> None:
    """Writes the latents of the clips of one length, float16 [N,16,f,h,w], unless they exist."""
    file = state / f"{'images' if images else 'latents'}{frames}.pt"
    if file.exists():
        return
    vae = autoencoder.make_autoencoder()
    vae.load_state_dict(torch.load(state / "vae_official.pt", weights_only=True))
    vae.to(get_device())
    mean, std = (
        torch.tensor(values).view(16, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    batches = []
    for indices in torch.arange((IMAGES if images else CLIPS)[frames]).split(max(1, 144 // frames)):
        video = torch.stack([render_training_clip(SEED[frames], int(i), frames) for i in indices])
        if images:
            video[:, :, 1:] = 0
        batches.append(
            ((vae.encode(video.to(get_device())).latent_dist.mode().cpu() - mean) / std).half()
        )
    latents = torch.cat(batches)
    save_atomically(latents, file)
    spread, centre = torch.std_mean(latents.float())
    print(
        f"{file.name}: {len(latents)} clips, mean {centre:.3f}, deviation {spread:.3f}", flush=True
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--state", type=Path, required=True, help="folder for states and data")
    parser.add_argument("--images", action="store_true")
    options = parser.parse_args(argv)
    if not (options.state / "vae_official.pt").exists():
        save_atomically(make_official_vae(options.state), options.state / "vae_official.pt")
    for frames in CLIPS:
        encode_clips(options.state, frames, options.images)


if __name__ == "__main__":
    sys.exit(run_program(main))
