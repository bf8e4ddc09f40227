"""The video autoencoders of Wan 2.1 (16 channels) and 2.2 (48 channels), by diffusers.

Legend: F H W pixel frames/height/width, f h w latent ones, Z latent channels. Always in float32,
as officially.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wan.checkpoint.keymaps import vae_diffusers_name
from wan.checkpoint.load import Blueprint, stored
from wan.log import progress
from wan.settings.errors import InputError

# Per-channel statistics of the 2.2 latents, published with the model; 2.1's are diffusers' default.
# fmt: off
_MEAN_48 = (
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813,
    0.0891, 0.157, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108,
    -0.2158, 0.2502, -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.123, -0.0313,
    -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.052, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944,
    0.3573, -0.0548, -0.1681, -0.0667,
)
_STD_48 = (
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.499, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901,
    0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986,
    0.5659, 0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065,
    0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.06, 0.3943, 0.5537, 0.5444, 0.4089,
    0.7468, 0.7744,
)
# fmt: on
VAE_22: dict[str, Any] = {  # diffusers' arguments that make its autoencoder the 2.2 one
    "latents_mean": _MEAN_48,
    "latents_std": _STD_48,
    "z_dim": 48,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
}


class VideoVAE:
    """Videos to normalised latents and back. network: that of `blueprint`, loaded."""

    def __init__(self, network: Any, *, tiling: bool = False) -> None:
        self._model = network
        self.tiling = tiling
        config = self._model.config
        device = next(self._model.parameters()).device
        shape = (1, config.z_dim, 1, 1, 1)
        self.mean = torch.tensor(config.latents_mean, device=device).view(shape)
        # The reciprocal is what the official code keeps and divides by when decoding.
        self.scale = 1 / torch.tensor(config.latents_std, device=device).view(shape)

    @property
    def device(self) -> torch.device:
        return self.mean.device

    @torch.no_grad()
    def encode(self, video_3FHW: Tensor) -> Tensor:
        """Pixels in [-1, 1], F = 4n+1, to the normalised posterior mean [Z, n+1, h, w]."""
        posterior = self._model.encode(video_3FHW[None].to(self.device)).latent_dist
        return ((posterior.mode() - self.mean) * self.scale)[0]

    @torch.no_grad()
    def decode(self, latent_Zfhw: Tensor) -> Tensor:
        """Normalised latents to pixels [3, F, H, W], clamped to [-1, 1]."""
        latent = latent_Zfhw[None].to(self.device, torch.float32) / self.scale + self.mean
        if self.tiling:  # only here: tiles would change what an image is encoded to
            self._model.enable_tiling()
        # The decoder is called once per latent frame (and tile).
        total = None if self.tiling else latent.shape[2]
        with progress(total, "decoding", "latent frame") as bar:
            hook = self._model.decoder.register_forward_hook(lambda *_: bar.update() and None)
            try:
                video = self._model.decode(latent, return_dict=False)[0]
            finally:
                hook.remove()
                self._model.disable_tiling()
        return video[0].clamp_(-1, 1)


def blueprint(path: Path) -> Blueprint[nn.Module]:
    """The autoencoder whose weights are in a file or folder, not loaded yet.

    Raises InputError for the weights of another network.
    """
    tensors = stored(path, vae_diffusers_name)
    try:
        base, channels = tensors["encoder.conv_in.weight"].shape[:2]
        z_dim = tensors["post_quant_conv.weight"].shape[0]
        version: dict[str, Any] = {(3, 16): {"z_dim": 16}, (12, 48): VAE_22}[channels, z_dim]
        decoder_base = tensors["decoder.conv_in.weight"].shape[0] // 4
        if min(base, decoder_base) < 1:
            raise ValueError("a size of 0")
    except (LookupError, ValueError) as error:
        raise InputError(
            f"{path} does not hold the weights of a Wan 2.1 or 2.2 VAE (unexpected {error}); "
            "download Wan2.1_VAE.pth or Wan2.2_VAE.pth (or vae/) again."
        ) from error
    make = partial(autoencoder, base_dim=base, decoder_base_dim=decoder_base, **version)
    return Blueprint("VAE", make, tensors, path)


def autoencoder(**sizes: Any) -> Any:
    """diffusers' autoencoder of these sizes."""
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(**sizes)


def published(version: str) -> Any:
    """The autoencoder of Wan "2.1" or "2.2"."""
    if version == "2.1":
        return autoencoder(base_dim=96, decoder_base_dim=96, z_dim=16)
    return autoencoder(base_dim=160, decoder_base_dim=256, **VAE_22)


def tiles(network: Any, sides: Sequence[int], frames: int) -> tuple[int, int, int]:
    """For planning a decoding in tiles: pixels of a tile's side; bytes of all tiles, which live
    while the last one is decoded and while they are joined, in three copies of the video; of these.

    sides: of the video.
    """
    side, step = network.tile_sample_min_height, network.tile_sample_stride_height
    if max(sides) <= side:
        return max(sides), 0, 0
    areas = [sum(min(side, whole - i) for i in range(0, whole, step)) for whole in sides]
    pixel = 3 * frames * 4
    return side, prod(areas) * pixel, 3 * prod(sides) * pixel


def in_float32(_: str, __: torch.dtype) -> torch.dtype:
    """The dtype that the weights are kept in."""
    return torch.float32
