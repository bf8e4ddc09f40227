"""The official class of Wan2.2's video autoencoder, that of ti2v-5B."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from wan.modules.vae2_1 import Wan2_1_VAE


class Wan2_2_VAE(Wan2_1_VAE):
    """Encodes and decodes videos; see `Wan2_1_VAE`.

    Args:
        z_dim, vae_pth, dtype, device: As for `Wan2_1_VAE`; the file is `Wan2.2_VAE.pth`.
        c_dim, dim_mult, temperal_downsample: No effect; the sizes are those of the file.
    """

    def __init__(
        self,
        z_dim: int = 48,
        c_dim: int = 160,
        vae_pth: str | Path = "Wan2.2_VAE.pth",
        dim_mult: Sequence[int] = (1, 2, 4, 4),
        temperal_downsample: Sequence[bool] = (False, True, True),
        dtype: torch.dtype = torch.float32,
        device: str | torch.device | int | None = None,
    ) -> None:
        super().__init__(z_dim, vae_pth, dtype, device)
