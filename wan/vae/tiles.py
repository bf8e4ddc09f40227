"""Decoding in tiles, whose borders are blended: less memory, not exact.

Sides, steps and weights are those of diffusers' tiled decoding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SIDE, STEP = 256, 192  # pixels of a tile, and from one to the next; what they share is blended
_BLEND = SIDE - STEP


def decode(
    decode_tile: Callable[[Tensor], Tensor], z_BZfhw: Tensor, scale: int, patch: int, out: Tensor
) -> None:
    """Decode into `out`.

    Args:
        decode_tile: Latents to pixels [B,3,F,H,W].
        z_BZfhw: The latents.
        scale: Sides of a latent, in pixels.
        patch: Rows and columns that are blended alike.
        out: [B,3,F,H,W]; pixels are not clamped.
    """
    above: dict[int, Tensor] = {}
    for top in range(0, z_BZfhw.shape[3], STEP // scale):
        left: Tensor | None = None
        for start in range(0, z_BZfhw.shape[4], STEP // scale):
            rows, columns = (slice(i, i + SIDE // scale) for i in (top, start))
            tile = decode_tile(z_BZfhw[:, :, :, rows, columns])
            if start in above:
                _blend(above[start], tile, 3, patch)
            if left is not None:
                _blend(left, tile, 4, patch)
            above[start], left = tile[..., -_BLEND:, :].clone(), tile[..., -_BLEND:].clone()
            y, x = top * scale, start * scale
            place = out[..., y : y + STEP, x : x + STEP]
            place.copy_(tile[..., : place.shape[3], : place.shape[4]])


def _blend(before: Tensor, tile: Tensor, dim: int, patch: int) -> None:
    """Fade from the end of a tile into the beginning of the next one, in place."""
    shared = min(before.shape[dim], tile.shape[dim])
    step = torch.arange(shared, device=tile.device) // patch * patch
    weight = (step.double() / shared).view(-1, *[1] * (4 - dim))
    begin = tile.narrow(dim, 0, shared)
    end = before.narrow(dim, before.shape[dim] - shared, shared)
    begin.mul_(weight.to(tile.dtype)).add_(end * (1 - weight).to(tile.dtype))


def kept_bytes(sides: tuple[int, int], frames: int) -> int:
    """For planning: what lives beside a tile that is decoded; 0 where there is one tile only.

    sides: of the video, (H, W).
    """
    if max(sides) <= SIDE:
        return 0
    height, width = sides
    ends = sum(min(SIDE, width - start) for start in range(0, width, STEP)) + min(SIDE, height)
    return (height * width + _BLEND * ends) * 3 * frames * 4
