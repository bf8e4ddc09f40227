"""Trains the demo's VAE: the 2.1 architecture with 8 base channels.

    python -m tools.demo.autoencoder --state STATE

First small crops of short clips, then whole clips. Legend: B clips, F frames, H W pixels.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.demo.render import render
from tools.demo.scenes import random_scene
from tools.demo.training import Training, join

BASE_DIM, SIDE, CLIP = 8, 64, 9
POOL = 800
KL_WEIGHT = 1e-4
_LENGTHS = (9, 9, 9, 33)  # of the whole clips that the windows of 9 frames are cut from


def network() -> Any:
    """diffusers' autoencoder; convolutions laid out as CPUs are quickest with."""
    from diffusers import AutoencoderKLWan

    vae = AutoencoderKLWan(base_dim=BASE_DIM, z_dim=16)
    for module in vae.modules():
        if isinstance(module, nn.Conv3d):
            module.to(memory_format=torch.channels_last_3d)
    return vae


def windows(seed: int, count: int) -> Tensor:
    """uint8 [count, CLIP, SIDE, SIDE, 3]: windows of training clips of several lengths."""
    random = np.random.default_rng(seed)
    found = []
    for index in range(count):
        length = _LENGTHS[index % len(_LENGTHS)]
        first = int(random.integers(length - CLIP + 1))
        found.append(render(random_scene(seed, index), length, SIDE)[first : first + CLIP])
    return torch.from_numpy(np.stack(found))


def batch(pool: Tensor, random: np.random.Generator, count: int, whole: bool) -> Tensor:
    """Float [B,3,F,H,W] in [-1, 1]: whole clips, or crops of 5 frames of 32x32 at the shapes."""
    clips = [pool[int(row)] for row in random.integers(len(pool), size=count)]
    if not whole:
        first = int(random.integers(CLIP - 4))
        clips = [_crop(clip[first : first + 5], random) for clip in clips]
    pixels = torch.stack(clips).permute(0, 4, 1, 2, 3).float() / 127.5 - 1
    return pixels.contiguous(memory_format=torch.channels_last_3d)


def _crop(clip_FHW3: Tensor, random: np.random.Generator, size: int = 32) -> Tensor:
    """A square that has a random pixel of a shape near its middle."""
    shapes = (clip_FHW3[2] != clip_FHW3[2, 0, 0]).any(-1).nonzero()
    centre = shapes[int(random.integers(len(shapes)))] + torch.from_numpy(random.integers(-8, 9, 2))
    y, x = (int(c) for c in (centre - size // 2).clamp(0, SIDE - size))
    return clip_FHW3[:, y : y + size, x : x + size]


def loss_of(vae: Any, clips: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Reconstruction (L1 and squared) from a sampled latent, and a small KL term."""
    posterior = vae.encode(clips).latent_dist
    rebuilt = vae.decode(posterior.sample()).sample
    squared = F.mse_loss(rebuilt, clips)
    kl = 0.5 * (posterior.mean.square() + posterior.var - 1 - posterior.logvar).mean()
    loss = F.l1_loss(rebuilt, clips) + 2 * squared + KL_WEIGHT * kl
    psnr = 10 * float(torch.log10(4 / squared.detach()))
    return loss, {"psnr": psnr, "kl": float(kl.detach())}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--state", type=Path, required=True, help="folder for states and data")
    parser.add_argument("--crop_steps", type=int, default=2000)
    parser.add_argument("--whole_steps", type=int, default=400)
    options = parser.parse_args()
    rank, ranks = join()
    steps = options.crop_steps + options.whole_steps
    training = Training(network(), options.state / "vae.pt", steps=steps, peak=3e-3)
    pool = windows(seed=1, count=POOL)
    while not training.done:
        random = np.random.default_rng([1, training.step, rank])
        whole = training.step >= options.crop_steps
        clips = batch(pool, random, (4 if whole else 8) // ranks, whole)
        loss, shown = loss_of(training.network, clips)
        training.update(loss, **shown)


if __name__ == "__main__":
    main()
