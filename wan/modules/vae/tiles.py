"""Tiled decoding with blended borders, which needs less memory and is not exact.

Tile sizes, strides and blend weights are those of diffusers' tiled decoding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SIDE, STEP = 256, 192  # size and stride of tiles in pixels; the overlap is blended
_BLEND = SIDE - STEP


def decode_tiles(
    decode_tile: Callable[[Tensor], Tensor], z_BZfhw: Tensor, scale: int, patch: int, out: Tensor
) -> None:
    """Decodes latents into `out`, a tile at a time.

    Args:
        decode_tile: Decodes latents to pixels [B,3,F,H,W].
        scale: Pixels per latent along height and width.
        patch: Number of neighbouring rows and columns with the same blend weight.
        out: [B,3,F,H,W]; pixels are not clamped.
    """
    tiles_above: dict[int, Tensor] = {}
    for top in range(0, z_BZfhw.shape[3], STEP // scale):
        left_tile: Tensor | None = None
        for start in range(0, z_BZfhw.shape[4], STEP // scale):
            rows, columns = (slice(i, i + SIDE // scale) for i in (top, start))
            tile = decode_tile(z_BZfhw[:, :, :, rows, columns])
            if start in tiles_above:
                _blend_edges(tiles_above[start], tile, 3, patch)
            if left_tile is not None:
                _blend_edges(left_tile, tile, 4, patch)
            tiles_above[start] = tile[..., -_BLEND:, :].clone()
            left_tile = tile[..., -_BLEND:].clone()
            y, x = top * scale, start * scale
            target = out[..., y : y + STEP, x : x + STEP]
            target.copy_(tile[..., : target.shape[3], : target.shape[4]])


def _blend_edges(previous: Tensor, tile: Tensor, dim: int, patch: int) -> None:
    """Blends the last rows or columns of a tile into the first ones of the next, in place."""
    overlap = min(previous.shape[dim], tile.shape[dim])
    step = torch.arange(overlap, device=tile.device) // patch * patch
    weight = (step.double() / overlap).view(-1, *[1] * (4 - dim))
    begin = tile.narrow(dim, 0, overlap)
    end = previous.narrow(dim, previous.shape[dim] - overlap, overlap)
    begin.mul_(weight.to(tile.dtype)).add_(end * (1 - weight).to(tile.dtype))


def estimate_tile_bytes(sides: tuple[int, int], frames: int) -> int:
    """Estimates the bytes of tiles and output held while a tile is decoded; 0 for a single tile.

    sides: Height and width of the video, in pixels.
    """
    if max(sides) <= SIDE:
        return 0
    height, width = sides
    border = sum(min(SIDE, width - start) for start in range(0, width, STEP)) + min(SIDE, height)
    return (height * width + _BLEND * border) * 3 * frames * 4
