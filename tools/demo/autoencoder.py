"""Trains the demo's VAE: the 2.1 architecture with 8 base channels.

    python -m tools.demo.autoencoder --state STATE

The phases train on crops of single pictures (cheap, and most of the learning), then on crops of
short clips, then on full clips. Legend: B clips, F frames, H W pixels.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.demo.render import render_scene
from tools.demo.scenes import make_random_scene
from tools.demo.training import Training, get_device
from wan.app.flag_parser import Parser
from wan.app.programs import run_program

BASE_DIM, SIDE, CLIP = 8, 64, 9
POOL = 500
KL_WEIGHT = 1e-4
_LENGTHS = (9, 9, 9, 33)  # frames of the clips that windows of 9 frames are cut from


def make_autoencoder() -> Any:
    """Makes diffusers' autoencoder, with channels-last convolutions, the fastest layout on CPUs."""
    from diffusers import AutoencoderKLWan

    vae = AutoencoderKLWan(base_dim=BASE_DIM, z_dim=16)
    for module in vae.modules():
        if isinstance(module, nn.Conv3d):
            module.weight.data = module.weight.contiguous(memory_format=torch.channels_last_3d)
    return vae


def _convolve_picture(conv: Any, x_B3FHW: Tensor, cache_x: Tensor | None = None) -> Tensor:
    """Applies a causal convolution to a single frame: only the kernel's last time step matters."""
    if x_B3FHW.shape[2] > 1 or cache_x is not None:
        raise ValueError("Clips of several frames need the full convolution.")
    weight, padding = conv.weight[:, :, -1], conv._padding[0]  # equal on all sides
    return F.conv2d(x_B3FHW[:, :, 0], weight, conv.bias, padding=padding)[:, :, None]


def patch_picture_convolutions(on: bool) -> Any:
    """Returns a context in which convolutions of single frames skip the time axis (2x faster)."""
    from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d

    return mock.patch.object(WanCausalConv3d, "forward", _convolve_picture) if on else nullcontext()


@torch.no_grad()
def make_untrained_autoencoder() -> Any:
    """Makes a network whose residual branches are zero and whose convolutions see one frame.

    Temporal downsampling averages two frames and upsampling repeats them, so that training on
    single pictures carries over to clips without motion.
    """
    vae = make_autoencoder()
    modules: Any = vae.named_modules()
    for name, module in modules:
        if name.endswith((".conv2", ".proj")):
            module.weight.zero_()
            module.bias.zero_()
        if not isinstance(module, nn.Conv3d) or module.kernel_size[0] == 1:
            continue
        module.weight[:, :, :-1] = 0
        if name.endswith("time_conv"):
            same = torch.eye(module.in_channels)[:, :, None, None]
            doubling = module.out_channels // module.in_channels
            nn.init.constant_(cast(Tensor, module.bias), 0)
            module.weight[:, :, -1] = same.repeat(doubling, 1, 1, 1)
            if doubling == 1:
                module.weight[:, :, -2:] = same[:, :, None] / 2
    return vae


def make_windows(seed: int, count: int) -> Tensor:
    """Makes windows of training clips of several lengths, uint8 [count, CLIP, SIDE, SIDE, 3]."""
    random = np.random.default_rng(seed)
    clips = []
    for index in range(count):
        length = _LENGTHS[index % len(_LENGTHS)]
        first = int(random.integers(length - CLIP + 1))
        clips.append(
            render_scene(make_random_scene(seed, index), length, SIDE)[first : first + CLIP]
        )
    return torch.from_numpy(np.stack(clips))


@dataclass(frozen=True)
class Phase:
    """A phase of the training: its steps, clips per step, and the frames and side of the crops."""

    steps: int
    clips: int
    frames: int
    side: int


PHASES = (Phase(1750, 24, 1, 32), Phase(2800, 8, 5, 32), Phase(1200, 4, CLIP, SIDE))


def make_clip_batch(pool: Tensor, random: np.random.Generator, phase: Phase) -> Tensor:
    """Crops random clips around their shapes, to float [B,3,F,H,W] in [-1, 1]."""
    clips = []
    for row in random.integers(len(pool), size=phase.clips):
        first = int(random.integers(CLIP - phase.frames + 1))
        clips.append(_crop_clip(pool[int(row)][first : first + phase.frames], random, phase.side))
    pixels = torch.stack(clips).permute(0, 4, 1, 2, 3).float() / 127.5 - 1
    return pixels.contiguous(memory_format=torch.channels_last_3d)


def _crop_clip(clip_FHW3: Tensor, random: np.random.Generator, size: int) -> Tensor:
    """Crops a square with a random pixel of a shape near its middle."""
    shapes = (clip_FHW3[0] != clip_FHW3[0, 0, 0]).any(-1).nonzero()
    centre = shapes[int(random.integers(len(shapes)))] + torch.from_numpy(random.integers(-8, 9, 2))
    y, x = (int(c) for c in (centre - size // 2).clamp(0, SIDE - size))
    return clip_FHW3[:, y : y + size, x : x + size]


def compute_autoencoder_loss(vae: Any, clips: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Computes the reconstruction loss (L1, squared) of a sampled latent plus a small KL term."""
    posterior = vae.encode(clips).latent_dist
    rebuilt = vae.decode(posterior.sample()).sample
    squared = F.mse_loss(rebuilt, clips)
    kl = 0.5 * (posterior.mean.square() + posterior.var - 1 - posterior.logvar).mean()
    loss = F.l1_loss(rebuilt, clips) + 2 * squared + KL_WEIGHT * kl
    psnr = 10 * float(torch.log10(4 / squared.detach()))
    return loss, {"psnr": psnr, "kl": float(kl.detach())}


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--state", type=Path, required=True, help="folder for states and data")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    steps = sum(phase.steps for phase in PHASES)
    file = options.state / "vae.pt"
    training = Training(make_untrained_autoencoder(), file, steps=steps, peak=3e-3)
    pool = make_windows(seed=1, count=POOL)
    phase_by_step = [phase for phase in PHASES for _ in range(phase.steps)]
    while not training.is_finished:
        random = np.random.default_rng([1, training.step, 0])
        phase = phase_by_step[training.step]
        clips = make_clip_batch(pool, random, phase).to(get_device())
        with patch_picture_convolutions(phase.frames == 1):
            loss, metrics = compute_autoencoder_loss(training.network, clips)
        training.update(loss, **metrics)


if __name__ == "__main__":
    sys.exit(run_program(main))
