"""The official class of Wan2.1's video autoencoder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from wan.device import select_device
from wan.modules.vae.video_vae import VideoVAE, read_vae_spec
from wan.settings.errors import InputError


class Wan2_1_VAE:
    """Encodes and decodes videos with `wan.modules.vae`, under the official names.

    Args:
        z_dim: Latent channels; another number than that of the file is refused.
        vae_pth: `Wan2.1_VAE.pth` or another file or folder with its weights.
        dtype: Of the weights and the computation.
        device: None: the accelerator, without one the CPU.

    Attributes:
        model: The network.
        scale: Mean and reciprocal standard deviation of the latents' channels, [Z] each.

    Raises:
        InputError: A ValueError: the file holds no autoencoder of this version.
    """

    def __init__(
        self,
        z_dim: int = 16,
        vae_pth: str | Path = "cache/vae_step_411000.pth",
        dtype: torch.dtype = torch.float32,
        device: str | torch.device | int | None = None,
    ) -> None:
        spec = read_vae_spec(Path(vae_pth))
        channels = spec.tensors["post_quant_conv.weight"].shape[0]
        if channels != z_dim:
            why = f"has {channels} latent channels, not {z_dim}"
            raise InputError(str(vae_pth), None, why, f"give the file of {type(self).__name__}")
        self.device = torch.device(select_device("auto").torch_device if device is None else device)
        self.dtype = dtype
        self.model = spec.load(device=self.device, dtype_of=lambda *_: dtype)
        self._vae = VideoVAE(self.model)
        self.mean, scale = self._vae.mean.flatten(), self._vae.scale.flatten()
        self.std, self.scale = 1 / scale, [self.mean, scale]

    def encode(self, videos: Sequence[Tensor]) -> list[Tensor]:
        """Encodes videos [3,F,H,W] in [-1, 1] to float32 latents [Z,1+(F-1)//4,h,w]."""
        return [self._vae.encode(video) for video in videos]

    def decode(self, zs: Sequence[Tensor]) -> list[Tensor]:
        """Decodes latents [Z,f,h,w] to float32 videos [3,4f-3,H,W], clamped to [-1, 1]."""
        return [self._vae.decode(latent) for latent in zs]
